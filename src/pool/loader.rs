//! From a model's configuration to an executor that answers.
//!
//! Runs on the load's thread; nothing is left running when it fails. Every source makes one
//! `Recipe`: a factory of identical replicas, and what the front needs to talk to them
//! (`SourceLoader::recipe` is the one place that knows which sources there are). The loader asks
//! the factory for all replicas or none, and hands it to the executor, which builds lost replicas
//! anew. A broken chat template does not stop a load: it is a warning here and an error of the chat
//! requests that need it. What is not here: the registry (`registry`), which models there are
//! (`config`).

use super::ledger::{DeviceId, MemorySource, ModelMemory};
use super::model::{
    EmbeddingMeta, LoadPhase, LoadedModel, LoadingModel, LoopRange, ModelMeta, RuntimeWatch,
    WindowRange,
};
use super::places::{NativePlaces, device_of};
use super::sizes::Estimate;
use super::{estimate, estimate_foreign, facts};
use crate::chat::Family;
use crate::config::{Embeddings, EngineConfig, FakeConfig, ModelConfig, ModelSource};
use crate::engine::arbiter::DeviceShare;
use crate::format::ModelFile;
use crate::model::{self, DeclaredPooling};
use crate::runtime::fake::{self, FakeRuntime, Pace};
use crate::runtime::foreign::{self, AbsentFactory, GiveUp};
use crate::runtime::native::{BackendKind, NativeRuntime, Place};
use crate::runtime::{ReplicaFactory, Runtime};
use crate::scheduler::{Executor, ExecutorContext, Metrics};
use crate::tokenizer::{ChatTemplate, Grammars, Tokenizer};
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// Where GGUF files keep the chat template.
const TEMPLATE_KEY: &str = "tokenizer.chat_template";

/// Makes models of their configurations.
pub trait ModelLoader: Send + Sync {
    /// What the model would hold, over all replicas; cheap. All zero when nobody knows.
    fn estimate(&self, config: &ModelConfig) -> Estimate;

    /// Why it cannot be loaded so, as far as that shows before; cheap.
    fn fault(&self, config: &ModelConfig) -> Option<String> {
        let _ = config;
        None
    }

    /// Bytes that the GPUs it may run on can hold; cheap.
    fn gpu_room(&self, config: &ModelConfig) -> Vec<(DeviceId, u64)> {
        let _ = config;
        Vec::new()
    }

    /// Makes all replicas and a started executor; tells its progress, and gives up when that is
    /// cancelled.
    ///
    /// # Errors
    /// In words for the operator; nothing is left running.
    fn load(
        &self,
        config: &ModelConfig,
        progress: &Arc<LoadingModel>,
    ) -> Result<LoadedModel, String>;
}

/// The loader of every source that a configuration can name.
pub struct SourceLoader {
    metrics: Arc<Metrics>,
    places: NativePlaces,
}

/// How the replicas of a model are made, and what the front needs to talk to them.
struct Recipe {
    /// Replica 0, when it was needed to know the rest.
    first: Option<Arc<dyn Runtime>>,
    factory: ReplicaFactory,
    /// Stands in for replicas that are not ours and do not answer yet.
    absent: Option<AbsentFactory>,
    /// Devices that the replicas are spread over, in turns.
    n_devices: u32,
    tokenizer: Option<Arc<Tokenizer>>,
    chat_template: Result<Arc<ChatTemplate>, String>,
    /// Its memory is that of one replica.
    meta: ModelMeta,
}

impl SourceLoader {
    /// Native models run on these kernels, or with `Cpu` where each one's `device` says; executors
    /// report to `metrics`.
    #[must_use]
    pub fn new(kind: BackendKind, metrics: Arc<Metrics>) -> Self {
        Self {
            metrics,
            places: NativePlaces::new(kind),
        }
    }

    fn recipe(
        &self,
        config: &ModelConfig,
        progress: &Arc<LoadingModel>,
        watch: &RuntimeWatch,
    ) -> Result<Recipe, String> {
        match &config.source {
            ModelSource::File(path) => native(path, config, self.places.shares(config)?, progress),
            ModelSource::Fake(fake) => Ok(stand_in(fake)),
            source @ (ModelSource::OpenaiRemote(_)
            | ModelSource::LlamaServer(_)
            | ModelSource::VllmServe(_)) => {
                let factory = foreign::factory(&config.name, source, give_up(progress, watch));
                let factory = factory.ok_or("no other program runs this model")?;
                let absent = foreign::absent(&config.name, source);
                Ok(elsewhere(source, factory, absent))
            }
        }
    }
}

impl ModelLoader for SourceLoader {
    fn estimate(&self, config: &ModelConfig) -> Estimate {
        let one = match &config.source {
            ModelSource::File(path) => {
                let one = estimate::of_file(path, &config.engine).unwrap_or_default();
                return self.places.estimate(one, config);
            }
            ModelSource::LlamaServer(child) => estimate_foreign::of_llama_server(child),
            ModelSource::VllmServe(child) => estimate_foreign::of_vllm_serve(child),
            ModelSource::Fake(_) | ModelSource::OpenaiRemote(_) => Estimate::default(),
        };
        Estimate {
            memory: one.memory.times(config.lifecycle.replicas),
            ..one
        }
    }

    fn fault(&self, config: &ModelConfig) -> Option<String> {
        match &config.source {
            ModelSource::File(path) => {
                let fault = estimate::fault_of_file(path, &config.engine);
                fault.or_else(|| self.places.of(&config.engine).err())
            }
            _ => None,
        }
    }

    fn gpu_room(&self, config: &ModelConfig) -> Vec<(DeviceId, u64)> {
        self.places.gpu_room(config)
    }

    fn load(
        &self,
        config: &ModelConfig,
        progress: &Arc<LoadingModel>,
    ) -> Result<LoadedModel, String> {
        let watch = RuntimeWatch::default();
        let recipe = self.recipe(config, progress, &watch)?;
        let runtimes = replicas(&recipe, config.lifecycle.replicas, progress)?;
        progress.enter(LoadPhase::Starting);
        for runtime in &runtimes {
            watch.add(runtime);
        }
        // Before the first request, which makes them larger.
        let n_resident_bytes = runtimes.iter().filter_map(|one| one.resident_bytes());
        let n_resident_bytes = n_resident_bytes.reduce(u64::saturating_add);
        let mut context = ExecutorContext::new(config.name.clone(), Arc::clone(&self.metrics));
        context.factory = Some(watched(Arc::clone(&recipe.factory), watch.clone()));
        let executor = Executor::with_context(runtimes, config.executor.clone(), context);
        executor
            .start()
            .map_err(|error| format!("the driver thread cannot be started: {error}"))?;
        let most_on_one = config.lifecycle.replicas.div_ceil(recipe.n_devices);
        let memory = recipe.meta.memory.times(most_on_one);
        let memory = measured(memory, n_resident_bytes);
        Ok(LoadedModel {
            name: config.name.clone(),
            aliases: config.aliases.clone(),
            created: SystemTime::now(),
            context_length: executor.context_length(),
            executor: Arc::new(executor),
            grammars: recipe.tokenizer.clone().map(Grammars::new).map(Arc::new),
            tokenizer: recipe.tokenizer,
            chat_template: recipe.chat_template,
            meta: ModelMeta {
                memory,
                tool_family: config.tool_format.as_deref().and_then(Family::parse),
                ..recipe.meta
            },
            runtimes: watch,
        })
    }
}

/// A child that starts is given up when its load is cancelled, or its model is unloaded meanwhile.
fn give_up(progress: &Arc<LoadingModel>, watch: &RuntimeWatch) -> GiveUp {
    let (progress, watch) = (Arc::clone(progress), watch.clone());
    Arc::new(move || progress.is_cancelled() || watch.is_stopping())
}

/// What is built anew is watched like what was loaded.
fn watched(factory: ReplicaFactory, watch: RuntimeWatch) -> ReplicaFactory {
    Arc::new(move |index| {
        let runtime = factory(index)?;
        watch.add(&runtime);
        Ok(runtime)
    })
}

/// What processes of ours hold after the load, where they held nothing before, in the place of what was
/// estimated: KV as estimated, the rest as weights and scratch. Buffers of passes hold memory only once
/// traffic has filled them, so that scratch is never less than was estimated. An estimate for a GPU stays one.
fn measured(estimate: ModelMemory, resident_bytes: Option<u64>) -> ModelMemory {
    let Some(bytes) = resident_bytes.filter(|_| estimate.device == DeviceId::Cpu) else {
        return estimate;
    };
    let kv_bytes = estimate.kv_bytes.min(bytes);
    let weight_bytes = estimate.weight_bytes.min(bytes - kv_bytes);
    ModelMemory {
        weight_bytes,
        kv_bytes,
        scratch_bytes: (bytes - kv_bytes - weight_bytes).max(estimate.scratch_bytes),
        source: MemorySource::MeasuredLoadDelta,
        ..estimate
    }
}

/// All replicas or none: those that were made are dropped, which ends them, when one fails. Only servers
/// that somebody else runs may be absent, as long as one of them is there: to wait for them is what their
/// circuit breakers are for.
fn replicas(
    recipe: &Recipe,
    n_replicas: u32,
    progress: &LoadingModel,
) -> Result<Vec<Arc<dyn Runtime>>, String> {
    let mut made: Vec<Arc<dyn Runtime>> = recipe.first.iter().cloned().collect();
    let mut first_why = None;
    for index in made.len()..n_replicas as usize {
        if progress.is_cancelled() {
            return Err("the load was cancelled".to_owned());
        }
        let told = |why: String| match n_replicas {
            1 => why,
            n => format!("replica {} of {n}: {why}", index + 1),
        };
        match (recipe.factory)(index) {
            Ok(runtime) => made.push(runtime),
            Err(why) => {
                let absent = recipe.absent.as_ref();
                let stand_in = absent.and_then(|absent| absent(index, &why));
                made.push(stand_in.ok_or_else(|| told(why.clone()))?);
                first_why.get_or_insert(told(why));
            }
        }
    }
    let n_there = made.iter().filter(|one| one.status().alive).count();
    if let Some(why) = first_why
        && n_there == 0
    {
        return Err(why);
    }
    match progress.is_cancelled() {
        true => Err("the load was cancelled".to_owned()),
        false => Ok(made),
    }
}

/// A model that another program runs: text goes there and comes back, so nothing of it is known here.
fn elsewhere(
    source: &ModelSource,
    factory: ReplicaFactory,
    absent: Option<AbsentFactory>,
) -> Recipe {
    let backend = source.backend();
    let embeddings = match source {
        ModelSource::LlamaServer(child) => child.embeddings(),
        ModelSource::OpenaiRemote(remote) => remote.embeddings,
        ModelSource::VllmServe(child) => child.embeddings(),
        ModelSource::File(_) | ModelSource::Fake(_) => Embeddings::No,
    };
    let (file, title, memory) = match source {
        ModelSource::LlamaServer(child) => {
            let memory = estimate_foreign::of_llama_server(child).memory;
            (child.file.display().to_string(), String::new(), memory)
        }
        ModelSource::OpenaiRemote(remote) => {
            (String::new(), remote.model.clone(), Default::default())
        }
        ModelSource::VllmServe(child) => {
            let memory = estimate_foreign::of_vllm_serve(child).memory;
            (String::new(), child.model.clone(), memory)
        }
        ModelSource::File(_) | ModelSource::Fake(_) => Default::default(),
    };
    Recipe {
        first: None,
        factory,
        absent,
        n_devices: 1,
        tokenizer: None,
        chat_template: Err("the program that runs the model has it".to_owned()),
        meta: ModelMeta {
            title,
            file,
            fingerprint: format!("fp_{backend}"),
            backend: backend.to_owned(),
            embeds_only: embeddings == Embeddings::Only,
            memory,
            ..ModelMeta::default()
        },
    }
}

/// A stand-in that echoes bytes.
fn stand_in(config: &FakeConfig) -> Recipe {
    let tokenizer = Arc::new(Tokenizer::bytes());
    let pace = match config.tick.is_zero() {
        true => Pace::AtOnce,
        false => Pace::Threaded(config.tick),
    };
    let capability = fake::capability(config.max_inflight);
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}";
    let vocabulary = Arc::clone(&tokenizer);
    let factory = move |_| {
        let script = Box::new(fake::echo);
        let vocabulary = Some(Arc::clone(&vocabulary));
        let runtime = FakeRuntime::new(capability, pace, vocabulary, script);
        Ok(Arc::new(runtime) as Arc<dyn Runtime>)
    };
    Recipe {
        first: None,
        factory: Arc::new(factory),
        absent: None,
        n_devices: 1,
        chat_template: ChatTemplate::compile(template, "", "")
            .map(Arc::new)
            .map_err(|error| error.to_string()),
        meta: ModelMeta {
            architecture: "fake".to_owned(),
            title: "stand-in that echoes the prompt".to_owned(),
            vocab_size: tokenizer.vocab_size() as u32,
            trained_context_length: capability.context_length,
            fingerprint: "fp_fake".to_owned(),
            backend: "fake".to_owned(),
            ..ModelMeta::default()
        },
        tokenizer: Some(tokenizer),
    }
}

/// What the replicas of a native model have in common.
struct Native {
    path: PathBuf,
    name: String,
    engine: EngineConfig,
    /// In turns; each replica takes a seat there.
    places: Vec<(BackendKind, DeviceShare)>,
    tokenizer: Arc<Tokenizer>,
    n_replicas: u32,
    /// Of the load; replicas that are built anew later have none.
    progress: Mutex<Option<Arc<LoadingModel>>>,
    /// Open while the model loads; a replica that is built anew opens it again.
    file: Mutex<Option<Arc<ModelFile>>>,
}

impl Native {
    fn make(&self, index: usize) -> Result<NativeRuntime, String> {
        let kept = self.file.lock().clone();
        let file = match kept {
            Some(file) => file,
            None => Arc::new(model::open(&self.path).map_err(|error| error.to_string())?),
        };
        let progress = self.progress.lock().clone();
        let mut report = |done: u64, total: u64| {
            if let Some(progress) = &progress {
                progress.enter(LoadPhase::Reading);
                let before = total.saturating_mul(index as u64);
                let all = total.saturating_mul(u64::from(self.n_replicas));
                progress.report(before.saturating_add(done), all);
            }
        };
        let (kind, share) = &self.places[index % self.places.len()];
        NativeRuntime::from_file(
            &file,
            Arc::clone(&self.tokenizer),
            &self.name,
            &self.engine,
            Place {
                kind: *kind,
                seat: Some(share.seat()),
            },
            &mut report,
        )
        .map_err(|error| error.to_string())
    }
}

/// A model file in the built-in engine. The replicas share the tokenizer and, while they load, the
/// mapped file; weights and KV are each one's own.
fn native(
    path: &Path,
    config: &ModelConfig,
    places: Vec<(BackendKind, DeviceShare)>,
    progress: &Arc<LoadingModel>,
) -> Result<Recipe, String> {
    let file = model::open(path).map_err(|error| error.to_string())?;
    let tokenizer = Tokenizer::from_gguf(&file).map_err(|error| error.to_string())?;
    let tokenizer = Arc::new(tokenizer);
    let chat_template = chat_template(&file, &tokenizer);
    let file = Arc::new(file);
    let native = Arc::new(Native {
        path: path.to_owned(),
        name: config.name.clone(),
        engine: config.engine.clone(),
        places,
        tokenizer: Arc::clone(&tokenizer),
        n_replicas: config.lifecycle.replicas,
        progress: Mutex::new(Some(Arc::clone(progress))),
        file: Mutex::new(Some(Arc::clone(&file))),
    });
    let first = native.make(0)?;
    if let Err(why) = &chat_template
        && first.spec().encoder.is_none()
    {
        tracing::warn!(model = %config.name, %why, "chat requests will be refused");
    }
    let device = device_of(native.places[0].0);
    let n_devices = native.places.len() as u32;
    let meta = native_meta(path, &file, config, (&first, device));
    let for_factory = Arc::clone(&native);
    let last = config.lifecycle.replicas.saturating_sub(1) as usize;
    if last == 0 {
        native.let_go();
    }
    let factory = move |index: usize| {
        let runtime = for_factory.make(index);
        if index >= last {
            for_factory.let_go();
        }
        runtime.map(|runtime| Arc::new(runtime) as Arc<dyn Runtime>)
    };
    Ok(Recipe {
        first: Some(Arc::new(first)),
        factory: Arc::new(factory),
        absent: None,
        n_devices,
        tokenizer: Some(tokenizer),
        chat_template,
        meta,
    })
}

impl Native {
    /// The load is over: the file is unmapped, progress is nobody's business any more.
    fn let_go(&self) {
        *self.file.lock() = None;
        *self.progress.lock() = None;
    }
}

fn native_meta(
    path: &Path,
    file: &ModelFile,
    config: &ModelConfig,
    (runtime, device): (&NativeRuntime, DeviceId),
) -> ModelMeta {
    let spec = runtime.spec();
    let memory = runtime.memory();
    ModelMeta {
        architecture: spec.architecture.clone(),
        title: spec.name.clone(),
        file: path.display().to_string(),
        file_bytes: file.file_len(),
        vocab_size: spec.vocab_size,
        hidden_size: spec.d_model,
        n_parameters: facts::n_parameters(file),
        quantization: facts::quantization(file),
        trained_context_length: spec.context_length,
        fingerprint: fingerprint(file, &config.engine, runtime.backend_name()),
        tool_family: None,
        loops: LoopRange {
            default: runtime.plan().default_loops,
            max: runtime.plan().max_loops,
        },
        exit_rules: runtime.limits().exit_rules,
        embeds_only: false,
        embedding: runtime.limits().pooling.map(|pooling| EmbeddingMeta {
            pooling,
            n_dimensions: spec.d_model,
            is_purpose: spec.encoder.is_some() || spec.pooling != DeclaredPooling::None,
            is_only: spec.encoder.is_some(),
        }),
        windows: match spec.encoder {
            Some(_) => WindowRange::default(),
            None => WindowRange {
                default: config.engine.cache_window,
                max: runtime.limits().context_length,
            },
        },
        backend: format!("native ({})", runtime.backend_name()),
        memory: ModelMemory {
            device,
            weight_bytes: memory.weight_bytes,
            kv_bytes: memory.kv_bytes,
            scratch_bytes: memory.scratch_bytes,
            source: MemorySource::MeasuredLoadDelta,
        },
    }
}

/// The compiled template, or why there is none.
fn chat_template(file: &ModelFile, tokenizer: &Tokenizer) -> Result<Arc<ChatTemplate>, String> {
    let source = file
        .optional_str(TEMPLATE_KEY)
        .map_err(|error| error.to_string())?
        .ok_or_else(|| format!("the model file has no chat template (`{TEMPLATE_KEY}`)"))?;
    let text = |token: Option<u32>| {
        let bytes = token.map(|token| tokenizer.token_bytes(token));
        String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
    };
    let (bos, eos) = (text(tokenizer.bos()), text(tokenizer.eos()));
    ChatTemplate::compile(source, &bos, &eos)
        .map(Arc::new)
        .map_err(|error| format!("the model's chat template is broken: {error}"))
}

/// FNV-1a over what can change the answer to a seed: version, kernels, configured depth and types,
/// shapes and kinds of all tensors, file length. Not over the weights: reading them all would cost seconds.
fn fingerprint(file: &ModelFile, config: &EngineConfig, backend_name: &str) -> String {
    let mut text = format!(
        "{} {backend_name} {}",
        env!("CARGO_PKG_VERSION"),
        file.file_len()
    );
    text.push_str(&format!("{:?} {:?}", config.loops, config.quantize));
    for tensor in file.tensors() {
        text.push_str(&format!("{tensor:?}"));
    }
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("fp_{:012x}", hash >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(factory: ReplicaFactory) -> Recipe {
        Recipe {
            first: None,
            factory,
            absent: None,
            n_devices: 1,
            tokenizer: None,
            chat_template: Err(String::new()),
            meta: ModelMeta::default(),
        }
    }

    #[test]
    fn a_replica_that_fails_tears_the_others_down() {
        let watch = RuntimeWatch::default();
        let factory: ReplicaFactory = Arc::new(|index| match index {
            0 | 1 => Ok(Arc::new(FakeRuntime::stepped(1)) as Arc<dyn Runtime>),
            _ => Err("no more".to_owned()),
        });
        let recipe = recipe(watched(factory, watch.clone()));
        let progress = LoadingModel::new("m");
        assert_eq!(
            replicas(&recipe, 2, &progress).map(|made| made.len()),
            Ok(2)
        );
        let failed = replicas(&recipe, 3, &progress).map(|made| made.len());
        assert_eq!(failed, Err("replica 3 of 3: no more".to_owned()));
        assert_eq!(watch.n_left(), 0);
        progress.cancel();
        let cancelled = replicas(&recipe, 1, &progress).map(|made| made.len());
        assert_eq!(cancelled, Err("the load was cancelled".to_owned()));
    }
}

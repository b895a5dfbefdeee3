//! From a model's configuration to an executor that answers.
//!
//! Runs on the caller's thread; nothing is left running when it fails. A broken chat template does
//! not stop a load: it is a warning here and an error of the chat requests that need it. What is
//! not here: the registry (`pool`), which models there are (`config`).

use super::{LoadedModel, LoopRange, ModelMeta, WindowRange};
use crate::config::{EngineConfig, FakeConfig, ModelConfig, ModelSource};
use crate::format::{FormatError, ModelFile};
use crate::model;
use crate::runtime::Runtime;
use crate::runtime::fake::{self, FakeRuntime, Pace};
use crate::runtime::native::{BackendKind, LoadError as RuntimeError, NativeRuntime};
use crate::scheduler::{Executor, ExecutorContext, Metrics};
use crate::tokenizer::{ChatTemplate, Tokenizer};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

/// Where GGUF files keep the chat template.
const TEMPLATE_KEY: &str = "tokenizer.chat_template";

/// Why a model was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file, or what it asks for.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// Soon.
    #[error("the backend `{0}` is not built yet")]
    NotBuilt(String),
    /// The driver thread could not be made.
    #[error("the driver thread cannot be started: {0}")]
    Thread(#[from] std::io::Error),
}

impl From<FormatError> for LoadError {
    fn from(error: FormatError) -> Self {
        Self::Runtime(error.into())
    }
}

/// Makes the runtime that the configuration asks for and starts its executor. `progress` hears
/// bytes done of total.
///
/// # Errors
/// See [`LoadError`].
pub fn load(
    config: &ModelConfig,
    kind: BackendKind,
    metrics: &Arc<Metrics>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<LoadedModel, LoadError> {
    let parts = match &config.source {
        ModelSource::File(path) => load_file(path, config, kind, progress)?,
        ModelSource::Fake(fake) => fake_parts(fake),
        ModelSource::OpenaiRemote(_) | ModelSource::LlamaServer(_) | ModelSource::VllmServe(_) => {
            let backend = config.source.backend().to_owned();
            return Err(LoadError::NotBuilt(backend));
        }
    };
    let context = ExecutorContext::new(config.name.clone(), Arc::clone(metrics));
    let executor = Executor::with_context(vec![parts.runtime], config.executor.clone(), context);
    executor.start()?;
    Ok(LoadedModel {
        name: config.name.clone(),
        aliases: config.aliases.clone(),
        created: SystemTime::now(),
        context_length: executor.context_length(),
        executor: Arc::new(executor),
        tokenizer: Some(parts.tokenizer),
        chat_template: parts.chat_template,
        meta: parts.meta,
    })
}

/// A runtime and what the front needs to talk to it.
struct Parts {
    runtime: Arc<dyn Runtime>,
    tokenizer: Arc<Tokenizer>,
    chat_template: Result<Arc<ChatTemplate>, String>,
    meta: ModelMeta,
}

/// A stand-in that echoes bytes.
fn fake_parts(config: &FakeConfig) -> Parts {
    let tokenizer = Arc::new(Tokenizer::bytes());
    let pace = match config.tick.is_zero() {
        true => Pace::AtOnce,
        false => Pace::Threaded(config.tick),
    };
    let capability = fake::capability(config.max_inflight);
    let script = Box::new(fake::echo);
    let runtime = FakeRuntime::new(capability, pace, Some(Arc::clone(&tokenizer)), script);
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}";
    Parts {
        runtime: Arc::new(runtime),
        chat_template: ChatTemplate::compile(template, "", "")
            .map(Arc::new)
            .map_err(|error| error.to_string()),
        meta: ModelMeta {
            architecture: "fake".to_owned(),
            title: "stand-in that echoes the prompt".to_owned(),
            vocab_size: tokenizer.vocab_size() as u32,
            trained_context_length: capability.context_length,
            fingerprint: "fp_fake".to_owned(),
            ..ModelMeta::default()
        },
        tokenizer,
    }
}

/// A GGUF file in the built-in engine.
fn load_file(
    path: &Path,
    config: &ModelConfig,
    kind: BackendKind,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Parts, LoadError> {
    let file = model::open(path).map_err(RuntimeError::from)?;
    let tokenizer = Arc::new(Tokenizer::from_gguf(&file)?);
    let chat_template = chat_template(&file, &tokenizer);
    if let Err(why) = &chat_template {
        tracing::warn!(model = %config.name, %why, "chat requests will be refused");
    }
    let runtime = NativeRuntime::from_file(
        &file,
        Arc::clone(&tokenizer),
        &config.name,
        &config.engine,
        kind,
        progress,
    )?;
    let spec = runtime.spec();
    let meta = ModelMeta {
        architecture: spec.architecture.clone(),
        title: spec.name.clone(),
        file: path.display().to_string(),
        file_bytes: file.file_len(),
        vocab_size: spec.vocab_size,
        trained_context_length: spec.context_length,
        fingerprint: fingerprint(&file, &config.engine, runtime.backend_name()),
        loops: LoopRange {
            default: runtime.plan().default_loops,
            max: runtime.plan().max_loops,
        },
        exit_rules: runtime.limits().exit_rules,
        windows: WindowRange {
            default: config.engine.cache_window,
            max: runtime.limits().context_length,
        },
    };
    Ok(Parts {
        runtime: Arc::new(runtime),
        tokenizer,
        chat_template,
        meta,
    })
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

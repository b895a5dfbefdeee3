//! The built-in engine as a runtime: opens the file, loads weights into a backend, starts the
//! engine thread.
//!
//! A `NativeRuntime` is a thin adapter: loading happens on the caller's thread, everything after it
//! on the thread `engine-NAME`, which [`crate::engine`] owns. What is not here: any decision about
//! jobs.

use super::{Capability, Feature, Features, LoopCost, Runtime, RuntimeStatus};
use crate::backend::cpu::CpuBackend;
use crate::backend::cuda::CudaBackend;
use crate::backend::reference::ReferenceBackend;
use crate::backend::{Backend, BackendError, MemoryUse};
use crate::config::EngineConfig;
use crate::engine::arbiter::Seat;
use crate::engine::cost::Part;
use crate::engine::{Engine, EngineError, EngineHandle, EngineLimits, EngineParts};
use crate::format::{FormatError, ModelFile};
use crate::model::{self, LoadOptions, Model, ModelError, ModelSpec, Plan, requantize};
use crate::request::{GenerationRequest, Job, PinError, Prefix, PrefixId, RequestId};
use crate::tokenizer::Tokenizer;
use crossbeam_channel::Sender;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Which kernels run a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendKind {
    /// The fast kernels, on all threads given.
    #[default]
    Cpu,
    /// The plain f32 oracle: slow, and the yardstick.
    Reference,
    /// The kernels of a GPU.
    Cuda {
        /// Its number for the driver.
        number: u32,
        /// Passes that come again are captured once and replayed.
        graphs: bool,
    },
}

/// Where a model runs.
#[derive(Debug, Default)]
pub struct Place {
    /// Which kernels run it.
    pub kind: BackendKind,
    /// Its seat at a device that other models use too; None = it has the device to itself.
    pub seat: Option<Seat>,
}

impl From<BackendKind> for Place {
    fn from(kind: BackendKind) -> Self {
        Self { kind, seat: None }
    }
}

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be read, is broken, or lacks a tokenizer.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The model is not one we can run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The backend could not start.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The sizes do not fit, or the engine could not start.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// One replica of a model on the built-in engine.
pub struct NativeRuntime {
    engine: EngineHandle,
    tokenizer: Arc<Tokenizer>,
    spec: ModelSpec,
    plan: Plan,
    memory: MemoryUse,
}

impl NativeRuntime {
    /// Loads a GGUF file or a Hugging Face directory and starts its engine. `progress` hears bytes done of total, on this thread.
    ///
    /// # Errors
    /// See [`LoadError`]; nothing is left running.
    pub fn load(
        path: &Path,
        config: &EngineConfig,
        place: impl Into<Place>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, LoadError> {
        let file = model::open(path)?;
        let tokenizer = Arc::new(Tokenizer::from_gguf(&file)?);
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Self::from_file(&file, tokenizer, &name, config, place, progress)
    }

    /// The same from an open file, with a tokenizer that replicas may share. `name` ends up in the
    /// thread's name.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn from_file(
        file: &ModelFile,
        tokenizer: Arc<Tokenizer>,
        name: &str,
        config: &EngineConfig,
        place: impl Into<Place>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, LoadError> {
        let Place { kind, seat } = place.into();
        let mut backend = open_backend(kind, config)?;
        let options = LoadOptions {
            loops: config.loops,
            quantize: config.quantize.map(requantize::dtype_of),
        };
        let model = Model::load_with(file, &options, backend.as_mut(), progress)?;
        let (spec, plan) = (model.spec.clone(), model.plan.clone());
        let engine = Engine::new(EngineParts {
            backend,
            model,
            end_tokens: tokenizer.end_tokens().to_vec(),
            config: config.clone(),
        })?;
        let engine = match seat {
            Some(seat) => engine.with_seat(seat),
            None => engine,
        };
        let memory = engine.memory();
        Ok(Self {
            engine: engine.start(name)?,
            tokenizer,
            spec,
            plan,
            memory,
        })
    }

    /// Sizes and switches of the model.
    #[must_use]
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Its segments, default and most loops.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Sizes of the engine.
    #[must_use]
    pub fn limits(&self) -> &EngineLimits {
        self.engine.limits()
    }

    /// Which kernels run, like `cpu avx2 x2`.
    #[must_use]
    pub fn backend_name(&self) -> &str {
        self.engine.backend_name()
    }

    /// Bytes that the backend holds.
    #[must_use]
    pub fn memory(&self) -> MemoryUse {
        self.memory
    }

    /// Why a request can never run here; None when it can. `submit` checks it too.
    #[must_use]
    pub fn refusal(&self, request: &GenerationRequest) -> Option<String> {
        self.engine.limits().refusal(request, &self.plan)
    }
}

/// A backend without weights.
///
/// # Errors
/// When the device or its kernels cannot be used.
pub fn open_backend(
    kind: BackendKind,
    config: &EngineConfig,
) -> Result<Box<dyn Backend>, BackendError> {
    Ok(match kind {
        BackendKind::Cpu => Box::new(CpuBackend::new(config.threads)?),
        BackendKind::Reference => Box::new(ReferenceBackend::new()),
        BackendKind::Cuda { number, graphs } => {
            Box::new(CudaBackend::open(number as usize, graphs)?)
        }
    })
}

/// What a token costs: as measured, once every part of the plan was; before that in blocks. Those of
/// a model have one shape, so their number is nearly what a pass costs, and embedding and logits,
/// left out then, are small beside the blocks of any model worth looping.
fn loop_cost(plan: &Plan, measured: impl Fn(Part) -> Option<Duration>) -> LoopCost {
    let default_loops = plan.default_loops;
    let n_blocks = |blocks: &Range<u32>| f64::from(blocks.end - blocks.start);
    let mean_ms = |part, exists: bool| match exists {
        true => Some(measured(part)?.as_secs_f64() * 1e3),
        false => Some(0.0),
    };
    let in_time = || {
        let prelude = mean_ms(Part::Prelude, !plan.prelude.is_empty())?;
        let coda = mean_ms(Part::Coda, !plan.coda.is_empty())?;
        Some(LoopCost {
            fixed_ms: prelude + coda + mean_ms(Part::Head, true)?,
            per_loop_ms: mean_ms(Part::Core, true)?,
            default_loops,
        })
    };
    in_time().unwrap_or_else(|| LoopCost {
        fixed_ms: n_blocks(&plan.prelude) + n_blocks(&plan.coda),
        per_loop_ms: n_blocks(&plan.core),
        default_loops,
    })
}

impl Runtime for NativeRuntime {
    fn capability(&self) -> Capability {
        let limits = self.engine.limits();
        Capability {
            max_inflight: limits.max_sequences,
            context_length: limits.context_length,
            kv_capacity_tokens: limits.kv_tokens,
            can_cancel: true,
            can_park: true,
        }
    }

    fn capabilities(&self) -> Features {
        let limits = self.engine.limits();
        let all = match limits.generates {
            true => Features::native(),
            false => Features::native_encoder(),
        };
        match limits.pooling {
            Some(_) => all,
            None => all.without(Feature::Embeddings),
        }
    }

    fn submit(&self, job: Job) {
        self.engine.submit(job);
    }

    fn cancel(&self, id: RequestId) {
        self.engine.cancel(id);
    }

    fn park(&self, id: RequestId) {
        self.engine.park(id);
    }

    fn resume(&self, id: RequestId) {
        self.engine.resume(id);
    }

    fn pin_prefix(&self, prefix: Prefix, answer: Sender<Result<u32, PinError>>) {
        self.engine.pin(prefix, answer);
    }

    fn unpin_prefix(&self, id: PrefixId) {
        self.engine.unpin(id);
    }

    fn status(&self) -> RuntimeStatus {
        let now = self.engine.stats().snapshot();
        RuntimeStatus {
            alive: now.alive,
            running: now.running,
            waiting: now.waiting,
            parked: now.parked,
            kv_pages_total: self.engine.limits().n_pages,
            kv_pages_used: now.pages_used,
            kv_pages_cached: now.pages_cached,
            kv_pages_pinned: now.pages_pinned,
            preemptions: now.preemptions,
            prefix_queries: now.prefix_queries,
            prefix_hits: now.prefix_hits,
            loop_iterations: now.loop_iterations,
            loop_iterations_saved: now.loop_iterations_saved,
            batch_rows: now.batch_rows,
            row_counts: now.row_counts,
            quanta: now.quanta,
            time_in_steps: now.time_in_steps,
            time_in_passes: now.time_in_passes,
            step_age: now.step_age,
        }
    }

    fn death(&self) -> Option<String> {
        self.engine.stats().death()
    }

    fn kv_room(&self, loops: u32) -> (u32, u32) {
        let groups = |loops: u32| self.plan.kv_groups(loops.min(self.plan.max_loops)) as u32;
        (groups(loops), groups(self.plan.default_loops))
    }

    fn loop_cost(&self) -> Option<LoopCost> {
        let stats = self.engine.stats();
        (self.plan.max_loops > 1).then(|| loop_cost(&self.plan, |part| stats.mean_pass(part)))
    }

    fn tokenizer(&self) -> Option<Arc<Tokenizer>> {
        Some(Arc::clone(&self.tokenizer))
    }

    fn shutdown(&self) {
        self.engine.shutdown();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_cost_blocks_until_every_part_was_measured() {
        let plan = Plan::looped(1, 3, 2, 4, 8);
        let cost = |known: &[(Part, u64)]| {
            loop_cost(&plan, |part| {
                let found = known.iter().find(|(known, _)| *known == part);
                found.map(|(_, ms)| Duration::from_millis(*ms))
            })
        };
        let blocks = LoopCost {
            fixed_ms: 3.0,
            per_loop_ms: 3.0,
            default_loops: 4,
        };
        assert_eq!(cost(&[]), blocks);
        let mut known = vec![(Part::Prelude, 5), (Part::Core, 20), (Part::Coda, 10)];
        assert_eq!(cost(&known), blocks);
        known.push((Part::Head, 7));
        let measured = LoopCost {
            fixed_ms: 22.0,
            per_loop_ms: 20.0,
            default_loops: 4,
        };
        assert_eq!(cost(&known), measured);
        // A plan that is all core needs no other segments.
        let measured = loop_cost(&Plan::looped(0, 2, 0, 2, 4), |part| {
            let exists = matches!(part, Part::Core | Part::Head);
            exists.then_some(Duration::from_millis(4))
        });
        assert_eq!((measured.fixed_ms, measured.per_loop_ms), (4.0, 4.0));
    }
}

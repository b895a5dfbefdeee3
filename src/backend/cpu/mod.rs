//! The CPU backend: quantized weights in panels, int8 activations, paged attention, own threads.
//! (overview: being written)

mod attention;
mod blocks;
mod buffer;
mod kernels;
mod lanes;
mod layout;
mod ops;
mod panels;
mod path;
mod state;
mod step;
mod threads;

pub use path::{PATH_VARIABLE, Path};

use self::kernels::Kernels;
use self::panels::Matrix;
use self::state::State;
use self::step::Step;
use self::threads::Threads;
use super::{
    AttendOp, AttentionOutputOp, Backend, BackendError, FeedForwardOp, LogitsOp, MatrixId,
    MemoryUse, PageId, Pass, QkvOp, RopeId, RopeTable, StateGeometry, TensorData, VectorId,
};

/// How to build a [`CpuBackend`].
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuBackendBuilder {
    threads: Option<usize>,
    path: Option<Path>,
}

impl CpuBackendBuilder {
    /// Threads that compute, the caller included; by default as many as the machine gives us.
    #[must_use]
    pub fn threads(mut self, n_threads: usize) -> Self {
        self.threads = Some(n_threads);
        self
    }

    /// Forces an instruction set (before the environment's `TINYLOOP_CPU`).
    #[must_use]
    pub fn path(mut self, path: Path) -> Self {
        self.path = Some(path);
        self
    }

    /// Chooses the kernels and starts the worker threads.
    ///
    /// # Errors
    /// When the machine lacks a forced instruction set or refuses a thread.
    pub fn build(self) -> Result<CpuBackend, BackendError> {
        let forced = match self.path {
            Some(path) => Some(path),
            None => Path::forced()?,
        };
        let (path, kernels) = path::choose(forced)?;
        let available = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = Threads::start(self.threads.unwrap_or_else(available).max(1))?;
        Ok(CpuBackend {
            threads,
            path,
            kernels,
            matrices: Vec::new(),
            vectors: Vec::new(),
            ropes: Vec::new(),
            state: None,
        })
    }
}

/// The backend. See the module doc.
pub struct CpuBackend {
    threads: Threads,
    path: Path,
    kernels: &'static Kernels,
    matrices: Vec<Matrix>,
    vectors: Vec<Vec<f32>>,
    ropes: Vec<RopeTable>,
    /// Set by `allocate`.
    state: Option<State>,
}

impl CpuBackend {
    /// A backend on `threads` threads (all that the machine gives us when None), on the best
    /// instruction set or the one that `TINYLOOP_CPU` names.
    ///
    /// # Errors
    /// See [`CpuBackendBuilder::build`].
    pub fn new(threads: Option<usize>) -> Result<Self, BackendError> {
        CpuBackendBuilder {
            threads,
            path: None,
        }
        .build()
    }

    /// Starts from defaults.
    #[must_use]
    pub fn builder() -> CpuBackendBuilder {
        CpuBackendBuilder::default()
    }

    /// The view for one operation, and the threads.
    fn step(&mut self) -> Result<(Step<'_>, &Threads), BackendError> {
        let state = self.state.as_mut().ok_or_else(not_allocated)?;
        Ok((
            Step::new(self.kernels, &self.matrices, &self.vectors, state),
            &self.threads,
        ))
    }
}

fn not_allocated() -> BackendError {
    BackendError::Device("an operation before `allocate`".to_owned())
}

impl Backend for CpuBackend {
    fn name(&self) -> String {
        format!("cpu {} x{}", self.path, self.threads.n_threads())
    }

    fn load_matrix(&mut self, tensor: &TensorData<'_>) -> Result<MatrixId, BackendError> {
        self.matrices
            .push(Matrix::pack(tensor, self.kernels.lanes, &self.threads)?);
        Ok(MatrixId(self.matrices.len() as u32 - 1))
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<VectorId, BackendError> {
        self.vectors.push(values.to_vec());
        Ok(VectorId(self.vectors.len() as u32 - 1))
    }

    fn load_rope(&mut self, table: &RopeTable) -> Result<RopeId, BackendError> {
        self.ropes.push(table.clone());
        Ok(RopeId(self.ropes.len() as u32 - 1))
    }

    fn allocate(&mut self, geometry: &StateGeometry) -> Result<(), BackendError> {
        // The old state goes first, so that both never exist at once.
        self.state = None;
        let n_threads = self.threads.n_threads();
        self.state = Some(State::allocate(
            geometry,
            self.kernels.lanes,
            n_threads,
            &self.ropes,
        )?);
        Ok(())
    }

    fn memory(&self) -> MemoryUse {
        let matrices = self.matrices.iter().map(|matrix| matrix.bytes.n_bytes());
        let vectors = self.vectors.iter().map(|vector| vector.len() as u64 * 4);
        MemoryUse {
            weight_bytes: matrices.chain(vectors).sum(),
            ..self.state.as_ref().map(State::memory).unwrap_or_default()
        }
    }

    fn begin_pass(&mut self, pass: &Pass) -> Result<(), BackendError> {
        let state = self.state.as_mut().ok_or_else(not_allocated)?;
        state.begin_pass(pass)?;
        for (rope, angles) in self.ropes.iter().zip(&mut state.angles) {
            let positions = state.pass.rows.iter().map(|row| row.position);
            ops::rotate_angles(rope, positions, angles);
        }
        Ok(())
    }

    fn embed(&mut self, table: MatrixId) -> Result<(), BackendError> {
        let (step, threads) = self.step()?;
        ops::embed(&step, threads, &step.matrices[table.0 as usize]);
        Ok(())
    }

    fn qkv(&mut self, op: &QkvOp) -> Result<(), BackendError> {
        let state = self.state.as_mut().ok_or_else(not_allocated)?;
        let step = Step::new(self.kernels, &self.matrices, &self.vectors, state);
        ops::qkv(&step, &self.threads, op, &self.ropes);
        Ok(())
    }

    fn attend(&mut self, op: &AttendOp) -> Result<(), BackendError> {
        let (step, threads) = self.step()?;
        let in_splits = attention::attend(&step, threads, op);
        if let Some(state) = &mut self.state {
            state.split_window = in_splits.then_some(op.window);
        }
        Ok(())
    }

    fn attention_output(&mut self, op: &AttentionOutputOp) -> Result<(), BackendError> {
        let split_window = self.state.as_ref().and_then(|state| state.split_window);
        let (step, threads) = self.step()?;
        ops::attention_output(&step, threads, op, split_window);
        Ok(())
    }

    fn feed_forward(&mut self, op: &FeedForwardOp) -> Result<(), BackendError> {
        let (step, threads) = self.step()?;
        ops::feed_forward(&step, threads, op);
        Ok(())
    }

    fn logits(&mut self, op: &LogitsOp) -> Result<&[f32], BackendError> {
        let (step, threads) = self.step()?;
        ops::logits(&step, threads, op);
        let state = self.state.as_ref().ok_or_else(not_allocated)?;
        Ok(&state.logits[..state.pass.wanted.len() * state.geometry.vocab_size])
    }

    fn copy_page(&mut self, from: PageId, to: PageId) -> Result<(), BackendError> {
        let state = self.state.as_mut().ok_or_else(not_allocated)?;
        let n_pages = state.geometry.n_pages;
        if from.0.max(to.0) as usize >= n_pages {
            return Err(BackendError::Device(format!(
                "cannot copy page {} to {}: the pool has {n_pages}",
                from.0, to.0
            )));
        }
        let len = state.sizes.page_len;
        let start = from.0 as usize * len;
        state
            .kv
            .copy_within(start..start + len, to.0 as usize * len);
        Ok(())
    }
}

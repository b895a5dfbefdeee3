//! The CUDA backend: the operations as kernels of `kernels/`, through the driver alone.
//!
//! Owned by one engine thread. The binary links nothing of CUDA: cudarc opens the driver at run time,
//! the driver compiles the PTX that travels inside the binary. Where there is no usable device,
//! [`devices`] says why.
//!
//! ```text
//! begin_pass ─► tables to the device ─► operations are recorded
//!   logits, states, exit_signals, keep_state, fill_skipped, copy_page, the next begin_pass:
//!     flush: launch what was recorded, or replay it as a graph ─► the operation with its own list
//! ```
//!
//! **Invariants.** One stream, so work runs in the order of the calls; cudarc's event tracking is
//! off. Addresses of buffers stay, or all graphs go. A device error is final for this backend: every
//! later call fails too, and with it the replica that owns it. What is not here: which device a model
//! runs on (`runtime/`, `config`), any policy.

mod graphs;
mod launch;
mod matrix;
mod memory;
mod ops;
mod probe;
mod state;

pub use probe::{CudaDevice, devices};

use super::{
    AttendOp, AttentionOutputOp, Backend, BackendError, EmbedOp, ExitSignal, FeedForwardOp, FillOp,
    InjectOp, LayerNormOp, LogitsOp, MatrixId, MemoryUse, NormOp, PageId, Pass, QkvOp, RopeId,
    RopeTable, SkippedLoops, SlotId, StartLoopsOp, StateGeometry, TensorData, VectorId,
};
use crate::dtype::DType;
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use cudarc::nvrtc::Ptx;
use graphs::{Graphs, Seen};
use launch::Kernels;
use matrix::Kind;
use memory::{Buffer, bytes_of, failed};
use ops::{Bucket, Matrix, Recorded, RopeBuffer, Runner, Weights};
use state::State;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The kernels, as `make kernels` made them.
const PTX: &str = include_str!("../../../kernels/kernels.ptx");

/// Passes of at most this many rows become graphs when they come again.
const GRAPH_ROWS_MAX: usize = 64;
/// The widest head that a kernel takes.
const HEAD_DIM_MAX: usize = 256;

/// Tensors of one type that has no kernel of its own.
#[derive(Clone, Copy, Debug, Default)]
struct Widened {
    n_tensors: usize,
    stored_bytes: u64,
    f16_bytes: u64,
}

/// A backend on one GPU.
pub struct CudaBackend {
    name: String,
    stream: Arc<CudaStream>,
    kernels: Kernels,
    weights: Weights,
    widened: BTreeMap<String, Widened>,
    state: Option<State>,
    recorded: Vec<Recorded>,
    graphs: Graphs,
    uses_graphs: bool,
    host_logits: Vec<f32>,
}

impl CudaBackend {
    /// Opens a device and loads the kernels. With `graphs`, passes that come again are captured and
    /// replayed.
    ///
    /// # Errors
    /// `BackendError::Device` with the reason: no driver, no such device, one that is too old, or what
    /// its compiler said of the kernels.
    pub fn open(ordinal: usize, graphs: bool) -> Result<Self, BackendError> {
        let found = devices().map_err(BackendError::Device)?;
        let Some(device) = found.into_iter().find(|device| device.ordinal == ordinal) else {
            return Err(BackendError::Device(format!(
                "there is no device cuda:{ordinal}"
            )));
        };
        if let Some(problem) = device.problem {
            return Err(BackendError::Device(format!(
                "cuda:{ordinal} ({}): {problem}",
                device.name
            )));
        }
        let context = CudaContext::new(ordinal)
            .map_err(|error| failed(&format!("cuda:{ordinal} cannot be opened"), error))?;
        // SAFETY: one stream does all work, so there is nothing that events would order.
        unsafe { context.disable_event_tracking() };
        let stream = context
            .new_stream()
            .map_err(|error| failed("a stream", error))?;
        let module = context
            .load_module(Ptx::from_src(PTX))
            .map_err(|error| refused_kernels(&context, error))?;
        let kernels =
            Kernels::load(&module, &stream).map_err(|error| failed("the kernels", error))?;
        Ok(Self {
            name: format!("cuda:{ordinal} {}", device.name),
            stream,
            kernels,
            weights: Weights::default(),
            widened: BTreeMap::new(),
            state: None,
            recorded: Vec::new(),
            graphs: Graphs::default(),
            uses_graphs: graphs,
            host_logits: Vec::new(),
        })
    }

    fn record(&mut self, op: Recorded) -> Result<(), BackendError> {
        self.recorded.push(op);
        Ok(())
    }

    fn state_mut(&mut self) -> &mut State {
        self.state.as_mut().expect("allocate comes before any pass")
    }

    /// Launches of rows of the pass, or of the list's entries.
    fn runner(&self, n_rows: usize, is_list: bool) -> Runner<'_> {
        Runner {
            kernels: &self.kernels,
            weights: &self.weights,
            state: self.state.as_ref().expect("allocate comes before any pass"),
            bucket: Bucket { n_rows, is_list },
        }
    }

    /// Launches what was recorded.
    fn flush(&mut self) -> Result<(), BackendError> {
        let ops = std::mem::take(&mut self.recorded);
        let n_rows = self.state_mut().pass.rows.len();
        if ops.is_empty() || n_rows == 0 {
            return Ok(());
        }
        let bucket = bucket_of(n_rows);
        let done = match self.uses_graphs && bucket <= GRAPH_ROWS_MAX {
            true => self.run_as_graph(&ops, bucket),
            false => self.run_all(&ops, bucket),
        };
        done.map_err(|error| failed("a pass", error))
    }

    fn run_all(&self, ops: &[Recorded], bucket: usize) -> Result<(), DriverError> {
        let runner = self.runner(bucket, false);
        ops.iter().try_for_each(|op| runner.run(op))
    }

    fn run_as_graph(&mut self, ops: &[Recorded], bucket: usize) -> Result<(), DriverError> {
        let key = graphs::key(ops, bucket);
        match self.graphs.see(&key) {
            Seen::Never => return self.run_all(ops, bucket),
            Seen::Once => {
                let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
                self.stream.begin_capture(mode)?;
                let launched = self.run_all(ops, bucket);
                // The capture must end whatever came of it.
                let flags = sys::CUgraphInstantiate_flags(0);
                let ended = self.stream.end_capture(flags);
                launched?;
                match ended? {
                    Some(graph) => self.graphs.insert(key.clone(), graph),
                    None => return self.run_all(ops, bucket),
                }
            }
            Seen::Captured => {}
        }
        match self.graphs.get(&key) {
            Some(graph) => graph.launch(),
            None => self.run_all(ops, bucket),
        }
    }

    /// Flushes, then takes slots to the device as the list.
    fn set_slots(&mut self, slots: impl Iterator<Item = SlotId>) -> Result<usize, BackendError> {
        self.flush()?;
        let slots: Vec<i32> = slots.map(|slot| slot.0 as i32).collect();
        let stream = Arc::clone(&self.stream);
        self.state_mut().set_list(&stream, &slots, slots.len())?;
        Ok(slots.len())
    }

    fn slots_of(&self, row_idxs: &[u32]) -> Vec<SlotId> {
        let rows = &self
            .state
            .as_ref()
            .expect("allocate comes before any pass")
            .pass
            .rows;
        row_idxs
            .iter()
            .map(|idx| rows[*idx as usize].slot)
            .collect()
    }

    /// Room for logits of so many rows.
    fn grow_logits(&mut self, n_rows: usize, with_kept: bool) -> Result<(), BackendError> {
        let stream = Arc::clone(&self.stream);
        let state = self.state_mut();
        let n_bytes = 4 * n_rows * state.geometry.vocab_size;
        let grow = |buffer: &mut Buffer| {
            if buffer.n_bytes < n_bytes {
                *buffer = Buffer::none();
                *buffer = Buffer::new(&stream, "logits", n_bytes)?;
            }
            Ok(())
        };
        grow(&mut state.logits)?;
        if with_kept {
            grow(&mut state.kept_logits)?;
        }
        Ok(())
    }

    /// Warns of types that take more room here than in the file.
    fn warn_of_widened(&mut self) {
        for (dtype, widened) in std::mem::take(&mut self.widened) {
            tracing::warn!(
                "{}: {dtype} has no CUDA kernel: {} tensors take {} bytes as F16 instead of {}",
                self.name,
                widened.n_tensors,
                widened.f16_bytes,
                widened.stored_bytes
            );
        }
    }
}

/// Rows that a pass is launched for: the next power of two, so that few graphs serve all.
fn bucket_of(n_rows: usize) -> usize {
    n_rows.next_power_of_two()
}

/// What the driver's compiler says of kernels that it refused.
fn refused_kernels(context: &Arc<CudaContext>, error: DriverError) -> BackendError {
    let mut log = vec![0_u8; 4096];
    let image = std::ffi::CString::new(PTX).expect("the PTX has no NUL");
    let mut options = [
        sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
        sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
    ];
    let mut values = [log.as_mut_ptr().cast(), log.len() as *mut std::ffi::c_void];
    let mut module = std::ptr::null_mut();
    let bound = context.bind_to_thread();
    // SAFETY: image and log outlive the call, options and values have the two entries that it is told
    // of, and a module that is loaded after all is only leaked.
    let _ = unsafe {
        sys::cuModuleLoadDataEx(
            &raw mut module,
            image.as_ptr().cast(),
            2,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    let text = String::from_utf8_lossy(&log);
    let text = text.trim_end_matches('\0').trim();
    let unbound = if bound.is_err() { ", no context" } else { "" };
    BackendError::Device(format!(
        "the driver refuses the kernels: {}{unbound}: {text}",
        probe::error_name(error)
    ))
}

impl Backend for CudaBackend {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn load_matrix(&mut self, tensor: &TensorData<'_>) -> Result<MatrixId, BackendError> {
        let kind = Kind::of(tensor.dtype);
        let planes = matrix::repack(tensor);
        if kind == Kind::F16 && tensor.dtype != DType::F16 {
            let widened = self.widened.entry(tensor.dtype.to_string()).or_default();
            widened.n_tensors += 1;
            widened.stored_bytes += tensor.bytes.len() as u64;
            widened.f16_bytes += planes.n_bytes();
        }
        let upload = |bytes: &[u8]| Buffer::of(&self.stream, tensor.name, bytes);
        let matrix = Matrix {
            kind,
            n_out: tensor.n_out,
            n_in: tensor.n_in,
            quants: upload(&planes.quants)?,
            more: upload(&planes.more)?,
            scales: upload(&planes.scales)?,
        };
        self.weights.matrices.push(matrix);
        Ok(MatrixId(self.weights.matrices.len() as u32 - 1))
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<VectorId, BackendError> {
        let buffer = Buffer::of(&self.stream, "a vector", bytes_of(values))?;
        self.weights.vectors.push(buffer);
        Ok(VectorId(self.weights.vectors.len() as u32 - 1))
    }

    fn load_rope(&mut self, table: &RopeTable) -> Result<RopeId, BackendError> {
        let frequencies = bytes_of(&table.inverse_frequencies);
        self.weights.ropes.push(RopeBuffer {
            frequencies: Buffer::of(&self.stream, "a rotary table", frequencies)?,
            n_pairs: table.inverse_frequencies.len(),
            pairs: table.pairs,
            magnitude: table.magnitude,
        });
        Ok(RopeId(self.weights.ropes.len() as u32 - 1))
    }

    fn allocate(&mut self, geometry: &StateGeometry) -> Result<(), BackendError> {
        if geometry.head_dim > HEAD_DIM_MAX {
            return Err(BackendError::Unsupported {
                tensor: "attention".to_owned(),
                reason: format!(
                    "heads of {} values, and the CUDA kernels take {HEAD_DIM_MAX} at most",
                    geometry.head_dim
                ),
            });
        }
        self.warn_of_widened();
        self.graphs.forget_all();
        self.state = None;
        self.state = Some(State::new(&self.stream, geometry)?);
        Ok(())
    }

    fn memory(&self) -> MemoryUse {
        let of_matrix = |m: &Matrix| m.quants.n_bytes + m.more.n_bytes + m.scales.n_bytes;
        let matrices: usize = self.weights.matrices.iter().map(of_matrix).sum();
        let vectors: usize = self.weights.vectors.iter().map(|v| v.n_bytes).sum();
        MemoryUse {
            weight_bytes: (matrices + vectors) as u64,
            kv_bytes: self.state.as_ref().map_or(0, |s| s.pool.n_bytes as u64),
            scratch_bytes: self.state.as_ref().map_or(0, State::scratch_bytes),
        }
    }

    fn begin_pass(&mut self, pass: &Pass) -> Result<(), BackendError> {
        self.flush()?;
        let stream = Arc::clone(&self.stream);
        if self.state_mut().begin(&stream, pass)? {
            self.graphs.forget_all();
        }
        Ok(())
    }

    fn embed(&mut self, op: &EmbedOp) -> Result<(), BackendError> {
        self.record(Recorded::Embed(*op))
    }

    fn normalize(&mut self, op: &NormOp) -> Result<(), BackendError> {
        self.record(Recorded::Normalize(*op))
    }

    fn layer_normalize(&mut self, op: &LayerNormOp) -> Result<(), BackendError> {
        self.record(Recorded::LayerNormalize(*op))
    }

    fn start_loops(&mut self, op: &StartLoopsOp) -> Result<(), BackendError> {
        self.record(Recorded::StartLoops(*op))
    }

    fn inject(&mut self, op: &InjectOp) -> Result<(), BackendError> {
        self.record(Recorded::Inject(*op))
    }

    fn qkv(&mut self, op: &QkvOp) -> Result<(), BackendError> {
        self.record(Recorded::Qkv(*op))
    }

    fn attend(&mut self, op: &AttendOp) -> Result<(), BackendError> {
        self.record(Recorded::Attend(*op))
    }

    fn attention_output(&mut self, op: &AttentionOutputOp) -> Result<(), BackendError> {
        self.record(Recorded::AttentionOutput(*op))
    }

    fn feed_forward(&mut self, op: &FeedForwardOp) -> Result<(), BackendError> {
        self.record(Recorded::FeedForward(*op))
    }

    fn keep_state(&mut self, row_idxs: &[u32]) -> Result<(), BackendError> {
        let slots = self.slots_of(row_idxs);
        let stream = Arc::clone(&self.stream);
        let state = self.state_mut();
        if state.kept.n_bytes == 0 {
            state.kept = Buffer::new(&stream, "kept states", state.hidden.n_bytes)?;
        }
        let n = self.set_slots(slots.into_iter())?;
        if n == 0 {
            return Ok(());
        }
        let kept = self.runner(n, true).keep();
        kept.map_err(|error| failed("kept states", error))
    }

    fn exit_signals(
        &mut self,
        signal: &ExitSignal,
        row_idxs: &[u32],
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        let slots = self.slots_of(row_idxs);
        let n = self.set_slots(slots.into_iter())?;
        out.clear();
        out.resize(n, 0.0);
        if n == 0 {
            return Ok(());
        }
        if let ExitSignal::Divergence(_) = signal {
            self.grow_logits(n, true)?;
        }
        let (runner, state) = (self.runner(n, true), self.state.as_ref().expect("as above"));
        let to = &state.branch;
        let done = match signal {
            ExitSignal::Gate { weight, bias } => runner.gate_signal(*weight, *bias, to.ptr),
            ExitSignal::Change => runner.change_signal(to.ptr),
            ExitSignal::Divergence(head) => {
                let logits =
                    |from, to| runner.logits(from, head.norm, head.epsilon, &head.output, to);
                logits(state.hidden.ptr, state.logits.ptr)
                    .and_then(|()| logits(state.kept.ptr, state.kept_logits.ptr))
                    .and_then(|()| runner.divergence_signal(to.ptr))
            }
        };
        done.map_err(|error| failed("exit signals", error))?;
        to.read(&self.stream, out)
    }

    fn fill_skipped(&mut self, op: &FillOp, skipped: &[SkippedLoops]) -> Result<(), BackendError> {
        self.flush()?;
        if skipped.is_empty() || op.n_layers == 0 {
            return Ok(());
        }
        let pairs: Vec<i32> = skipped
            .iter()
            .flat_map(|skip| [skip.row_idx as i32, skip.n_loops as i32])
            .collect();
        let stream = Arc::clone(&self.stream);
        self.state_mut().set_list(&stream, &pairs, skipped.len())?;
        let runner = self.runner(skipped.len(), true);
        runner
            .fill_skipped(op.kv, op.n_layers as usize)
            .map_err(|error| failed("skipped loops", error))
    }

    fn logits(&mut self, op: &LogitsOp, slots: &[SlotId]) -> Result<&[f32], BackendError> {
        let vocab_size = self.state_mut().geometry.vocab_size;
        let rows_max = self.state_mut().geometry.max_rows;
        let mut logits = std::mem::take(&mut self.host_logits);
        logits.clear();
        logits.resize(slots.len() * vocab_size, 0.0);
        // Scratch has room for the rows of a pass.
        for (slots, out) in slots
            .chunks(rows_max)
            .zip(logits.chunks_mut(rows_max * vocab_size))
        {
            let n = self.set_slots(slots.iter().copied())?;
            self.grow_logits(n, false)?;
            let state = self.state.as_ref().expect("as above");
            self.runner(n, true)
                .logits(
                    state.hidden.ptr,
                    op.norm,
                    op.epsilon,
                    &op.output,
                    state.logits.ptr,
                )
                .map_err(|error| failed("logits", error))?;
            state.logits.read(&self.stream, out)?;
        }
        self.host_logits = logits;
        Ok(&self.host_logits)
    }

    fn states(
        &mut self,
        norm: Option<&NormOp>,
        slots: &[SlotId],
        out: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        let d_model = self.state_mut().geometry.d_model;
        let rows_max = self.state_mut().geometry.max_rows;
        let epsilon = norm.map_or(0.0, |op| op.epsilon);
        out.clear();
        out.resize(slots.len() * d_model, 0.0);
        for (slots, out) in slots
            .chunks(rows_max)
            .zip(out.chunks_mut(rows_max * d_model))
        {
            let n = self.set_slots(slots.iter().copied())?;
            let state = self.state.as_ref().expect("as above");
            self.runner(n, true)
                .states(norm.map(|op| op.norm), epsilon, state.branch.ptr)
                .map_err(|error| failed("states", error))?;
            state.branch.read(&self.stream, out)?;
        }
        Ok(())
    }

    fn copy_page(&mut self, from: PageId, to: PageId) -> Result<(), BackendError> {
        self.flush()?;
        let page_bytes = self.state_mut().geometry.page_bytes();
        let pool = self.state_mut().pool.ptr.0;
        let at = |page: PageId| pool + page.0 as u64 * page_bytes as u64;
        let context = self.stream.context();
        let copied = context.bind_to_thread().and_then(|()| {
            // SAFETY: both pages lie in the pool, and the stream is the one that all work uses.
            unsafe {
                result::memcpy_dtod_async(at(to), at(from), page_bytes, self.stream.cu_stream())
            }
        });
        copied.map_err(|error| failed("a page's copy", error))
    }
}

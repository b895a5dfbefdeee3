//! The kernels, as one list: names, parameters, typed launchers.
//!
//! cudarc passes kernel parameters as untyped pointers, so the list below is the only place that
//! says what a kernel takes. It makes a method per kernel; a test compares it with the `.entry` and
//! `.param` lines of `kernels/kernels.ptx`, which also catches a stale PTX. What is not here: which
//! kernel an operation needs (`ops`), or what the kernels do (`kernels/`).

use cudarc::driver::{
    CudaFunction, CudaModule, CudaStream, DeviceRepr, DriverError, LaunchConfig, PushKernelArg,
};
use std::sync::Arc;

/// An address on the device; 0 where a kernel takes none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Ptr(pub(super) u64);

impl Ptr {
    pub(super) const NULL: Self = Self(0);
}

/// `KvLayout` of `kernels/common.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct KvLayout {
    pub(super) first_group: i32,
    pub(super) groups_per_iteration: i32,
    pub(super) layer: i32,
    pub(super) layers_per_page: i32,
    pub(super) n_kv_heads: i32,
    pub(super) head_dim: i32,
}

/// `AttendShape` of `kernels/attend_prefill.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct AttendShape {
    pub(super) kv: KvLayout,
    pub(super) n_heads: i32,
    pub(super) layer_window: i32,
    pub(super) is_bidirectional: i32,
    pub(super) scale: f32,
}

/// `Activations` of `kernels/activations.cuh`: what products read, f16 and int8.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Activations {
    pub(super) x16: Ptr,
    pub(super) x8: Ptr,
    pub(super) x8_sums: Ptr,
}

/// `Table` of `kernels/embed.cu`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Table {
    pub(super) quants: Ptr,
    pub(super) more: Ptr,
    pub(super) scales: Ptr,
    pub(super) kind: i32,
    pub(super) n_in: i32,
}

/// `Rope` of `kernels/qkv.cu`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Rope {
    pub(super) inverse_frequencies: Ptr,
    pub(super) n_pairs: i32,
    pub(super) is_halves: i32,
    pub(super) magnitude: f32,
    pub(super) reserved: i32,
}

// SAFETY: plain numbers in the layout of the C structs that the kernels take by value.
unsafe impl DeviceRepr for Ptr {}
// SAFETY: as above.
unsafe impl DeviceRepr for KvLayout {}
// SAFETY: as above.
unsafe impl DeviceRepr for AttendShape {}
// SAFETY: as above.
unsafe impl DeviceRepr for Activations {}
// SAFETY: as above.
unsafe impl DeviceRepr for Table {}
// SAFETY: as above.
unsafe impl DeviceRepr for Rope {}

/// Blocks of a grid and threads of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) grid: (usize, usize),
    pub(super) block: (usize, usize),
}

impl Shape {
    pub(super) fn new(grid: (usize, usize), n_threads: usize) -> Self {
        Self {
            grid,
            block: (n_threads, 1),
        }
    }

    fn config(self) -> LaunchConfig {
        let of = |(x, y): (usize, usize)| (x as u32, y as u32, 1);
        LaunchConfig {
            grid_dim: of(self.grid),
            block_dim: of(self.block),
            shared_mem_bytes: 0,
        }
    }
}

macro_rules! kernels {
    ($($name:ident($($parameter:ident: $type:ty),* $(,)?);)*) => {
        /// The loaded kernels; each method launches one on the compute stream.
        pub(super) struct Kernels {
            stream: Arc<CudaStream>,
            $($name: CudaFunction,)*
        }

        impl Kernels {
            pub(super) fn load(
                module: &Arc<CudaModule>,
                stream: &Arc<CudaStream>,
            ) -> Result<Self, DriverError> {
                Ok(Self {
                    stream: Arc::clone(stream),
                    $($name: module.load_function(stringify!($name))?,)*
                })
            }

            $(
                #[allow(
                    clippy::too_many_arguments,
                    reason = "the parameters are the kernel's own"
                )]
                pub(super) fn $name(
                    &self,
                    shape: Shape,
                    $($parameter: $type),*
                ) -> Result<(), DriverError> {
                    let mut launch = self.stream.launch_builder(&self.$name);
                    $(launch.arg(&$parameter);)*
                    // SAFETY: the list gives the kernel's own parameters (a test compares them), and
                    // the addresses are those of buffers that live as long as the backend.
                    unsafe { launch.launch(shape.config()) }?;
                    Ok(())
                }
            )*
        }

        /// Name and sizes of the parameters in bytes.
        #[cfg(test)]
        const KERNELS: &[(&str, &[usize])] =
            &[$((stringify!($name), &[$(size_of::<$type>()),*])),*];
    };
}

/// Launches a product kernel, of either family.
pub(super) type Gemm = fn(
    &Kernels,
    Shape,
    Ptr,
    Ptr,
    Ptr,
    Ptr,
    Ptr,
    Ptr,
    Ptr,
    Ptr,
    i32,
    i32,
    i32,
) -> Result<(), DriverError>;
/// See [`Gemm`].
pub(super) type Matvec = fn(
    &Kernels,
    Shape,
    Ptr,
    Ptr,
    Ptr,
    Ptr,
    Ptr,
    Ptr,
    Ptr,
    Ptr,
    Ptr,
    Ptr,
    i32,
    i32,
    i32,
) -> Result<(), DriverError>;

kernels! {
    gemm_q4_small(header: Ptr, rows: Ptr, x16: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    gemm_q4(header: Ptr, rows: Ptr, x16: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    gemm_q8_small(header: Ptr, rows: Ptr, x16: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    gemm_q8(header: Ptr, rows: Ptr, x16: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    gemm_q6_small(header: Ptr, rows: Ptr, x16: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    gemm_q6(header: Ptr, rows: Ptr, x16: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    gemm_f16_small(header: Ptr, rows: Ptr, x16: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    gemm_f16(header: Ptr, rows: Ptr, x16: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    gemm_bf16_small(header: Ptr, rows: Ptr, x16: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    gemm_bf16(header: Ptr, rows: Ptr, x16: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    matvec_q4_1(header: Ptr, rows: Ptr, x16: Ptr, x8: Ptr, x8_sums: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    matvec_q4_8(header: Ptr, rows: Ptr, x16: Ptr, x8: Ptr, x8_sums: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    matvec_q8_1(header: Ptr, rows: Ptr, x16: Ptr, x8: Ptr, x8_sums: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    matvec_q8_8(header: Ptr, rows: Ptr, x16: Ptr, x8: Ptr, x8_sums: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    matvec_q6_1(header: Ptr, rows: Ptr, x16: Ptr, x8: Ptr, x8_sums: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    matvec_q6_8(header: Ptr, rows: Ptr, x16: Ptr, x8: Ptr, x8_sums: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    matvec_f16_1(header: Ptr, rows: Ptr, x16: Ptr, x8: Ptr, x8_sums: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    matvec_f16_8(header: Ptr, rows: Ptr, x16: Ptr, x8: Ptr, x8_sums: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    matvec_bf16_1(header: Ptr, rows: Ptr, x16: Ptr, x8: Ptr, x8_sums: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    matvec_bf16_8(header: Ptr, rows: Ptr, x16: Ptr, x8: Ptr, x8_sums: Ptr, quants: Ptr, more: Ptr, scales: Ptr, bias: Ptr, y: Ptr, n_in: i32, n_out: i32, flags: i32);
    attend_prefill_64(header: Ptr, rows: Ptr, pages: Ptr, pool: Ptr, q: Ptr, out: Ptr, attend: AttendShape);
    attend_prefill_128(header: Ptr, rows: Ptr, pages: Ptr, pool: Ptr, q: Ptr, out: Ptr, attend: AttendShape);
    attend_prefill_256(header: Ptr, rows: Ptr, pages: Ptr, pool: Ptr, q: Ptr, out: Ptr, attend: AttendShape);
    embed_rows(header: Ptr, rows: Ptr, table: Table, positions: Table, constant: Ptr, hidden: Ptr, d_model: i32, scale: f32);
    rms_norm_rows(header: Ptr, slots: Ptr, from: Ptr, weight: Ptr, to: Ptr, x: Activations, slot_stride: i32, n: i32, epsilon: f32, flags: i32);
    layer_norm_rows(header: Ptr, rows: Ptr, hidden: Ptr, weight: Ptr, bias: Ptr, n: i32, epsilon: f32, only_entering: i32);
    add_branch_rows(header: Ptr, rows: Ptr, branch: Ptr, weight: Ptr, hidden: Ptr, n: i32, epsilon: f32);
    activate_rows(header: Ptr, gate: Ptr, up: Ptr, x: Activations, n: i32);
    qkv_finish(header: Ptr, rows: Ptr, pages: Ptr, q: Ptr, k: Ptr, v: Ptr, pool: Ptr, q_norm: Ptr, k_norm: Ptr, kv: KvLayout, rope: Rope, n_heads: i32, epsilon: f32);
    start_loops_rows(header: Ptr, rows: Ptr, projected: Ptr, input: Ptr, hidden: Ptr, n: i32, init: i32, deviation: f32, seed: u64);
    inject_rows(header: Ptr, rows: Ptr, projected: Ptr, input: Ptr, hidden: Ptr, n: i32);
    keep_rows(header: Ptr, slots: Ptr, hidden: Ptr, kept: Ptr, n: i32);
    gate_rows(header: Ptr, slots: Ptr, hidden: Ptr, weight: Ptr, out: Ptr, n: i32, bias: f32);
    change_rows(header: Ptr, slots: Ptr, hidden: Ptr, kept: Ptr, out: Ptr, n: i32);
    divergence_rows(header: Ptr, now: Ptr, before: Ptr, out: Ptr, n: i32);
    fill_skipped_rows(header: Ptr, rows: Ptr, pages: Ptr, skipped: Ptr, pool: Ptr, kv: KvLayout);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kernels of the PTX that the backend does not launch: the greedy choice on the device.
    const NOT_LAUNCHED: &[&str] = &["argmax_rows", "top_k_rows"];

    /// (name, sizes of the parameters in bytes) of each entry.
    fn entries(ptx: &str) -> Vec<(String, Vec<usize>)> {
        let size = |parameter: &str| -> usize {
            if let Some((_, count)) = parameter.split_once('[') {
                return count.trim_end_matches(']').parse().expect("a length");
            }
            let kind = parameter.split_whitespace().nth(1).expect("a type");
            kind[2..].parse::<usize>().expect("a width in bits") / 8
        };
        ptx.split(".entry ")
            .skip(1)
            .map(|entry| {
                let (name, rest) = entry.split_once('(').expect("a list of parameters");
                let list = rest.split(')').next().expect("its end");
                (
                    name.to_owned(),
                    list.split(',').map(|one| size(one.trim())).collect(),
                )
            })
            .collect()
    }

    #[test]
    fn the_list_is_that_of_the_ptx() {
        let mut in_ptx = entries(super::super::PTX);
        in_ptx.retain(|(name, _)| !NOT_LAUNCHED.contains(&name.as_str()));
        in_ptx.sort();
        let mut listed: Vec<(String, Vec<usize>)> = KERNELS
            .iter()
            .map(|(name, sizes)| ((*name).to_owned(), sizes.to_vec()))
            .collect();
        listed.sort();
        assert_eq!(listed, in_ptx);
    }
}

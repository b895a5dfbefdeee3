//! What this machine can do at best: bytes read per second and products per second, measured.
//!
//! Runs on the caller's thread and worker threads of its own, for a few seconds. The best of several
//! short runs counts, since on a shared machine only the best says something about the machine. What
//! is not here: what a model needs (`cli::roofline` sets the two against each other).

use super::buffer::Buffer;
use super::kernels::Kernels;
use super::kernels::probe::{ACTIVATION_BYTES, MULTIPLY_ADDS};
use super::layout::Layout;
use super::path::{self, Path};
use super::threads::Threads;
use crate::backend::BackendError;
use crate::dtype::DType;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Runs of each probe; the best counts.
const N_RUNS: usize = 5;
/// A run lasts at least so long.
const RUN_MIN: Duration = Duration::from_millis(20);
/// Parts that a thread's share of a buffer is read in.
const PARTS_PER_THREAD: usize = 4;
/// f32 values that the read probe takes at once on every path (8 chains of at most 16 lanes).
const READ_STEP: usize = 128;

/// How fast a buffer of some size is read, over and over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadRate {
    /// Threads that read together, each its own part.
    pub n_threads: usize,
    /// Size of the whole buffer.
    pub n_bytes: usize,
    /// Bytes per second.
    pub bytes_per_s: f64,
}

/// The limits of the machine on one instruction set. Rates of products are those of all threads
/// together, in multiply-adds per second.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineLimits {
    /// The instruction set.
    pub path: Path,
    /// Threads that worked.
    pub n_threads: usize,
    /// By threads, then by size.
    pub reads: Vec<ReadRate>,
    /// 4-bit codes times int8 activations that come from the first-level cache.
    pub dot_u4_per_s: f64,
    /// 8-bit codes times the same.
    pub dot_s8_per_s: f64,
    /// f32, in registers.
    pub multiply_add_per_s: f64,
}

impl MachineLimits {
    /// Bytes per second that all threads read from a buffer of this size: the rate of the smallest
    /// probed buffer that is no smaller, or of the largest.
    #[must_use]
    pub fn bytes_per_s(&self, n_bytes: u64) -> f64 {
        let all = || self.reads.iter().filter(|r| r.n_threads == self.n_threads);
        let fits = all().find(|read| read.n_bytes as u64 >= n_bytes);
        fits.or_else(|| all().next_back())
            .map_or(0.0, |read| read.bytes_per_s)
    }

    /// Multiply-adds per second at best with weights of this type.
    #[must_use]
    pub fn products_per_s(&self, dtype: DType) -> f64 {
        match Layout::of(dtype).quantized() {
            Some(quantized) if quantized.bits == 4 => self.dot_u4_per_s,
            Some(_) => self.dot_s8_per_s,
            None => self.multiply_add_per_s,
        }
    }

    /// Bytes that a weight matrix takes in memory here, as its kernels read it.
    #[must_use]
    pub fn weight_bytes(&self, dtype: DType, n_out: u64, n_in: u64) -> u64 {
        let lanes = self.path.kernels().lanes;
        let panel_bytes = Layout::of(dtype).panel_bytes(lanes, n_in as usize);
        n_out.div_ceil(lanes as u64) * panel_bytes as u64
    }
}

/// Measures the machine. `n_threads`: the cores given when None; `sizes`: buffers to read, in bytes,
/// rising; those that the machine has no memory for are left out.
///
/// # Errors
/// When a forced instruction set is missing or no thread can be started.
pub fn measure(n_threads: Option<usize>, sizes: &[usize]) -> Result<MachineLimits, BackendError> {
    let (path, kernels) = path::choose(Path::forced()?)?;
    let available = || std::thread::available_parallelism().map_or(1, usize::from);
    let most = n_threads.unwrap_or_else(available).max(1);
    let mut reads = Vec::new();
    for n_threads in thread_counts(most) {
        let threads = Threads::start(n_threads)?;
        for &n_bytes in sizes {
            if let Ok(bytes_per_s) = read_rate(kernels, &threads, n_bytes) {
                reads.push(ReadRate {
                    n_threads,
                    n_bytes,
                    bytes_per_s,
                });
            }
        }
    }
    let threads = Threads::start(most)?;
    let activations = Buffer::<u8>::zeroed(ACTIVATION_BYTES, "activations")?;
    let activations = &activations[..];
    let probes = &kernels.probes;
    let per_round = (ACTIVATION_BYTES * kernels.lanes) as f64;
    let dot_u4_per_s = product_rate(&threads, per_round, &|n_rounds| {
        // SAFETY: the activations are as long as the probe reads, and `choose` checked that the
        // machine has the instruction set.
        black_box(unsafe { (probes.dot_u4)(activations.as_ptr().cast(), n_rounds) });
    });
    let dot_s8_per_s = product_rate(&threads, per_round, &|n_rounds| {
        // SAFETY: as above.
        black_box(unsafe { (probes.dot_s8)(activations.as_ptr().cast(), n_rounds) });
    });
    let per_round = (MULTIPLY_ADDS * kernels.lanes) as f64;
    let multiply_add_per_s = product_rate(&threads, per_round, &|n_rounds| {
        // SAFETY: as above, and there is no pointer.
        black_box(unsafe { (probes.multiply_add)(n_rounds) });
    });
    Ok(MachineLimits {
        path,
        n_threads: most,
        reads,
        dot_u4_per_s,
        dot_s8_per_s,
        multiply_add_per_s,
    })
}

/// 1, 2, 4 .. and `most`.
fn thread_counts(most: usize) -> Vec<usize> {
    let doubled = std::iter::successors(Some(1), |n| Some(n * 2));
    let below = doubled.take_while(|n| *n < most);
    below.chain([most]).collect()
}

/// Bytes per second.
fn read_rate(kernels: &Kernels, threads: &Threads, n_bytes: usize) -> Result<f64, BackendError> {
    let n_parts = threads.n_threads() * PARTS_PER_THREAD;
    let part_len = (n_bytes / size_of::<f32>() / n_parts / READ_STEP).max(1) * READ_STEP;
    let mut buffer = Buffer::<f32>::zeroed(part_len * n_parts, "a buffer to read")?;
    buffer.advise_huge_pages();
    buffer.fill(1.0); // untouched pages are one and the same page of zeros
    let values = &buffer[..];
    let once = || {
        threads.run(n_parts, &|_, parts| {
            for part in parts {
                let part = &values[part * part_len..(part + 1) * part_len];
                // SAFETY: a whole number of steps; `choose` checked the instruction set.
                black_box(unsafe { (kernels.probes.read)(part.as_ptr(), part.len()) });
            }
        });
    };
    Ok(best_rate(buffer.n_bytes() as f64, &once))
}

/// Multiply-adds per second of all threads; `per_round` of one thread in a round.
fn product_rate(threads: &Threads, per_round: f64, rounds: &(dyn Fn(usize) + Sync)) -> f64 {
    /// Some 10 us, so that handing out does not count.
    const N_ROUNDS: usize = 64;
    const UNITS_PER_THREAD: usize = 64;
    let n_units = threads.n_threads() * UNITS_PER_THREAD;
    let once = || {
        threads.run(n_units, &|_, units| {
            for _ in units {
                rounds(N_ROUNDS);
            }
        });
    };
    best_rate(per_round * (N_ROUNDS * n_units) as f64, &once)
}

/// `amount` per second of `once`, in the best of several runs.
fn best_rate(amount: f64, once: &dyn Fn()) -> f64 {
    once();
    let run = |_| {
        let start = Instant::now();
        let mut n_times = 0_u32;
        while start.elapsed() < RUN_MIN {
            once();
            n_times += 1;
        }
        amount * f64::from(n_times) / start.elapsed().as_secs_f64()
    };
    (0..N_RUNS).map(run).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_doubled_up_to_all() {
        assert_eq!(thread_counts(1), [1]);
        assert_eq!(thread_counts(2), [1, 2]);
        assert_eq!(thread_counts(6), [1, 2, 4, 6]);
        assert_eq!(thread_counts(8), [1, 2, 4, 8]);
    }

    #[test]
    fn every_probe_does_something_and_rates_are_found_by_size_and_type() {
        let limits = measure(Some(1), &[1 << 12, 1 << 16]).expect("a small measurement");
        assert_eq!(limits.reads.len(), 2);
        let rates = [
            limits.dot_u4_per_s,
            limits.dot_s8_per_s,
            limits.multiply_add_per_s,
        ];
        assert!(rates.iter().all(|rate| *rate > 0.0 && rate.is_finite()));
        let [small, large] = [0, 1].map(|at| limits.reads[at].bytes_per_s);
        assert_eq!(limits.bytes_per_s(1), small);
        assert_eq!(limits.bytes_per_s(1 << 16), large);
        assert_eq!(limits.bytes_per_s(1 << 40), large);
        assert_eq!(limits.products_per_s(DType::Q4_K), limits.dot_u4_per_s);
        assert_eq!(limits.products_per_s(DType::Q6_K), limits.dot_s8_per_s);
        assert_eq!(limits.products_per_s(DType::F16), limits.multiply_add_per_s);
        // 4-bit weights stay at four bits: 20 bytes for 32 of Q4_1.
        assert_eq!(limits.weight_bytes(DType::Q4_1, 64, 64), 64 * 64 / 32 * 20);
    }
}

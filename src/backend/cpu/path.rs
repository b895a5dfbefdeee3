//! Which instruction set runs: detection, forcing, and the start-up self-check.
//!
//! Decided once per backend, on the loading thread. What is not here: kernels.

use std::fmt;

use super::kernels::vector::ActivationBlock;
use super::kernels::{self, Kernels};
use super::panels::Matrix;
use super::step::InputsView;
use super::threads::Threads;
use crate::backend::{BackendError, TensorData};
use crate::dtype::DType;

/// Environment variable that forces a path.
pub const PATH_VARIABLE: &str = "TINYLOOP_CPU";

/// An instruction set that kernels exist for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Plain Rust, 8 wide; any machine.
    Scalar,
    /// Plain Rust, 16 wide: the layouts of AVX-512 on any machine. For tests; never chosen.
    ScalarWide,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// The same with VNNI.
    Avx512Vnni,
}

impl Path {
    /// Every path, slowest first.
    pub const ALL: [Path; 5] = [
        Path::Scalar,
        Path::ScalarWide,
        Path::Avx2,
        Path::Avx512,
        Path::Avx512Vnni,
    ];

    /// Its name in `TINYLOOP_CPU` and in logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Path::Scalar => "scalar",
            Path::ScalarWide => "scalar16",
            Path::Avx2 => "avx2",
            Path::Avx512 => "avx512",
            Path::Avx512Vnni => "avx512vnni",
        }
    }

    /// This machine can run it.
    #[must_use]
    pub fn is_available(self) -> bool {
        self.missing().is_none()
    }

    /// What this machine lacks for it.
    #[cfg(target_arch = "x86_64")]
    fn missing(self) -> Option<&'static str> {
        macro_rules! first_missing {
            ($($feature:tt)*) => {
                $(if !is_x86_feature_detected!($feature) { return Some($feature); })*
            };
        }
        if matches!(self, Path::Avx2 | Path::Avx512 | Path::Avx512Vnni) {
            first_missing!("avx2" "fma" "f16c");
        }
        if matches!(self, Path::Avx512 | Path::Avx512Vnni) {
            first_missing!("avx512f" "avx512bw" "avx512dq" "avx512vl");
        }
        if self == Path::Avx512Vnni {
            first_missing!("avx512vnni");
        }
        None
    }

    /// What this machine lacks for it.
    #[cfg(not(target_arch = "x86_64"))]
    fn missing(self) -> Option<&'static str> {
        match self {
            Path::Scalar | Path::ScalarWide => None,
            Path::Avx2 | Path::Avx512 | Path::Avx512Vnni => Some("an x86-64 processor"),
        }
    }

    /// The fastest available path.
    fn best() -> Self {
        [Path::Avx512Vnni, Path::Avx512, Path::Avx2]
            .into_iter()
            .find(|path| path.is_available())
            .unwrap_or(Path::Scalar)
    }

    /// The path named in the environment, if any.
    pub(super) fn forced() -> Result<Option<Self>, BackendError> {
        match std::env::var(PATH_VARIABLE) {
            Ok(name) => Self::parse(&name).map(Some),
            Err(_) => Ok(None),
        }
    }

    fn parse(name: &str) -> Result<Self, BackendError> {
        Path::ALL
            .into_iter()
            .find(|path| path.name() == name)
            .ok_or_else(|| {
                let names: Vec<_> = Path::ALL.iter().map(|path| path.name()).collect();
                BackendError::Device(format!(
                    "{PATH_VARIABLE}={name} is no instruction set; use one of {}",
                    names.join(", ")
                ))
            })
    }

    /// The kernels; the caller has made sure that the path is available.
    pub(super) fn kernels(self) -> &'static Kernels {
        match self {
            Path::Scalar => &kernels::SCALAR,
            Path::ScalarWide => &kernels::SCALAR_WIDE,
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => &kernels::AVX2,
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => &kernels::AVX512,
            #[cfg(target_arch = "x86_64")]
            Path::Avx512Vnni => &kernels::AVX512_VNNI,
            #[cfg(not(target_arch = "x86_64"))]
            Path::Avx2 | Path::Avx512 | Path::Avx512Vnni => &kernels::SCALAR,
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Takes the forced path, or the best one that passes the self-check.
pub(super) fn choose(forced: Option<Path>) -> Result<(Path, &'static Kernels), BackendError> {
    let path = forced.unwrap_or_else(Path::best);
    if let Some(missing) = path.missing() {
        return Err(BackendError::Device(format!(
            "the CPU path {path} was asked for, but this machine lacks {missing}; best here: {}",
            Path::best()
        )));
    }
    let slower = [Path::Avx512, Path::Avx2, Path::Scalar];
    let candidates = slower
        .into_iter()
        .skip_while(|&slower| slower as u8 >= path as u8);
    for candidate in std::iter::once(path).chain(candidates) {
        if !candidate.is_available() {
            continue;
        }
        match check(candidate.kernels()) {
            Ok(()) => return Ok((candidate, candidate.kernels())),
            Err(what) => {
                tracing::warn!(path = %candidate, what, "CPU path fails its self-check; falling back");
            }
        }
    }
    Err(BackendError::Device(
        "every CPU path fails its self-check".to_owned(),
    ))
}

/// Small deterministic pseudo-random bytes (xorshift).
fn noise(n: usize, seed: u32) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as u8
    };
    (0..n).map(|_| next()).collect()
}

/// Compares the products and vector kernels with the scalar ones on random blocks, about 1 ms.
fn check(kernels: &'static Kernels) -> Result<(), &'static str> {
    for dtype in [
        DType::Q4_0,
        DType::Q4_1,
        DType::Q8_0,
        DType::Q3_K,
        DType::Q6_K,
        DType::F16,
    ] {
        let (found, wanted) = (product(kernels, dtype), product(&kernels::SCALAR, dtype));
        let close =
            |found: &f32, wanted: &f32| (found - wanted).abs() <= 1e-4 * wanted.abs() + 1e-3;
        if !found
            .iter()
            .zip(&wanted)
            .all(|(found, wanted)| close(found, wanted))
        {
            return Err("a matrix product differs from the scalar one");
        }
    }
    let mut scores: Vec<f32> = noise(48, 9)
        .iter()
        .map(|&byte| f32::from(byte) / 16.0)
        .collect();
    let mut expected = scores.clone();
    // SAFETY: 48 values each; `choose` checked that the machine has the instruction set.
    let (found, wanted) = unsafe {
        (
            (kernels.exponentials)(scores.as_mut_ptr(), 48),
            (kernels::SCALAR.exponentials)(expected.as_mut_ptr(), 48),
        )
    };
    if found.0 != wanted.0 || (found.1 - wanted.1).abs() > 1e-4 * wanted.1 {
        return Err("exponentials differ from the scalar ones");
    }
    Ok(())
}

/// `(9 rows, 32 outputs)` of a 32 x 256 matrix of random bytes with tame scales.
fn product(kernels: &'static Kernels, dtype: DType) -> Vec<f32> {
    let (n_out, n_in, n_rows) = (32, 256, 9);
    let mut bytes = noise(n_out * n_in / dtype.block_len() * dtype.block_bytes(), 7);
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        tame_scales(dtype, block);
    }
    let tensor = TensorData {
        name: "self-check",
        dtype,
        n_out,
        n_in,
        bytes: &bytes,
    };
    let threads = Threads::start(1).expect("one thread starts none");
    let matrix = Matrix::pack(&tensor, kernels.lanes, &threads).expect("a small valid tensor");
    let floats: Vec<f32> = noise(n_rows * n_in, 3)
        .iter()
        .map(|&byte| f32::from(byte as i8) / 64.0)
        .collect();
    let zero = ActivationBlock {
        codes: [0; 32],
        scale: 0.0,
        sums: [0; 3],
        scaled_sums: [0.0; 3],
    };
    let mut blocks = vec![zero; n_rows * n_in / 32];
    let mut out = vec![0.0; n_rows * n_out];
    // SAFETY: as many blocks as floats; `choose` checked that the machine has the instruction set.
    unsafe { (kernels.quantize)(floats.as_ptr(), blocks.len(), blocks.as_mut_ptr()) };
    let inputs = InputsView {
        floats: &floats,
        blocks: &blocks,
        remainders: &[],
    };
    super::step::product(
        kernels,
        &matrix,
        0..matrix.n_panels(),
        &inputs,
        0..n_rows,
        &mut out,
        n_out,
    );
    out
}

/// Overwrites the f16 scales of a block with 2^-6.
fn tame_scales(dtype: DType, block: &mut [u8]) {
    let places: &[usize] = match dtype {
        DType::Q4_1 => &[0, 2],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
        _ => &[0],
    };
    for &at in places {
        block[at..at + 2].copy_from_slice(&half::f16::from_f32(1.0 / 64.0).to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_available_path_passes_its_self_check() {
        for path in Path::ALL.into_iter().filter(|path| path.is_available()) {
            assert_eq!(check(path.kernels()), Ok(()), "{path}");
            let (chosen, _) = choose(Some(path)).expect("available");
            assert_eq!(chosen, path);
        }
    }

    #[test]
    fn names_round_trip_and_nonsense_names_the_choices() {
        for path in Path::ALL {
            assert_eq!(Path::parse(path.name()), Ok(path));
        }
        let error = Path::parse("mmx").expect_err("no such path").to_string();
        assert!(error.contains("mmx") && error.contains("avx2"), "{error}");
    }

    #[test]
    fn a_path_that_the_machine_lacks_is_an_error_that_says_what() {
        for path in Path::ALL.into_iter().filter(|path| !path.is_available()) {
            let Err(error) = choose(Some(path)) else {
                panic!("{path} is not available")
            };
            assert!(error.to_string().contains("lacks"), "{error}");
        }
    }

    #[test]
    fn a_broken_table_is_found() {
        unsafe fn wrong(_: *mut f32, _: usize) -> (f32, f32) {
            (0.0, 0.0)
        }
        static BROKEN: Kernels = Kernels {
            exponentials: wrong,
            ..kernels::SCALAR
        };
        assert!(check(&BROKEN).is_err());
    }
}

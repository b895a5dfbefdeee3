//! The instruction sets that tests of the CPU backend go through: all that this machine has, or
//! exactly those that `TINYLOOP_TEST_PATHS` names (`avx512,avx512vnni`), so that an emulated
//! machine spends its time on the ones that no other machine runs.
//!
//! A test that needs it says `#[path = "common/cpu_paths.rs"] mod cpu_paths;`.

use tinyloop::backend::Backend;
use tinyloop::backend::cpu::{CpuBackend, Path};

/// Slowest first.
///
/// # Panics
/// When the variable names an unknown path or one that this machine lacks.
pub(crate) fn paths() -> Vec<Path> {
    let available = || Path::ALL.into_iter().filter(|path| path.is_available());
    let Ok(names) = std::env::var("TINYLOOP_TEST_PATHS") else {
        return available().collect();
    };
    names
        .split(',')
        .map(|name| {
            available()
                .find(|path| path.name() == name)
                .unwrap_or_else(|| panic!("TINYLOOP_TEST_PATHS: no {name:?} on this machine"))
        })
        .collect()
}

/// A backend that really runs `path`: one whose self-check failed falls back to another.
pub(crate) fn cpu(path: Path, n_threads: usize) -> CpuBackend {
    let builder = CpuBackend::builder().path(path).threads(n_threads);
    let backend = builder.build().expect("an available path");
    assert_eq!(backend.name(), format!("cpu {path} x{n_threads}"));
    backend
}

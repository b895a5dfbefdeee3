//! The process's heap: two settings of glibc's allocator, made once at the very start.
//!
//! glibc gives threads arenas of their own, up to eight per core, and memory that is free in one
//! does not serve another: with a hundred HTTP workers the resident memory of a steady load goes on
//! rising for hours while the bytes in use stay the same. One arena per core is enough for threads not to
//! wait for each other's: with one for eight cores requests cost an eighth more. And blocks of request
//! bodies and the like are mapped, so that they go back to the system when they are freed; by default
//! glibc stops doing that after the first large one. What is not here: weights and K/V, which are mapped
//! anyway (`backend/cpu/buffer`).

/// Blocks from this size on are mapped.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES_MIN: i32 = 128 << 10;

/// To be called before any thread is started. The environment's `MALLOC_ARENA_MAX` and the like come
/// first. Does nothing where the C library is another.
pub fn configure() {
    #[cfg(target_env = "gnu")]
    {
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let n_arenas = i32::try_from(n_cores).unwrap_or(i32::MAX);
        let settings = [
            ("MALLOC_ARENA_MAX", libc::M_ARENA_MAX, n_arenas),
            (
                "MALLOC_MMAP_THRESHOLD_",
                libc::M_MMAP_THRESHOLD,
                MAPPED_BYTES_MIN,
            ),
        ];
        for (variable, parameter, value) in settings {
            if std::env::var_os(variable).is_none() {
                // SAFETY: a documented call without pointers; an unknown parameter changes nothing, and
                // neither does a failure (0), which is why the result is not looked at.
                let _ = unsafe { libc::mallopt(parameter, value) };
            }
        }
    }
}

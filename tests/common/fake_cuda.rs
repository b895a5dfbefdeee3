//! Builds and opens the emulated CUDA driver of `tests/fake_cuda/`.
//!
//! `g++` compiles the driver and the kernels of `kernels/` into `target/fake_cuda/`, once per state
//! of the sources: the folder's name holds their hash, objects have their own. One thread of one
//! process builds at a time, behind a file lock; a finished folder appears by one rename.
//! The library's soname is `libcuda.so`: once it is open, cudarc's search for that name finds it,
//! on machines with a real driver as well.
//!
//! A test that needs it says `#[path = "common/fake_cuda.rs"] mod fake_cuda;`. Knobs are environment
//! variables, see `tests/fake_cuda/README.md`.

#![allow(
    dead_code,
    reason = "every test binary that includes this file uses a part of it"
)]

use std::collections::hash_map::DefaultHasher;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Devices that [`FakeCuda::open`] provides, so that every test can take one for itself.
const N_DEVICES: usize = 64;

/// Which checks are compiled into the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flavour {
    /// Those of the emulator alone.
    Plain,
    /// `FAKE_CUDA_FLAVOUR=undefined`: what C++ leaves undefined ends the launch.
    Undefined,
    /// `FAKE_CUDA_FLAVOUR=race`: unordered accesses to shared memory end the launch; slow.
    Race,
}

impl Flavour {
    /// The one that `FAKE_CUDA_FLAVOUR` names.
    ///
    /// # Panics
    /// When there is none of that name.
    pub(crate) fn of_environment() -> Self {
        match std::env::var("FAKE_CUDA_FLAVOUR").as_deref() {
            Err(_) | Ok("" | "plain") => Self::Plain,
            Ok("undefined") => Self::Undefined,
            Ok("race") => Self::Race,
            Ok(other) => panic!("FAKE_CUDA_FLAVOUR={other}: plain, undefined or race"),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Undefined => "undefined",
            Self::Race => "race",
        }
    }

    /// Further flags for the kernels, and for the emulator's race checker.
    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Plain => &[],
            Self::Undefined => &[
                "-fsanitize=alignment,bounds,shift,signed-integer-overflow",
                "-fsanitize=integer-divide-by-zero,float-cast-overflow,unreachable",
            ],
            Self::Race => &["-fsanitize=thread", "-DEMU_RACE"],
        }
    }
}

/// Flags of all objects. No contraction: the arithmetic is what the sources say.
const FLAGS: &[&str] = &[
    "-std=c++17",
    "-O2",
    "-g1",
    "-march=x86-64-v3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-unused-parameter",
    "-DCUDA_HOST_EMU",
];

/// Sources of the driver; the kernels follow as one more.
const DRIVER_SOURCES: &[&str] = &["scheduler", "driver", "work", "undefined", "race"];

/// Programs that use the driver API.
const PROGRAMS: &[&str] = &["self_test", "kernels_test", "kernels_bench"];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Files of `kernels/` and `tests/fake_cuda/` with one of these extensions, by name.
fn sources(extensions: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in ["kernels", "tests/fake_cuda"] {
        let entries = fs::read_dir(root().join(folder)).expect("the folder is in the repository");
        found.extend(entries.map(|entry| entry.expect("an entry can be read").path()));
    }
    found.retain(|path| {
        let extension = path.extension().unwrap_or_default();
        extensions.iter().any(|wanted| extension == *wanted)
    });
    found.sort();
    found
}

fn hash_of(files: &[PathBuf], flags: &[&str]) -> u64 {
    let mut hasher = DefaultHasher::new();
    flags.hash(&mut hasher);
    for file in files {
        let text = fs::read(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        (file.file_name(), text).hash(&mut hasher);
    }
    hasher.finish()
}

/// The one translation unit of the kernels: all sources, then a line per `KERNEL(threads, name)(`.
fn kernels_unit() -> String {
    let mut unit = String::from("#include \"kernels.cu\"\n#include \"faulty.cu\"\n");
    for path in sources(&["cu"]) {
        let text = fs::read_to_string(&path).expect("kernels are UTF-8");
        for line in text.lines() {
            let Some(head) = line.strip_prefix("KERNEL(") else {
                continue;
            };
            let head = head.split(')').next().unwrap_or_default();
            unit.push_str(&format!("EMU_REGISTER({head})\n"));
        }
    }
    unit
}

fn run(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e} (the emulated CUDA driver needs g++)"));
    assert!(
        output.status.success(),
        "{command:?}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Compiles `source` unless an object of the same sources and flags is there.
fn object(folder: &Path, source: &Path, headers: &[PathBuf], flags: &[&str]) -> PathBuf {
    let name = source
        .file_stem()
        .expect("a source has a name")
        .to_string_lossy();
    let mut inputs = headers.to_vec();
    inputs.push(source.to_path_buf());
    let path = folder.join(format!("{name}-{:016x}.o", hash_of(&inputs, flags)));
    if !path.exists() {
        let unfinished = folder.join("unfinished.o");
        let mut command = Command::new("g++");
        command.args(flags).arg("-I").arg(root().join("kernels"));
        command.arg("-I").arg(root().join("tests/fake_cuda"));
        run(command.arg("-c").arg(source).arg("-o").arg(&unfinished));
        fs::rename(&unfinished, &path).expect("an object can be renamed");
    }
    path
}

fn link(folder: &Path, objects: &[PathBuf]) {
    let mut command = Command::new("g++");
    command.args(["-shared", "-Wl,-soname,libcuda.so", "-o"]);
    run(command.arg(folder.join("libcuda.so")).args(objects));
    for program in PROGRAMS {
        let mut command = Command::new("g++");
        command.args(["-std=c++17", "-O2", "-o"]);
        command.arg(folder.join(program));
        command.arg(root().join(format!("tests/fake_cuda/{program}.cpp")));
        run(command.arg("-ldl"));
    }
}

/// Builds of earlier states of the sources. Where one is still open, its files live on until it is
/// closed.
fn remove_older(base: &Path, flavour: Flavour) {
    let entries = fs::read_dir(base).expect("the folder was made");
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(&format!("{}-", flavour.name())) && !name.ends_with(".unfinished") {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

/// The folder that holds `libcuda.so` and the test programs of this state of the sources.
///
/// # Panics
/// When `g++` is missing or refuses the sources.
pub(crate) fn build(flavour: Flavour) -> PathBuf {
    let base = root().join("target/fake_cuda");
    let inputs = sources(&["cu", "cuh", "cpp", "h"]);
    let flags = [FLAGS, flavour.flags()].concat();
    let name = format!("{}-{:016x}", flavour.name(), hash_of(&inputs, &flags));
    let folder = base.join(&name);
    let objects = base.join("objects");
    fs::create_dir_all(&objects).expect("target/ can be written");
    let lock = fs::File::create(base.join("lock")).expect("target/ can be written");
    lock.lock().expect("a file of target/ can be locked");
    if folder.exists() {
        return folder;
    }
    let unfinished = base.join(format!("{name}.unfinished"));
    let _ = fs::remove_dir_all(&unfinished);
    fs::create_dir_all(&unfinished).expect("target/ can be written");
    let unit = unfinished.join("kernels_host.cpp");
    fs::write(&unit, kernels_unit()).expect("target/ can be written");
    let driver_flags = match flavour {
        Flavour::Race => [FLAGS, &["-DEMU_RACE"]].concat(),
        _ => FLAGS.to_vec(),
    };
    let headers = sources(&["h"]);
    let mut built: Vec<PathBuf> = DRIVER_SOURCES
        .iter()
        .map(|source| root().join(format!("tests/fake_cuda/{source}.cpp")))
        .map(|source| object(&objects, &source, &headers, &driver_flags))
        .collect();
    built.push(object(
        &objects,
        &unit,
        &sources(&["cu", "cuh", "h"]),
        &flags,
    ));
    link(&unfinished, &built);
    remove_older(&base, flavour);
    fs::rename(&unfinished, &folder).expect("a folder of target/ can be renamed");
    folder
}

/// The emulated driver, open in this process for good.
pub(crate) struct FakeCuda {
    handle: *mut c_void,
    next_device: AtomicUsize,
}

// SAFETY: the handle is only given to dlsym, which any thread may call.
unsafe impl Sync for FakeCuda {}
// SAFETY: as above.
unsafe impl Send for FakeCuda {}

impl FakeCuda {
    /// Opens the driver with many devices, built as `FAKE_CUDA_FLAVOUR` says. Call it before anything
    /// asks cudarc for a driver. `FAKE_CUDA_FLAVOUR=real`: nothing is opened, so that cudarc finds the
    /// machine's own driver; tests that inject faults must ask [`Self::is_real`] and leave.
    ///
    /// # Panics
    /// When it cannot be built or opened.
    pub(crate) fn open() -> &'static Self {
        static OPEN: OnceLock<FakeCuda> = OnceLock::new();
        OPEN.get_or_init(|| {
            if std::env::var("FAKE_CUDA_FLAVOUR").is_ok_and(|flavour| flavour == "real") {
                return Self {
                    handle: std::ptr::null_mut(),
                    next_device: AtomicUsize::new(0),
                };
            }
            let path = build(Flavour::of_environment()).join("libcuda.so");
            let name = CString::new(path.to_string_lossy().as_ref()).expect("a path without NUL");
            // SAFETY: the library's constructors only fill its own list of kernels.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
            assert!(!handle.is_null(), "{}: {}", path.display(), dl_error());
            let driver = Self {
                handle,
                next_device: AtomicUsize::new(0),
            };
            if std::env::var_os("FAKE_CUDA_DEVICES").is_none() {
                driver.configure("DEVICES", &N_DEVICES.to_string());
            }
            driver
        })
    }

    /// The tests run on the machine's own driver.
    pub(crate) fn is_real(&self) -> bool {
        self.handle.is_null()
    }

    fn symbol(&self, name: &CStr) -> *mut c_void {
        assert!(!self.is_real(), "a real driver has no {name:?}");
        // SAFETY: the handle is open for good and the name ends with NUL.
        let found = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!found.is_null(), "{name:?}: {}", dl_error());
        found
    }

    /// Sets a knob by its name without `FAKE_CUDA_`. `DEVICES` and `MEM_MB` count until the driver's
    /// first initialisation, `PTX`, `CC`, `MODE` and `ORDER` at once and for all devices.
    pub(crate) fn configure(&self, name: &str, value: &str) {
        type Configure = unsafe extern "C" fn(*const c_char, *const c_char) -> c_int;
        let (name, value) = (
            CString::new(name).expect("a name without NUL"),
            CString::new(value).expect("a value without NUL"),
        );
        // SAFETY: driver.cpp defines the function with these parameters.
        let configure: Configure =
            unsafe { std::mem::transmute(self.symbol(c"fakeCudaConfigure")) };
        // SAFETY: both texts end with NUL and outlive the call.
        assert_eq!(unsafe { configure(name.as_ptr(), value.as_ptr()) }, 0);
    }

    /// A device that no other test of this process gets (a real driver's first one for all): faults, memory and work are a device's own.
    ///
    /// # Panics
    /// When all are taken.
    pub(crate) fn take_device(&self) -> usize {
        if self.is_real() {
            return 0;
        }
        let device = self.next_device.fetch_add(1, Ordering::Relaxed);
        assert!(device < N_DEVICES, "more tests than emulated devices");
        device
    }

    /// The device fails for good after so many more kernels. The driver must be initialised.
    pub(crate) fn lose_device(&self, device: usize, n_launches: i64) {
        type Lose = unsafe extern "C" fn(c_int, i64) -> c_int;
        // SAFETY: driver.cpp defines the function with these parameters.
        let lose: Lose = unsafe { std::mem::transmute(self.symbol(c"fakeCudaLoseDevice")) };
        // SAFETY: plain numbers; the function checks the device.
        assert_eq!(unsafe { lose(device as c_int, n_launches) }, 0);
    }

    /// The memory that the device has from now on. The driver must be initialised.
    pub(crate) fn set_memory(&self, device: usize, n_bytes: u64) {
        type SetMemory = unsafe extern "C" fn(c_int, u64) -> c_int;
        // SAFETY: driver.cpp defines the function with these parameters.
        let set: SetMemory = unsafe { std::mem::transmute(self.symbol(c"fakeCudaSetMemory")) };
        // SAFETY: plain numbers; the function checks the device.
        assert_eq!(unsafe { set(device as c_int, n_bytes) }, 0);
    }

    /// Kernels that the device has run, replays of graphs included. The driver must be initialised.
    pub(crate) fn launches(&self, device: usize) -> u64 {
        type Launches = unsafe extern "C" fn(c_int, *mut u64) -> c_int;
        // SAFETY: driver.cpp defines the function with these parameters.
        let launches: Launches = unsafe { std::mem::transmute(self.symbol(c"fakeCudaLaunches")) };
        let mut n = 0;
        // SAFETY: the pointer is that of a live u64.
        assert_eq!(unsafe { launches(device as c_int, &raw mut n) }, 0);
        n
    }
}

fn dl_error() -> String {
    // SAFETY: dlerror gives a text that is valid until the next call on this thread, or null.
    let text = unsafe { libc::dlerror() };
    match text.is_null() {
        true => String::new(),
        // SAFETY: not null, and ends with NUL.
        false => unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    }
}

//! What the machine has: main memory from `/proc`, GPUs from `nvidia-smi` where there is one.
//!
//! Reading only, on the thread that asks; nothing here is charged or decided (the ledger does
//! that). GPUs are asked at most once a second whoever asks, by one thread at a time, and no longer
//! than `GPU_ANSWER_MAX`: a driver that hangs must not hang the admin page. What is not here:
//! which model takes how much.

use parking_lot::{Condvar, Mutex};
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for `nvidia-smi`.
const GPU_ANSWER_MAX: Duration = Duration::from_secs(3);
/// An answer is repeated for so long; `nvidia-smi` may take half a second.
const GPU_ANSWER_KEPT: Duration = Duration::from_secs(1);
/// Most of `nvidia-smi`'s answer that is read: thousands of devices.
const GPU_ANSWER_BYTES_MAX: u64 = 1 << 20;
const GPU_PROGRAM: &str = "nvidia-smi";
const GPU_QUERY: [&str; 2] = [
    "--query-gpu=index,uuid,name,memory.total,memory.used,utilization.gpu,driver_version",
    "--format=csv,noheader,nounits",
];

/// Main memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MainMemory {
    /// What this process may use at most: the machine's, or the limit of its control group.
    pub total_bytes: u64,
    /// Taken, by anybody; caches that can be dropped do not count.
    pub used_bytes: u64,
    /// Resident memory of this process.
    pub process_bytes: u64,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its number for the driver.
    pub index: u32,
    /// Its name for life.
    pub uuid: String,
    /// Product name.
    pub name: String,
    /// Memory in bytes; None where the driver does not say.
    pub total_bytes: Option<u64>,
    /// Memory in use, by any process.
    pub used_bytes: Option<u64>,
    /// Percent of the time that a kernel was running.
    pub utilization_percent: Option<u32>,
    /// Version of the driver.
    pub driver: String,
}

/// Main memory now. The error says which file could not be read.
pub fn main_memory() -> Result<MainMemory, String> {
    let read = |path: &str| {
        std::fs::read_to_string(path).map_err(|error| format!("not available: {path}: {error}"))
    };
    let machine = parse_meminfo(&read("/proc/meminfo")?)?;
    let process_bytes = read("/proc/self/status")
        .ok()
        .and_then(|status| kilobytes(&status, "VmRSS:"))
        .unwrap_or(0);
    let number = |path: &str| read(path).ok()?.trim().parse::<u64>().ok();
    let group = (
        number("/sys/fs/cgroup/memory.max"),
        number("/sys/fs/cgroup/memory.current"),
    );
    let inactive_file = read("/sys/fs/cgroup/memory.stat")
        .ok()
        .and_then(|stat| word_after(&stat, "inactive_file"));
    let (total_bytes, used_bytes) = within_group(machine, group, inactive_file.unwrap_or(0));
    Ok(MainMemory {
        total_bytes,
        used_bytes,
        process_bytes,
    })
}

/// (total, used) of the machine, in bytes.
fn parse_meminfo(text: &str) -> Result<(u64, u64), String> {
    let field = |name: &str| {
        kilobytes(text, name).ok_or_else(|| format!("not available: /proc/meminfo lacks {name}"))
    };
    let total = field("MemTotal:")?;
    Ok((total, total.saturating_sub(field("MemAvailable:")?)))
}

/// The value behind `name` of a `NAME:   123 kB` list, in bytes.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    word_after(text, name)?.checked_mul(1024)
}

/// The number behind `name` at the beginning of a line.
fn word_after(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The limit of the control group counts where it is tighter than the machine.
fn within_group(
    (total, used): (u64, u64),
    group: (Option<u64>, Option<u64>),
    group_cache: u64,
) -> (u64, u64) {
    match group {
        (Some(limit), Some(current)) if limit < total => {
            (limit, current.saturating_sub(group_cache).min(limit))
        }
        _ => (total, used),
    }
}

/// What asks the driver, and what it said last.
#[derive(Debug, Default)]
pub struct GpuWatch {
    /// Guards the last answer and whether somebody asks; never held while the driver is asked.
    state: Mutex<WatchState>,
    answered: Condvar,
}

#[derive(Debug, Default)]
struct WatchState {
    is_asking: bool,
    last: Option<(Instant, Result<Vec<Gpu>, String>)>,
}

impl GpuWatch {
    /// All GPUs, or why they are not known. At most one second old.
    pub fn gpus(&self) -> Result<Vec<Gpu>, String> {
        let deadline = Instant::now() + GPU_ANSWER_MAX;
        let mut state = self.state.lock();
        loop {
            if let Some((at, answer)) = &state.last
                && at.elapsed() < GPU_ANSWER_KEPT
            {
                return answer.clone();
            }
            if !state.is_asking {
                break;
            }
            if self.answered.wait_until(&mut state, deadline).timed_out() {
                return Err("not available: somebody else is still asking nvidia-smi".to_owned());
            }
        }
        state.is_asking = true;
        drop(state);
        let answer = ask_gpus(Path::new(GPU_PROGRAM), &GPU_QUERY, GPU_ANSWER_MAX);
        let mut state = self.state.lock();
        state.is_asking = false;
        state.last = Some((Instant::now(), answer.clone()));
        drop(state);
        self.answered.notify_all();
        answer
    }
}

/// Runs the program and reads its table. It is killed when it takes too long.
fn ask_gpus(program: &Path, query: &[&str], patience: Duration) -> Result<Vec<Gpu>, String> {
    let shown = program.display();
    let child = Command::new(program)
        .args(query)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = child.map_err(|error| match error.kind() {
        ErrorKind::NotFound => format!("not available: there is no {shown} on the PATH"),
        _ => format!("not available: {shown}: {error}"),
    })?;
    let said = read_all(&mut child, patience);
    if said.is_none() {
        // It may have ended by itself meanwhile.
        let _ = child.kill();
    }
    let status = child
        .wait()
        .map_err(|error| format!("not available: {shown}: {error}"))?;
    match said {
        None => Err(format!(
            "not available: {shown} gave no answer within {} s",
            patience.as_secs_f64()
        )),
        // The driver's complaints go to standard output.
        Some(text) if !status.success() => Err(format!(
            "not available: {shown} failed ({status}): {}",
            text.lines().next().unwrap_or_default()
        )),
        Some(text) => parse_gpus(&text),
    }
}

/// Standard output until its end; None when that takes too long.
fn read_all(child: &mut Child, patience: Duration) -> Option<String> {
    let stdout = child.stdout.take()?;
    let (sender, receiver) = crossbeam_channel::bounded(1);
    let reader = std::thread::Builder::new()
        .name("gpu-query".into())
        .spawn(move || {
            let mut bytes = Vec::new();
            // What was read before an error is still worth parsing.
            let _ = stdout.take(GPU_ANSWER_BYTES_MAX).read_to_end(&mut bytes);
            // Nobody listens any more when it took too long.
            let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
        });
    reader.ok()?;
    receiver.recv_timeout(patience).ok()
}

/// The table of [`GPU_QUERY`]: a line per GPU, memory in MiB, `[N/A]` for what is not known.
fn parse_gpus(text: &str) -> Result<Vec<Gpu>, String> {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines.map(parse_gpu).collect()
}

fn parse_gpu(line: &str) -> Result<Gpu, String> {
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let [index, uuid, name, total, used, utilization, driver] = fields.as_slice() else {
        return Err(format!("not available: nvidia-smi said {line:?}"));
    };
    let mebibytes = |field: &str| field.parse::<u64>().ok()?.checked_mul(1 << 20);
    Ok(Gpu {
        index: index
            .parse()
            .map_err(|_| format!("not available: nvidia-smi said {line:?}"))?,
        uuid: (*uuid).to_owned(),
        name: (*name).to_owned(),
        total_bytes: mebibytes(total),
        used_bytes: mebibytes(used),
        utilization_percent: utilization.parse().ok(),
        driver: (*driver).to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_machine_and_of_a_control_group() {
        let text = "MemTotal:       2048 kB\nMemFree:  100 kB\nMemAvailable:   512 kB\n";
        let machine = parse_meminfo(text).expect("complete");
        assert_eq!(machine, (2048 << 10, 1536 << 10));
        assert!(parse_meminfo("MemTotal: 1 kB\n").is_err());
        assert!(parse_meminfo("MemTotal: x kB\nMemAvailable: 1 kB").is_err());
        // A looser limit, or none, leaves the machine's numbers.
        for group in [(None, Some(5)), (Some(4096 << 10), Some(5))] {
            assert_eq!(within_group(machine, group, 0), machine);
        }
        let group = (Some(1 << 20), Some(900_000));
        assert_eq!(within_group(machine, group, 100_000), (1 << 20, 800_000));
    }

    #[test]
    fn this_machine_has_memory_and_this_process_uses_some() {
        let memory = main_memory().expect("Linux");
        assert!(memory.total_bytes >= memory.used_bytes);
        assert!(memory.process_bytes > 0);
    }

    #[test]
    fn gpu_tables() {
        let text = "0, GPU-1b2c, NVIDIA H200, 143771, 1024, 7, 570.86.15\n\
                    1, GPU-77, NVIDIA GB10, [N/A], [N/A], [N/A], 580.1\n\n";
        let gpus = parse_gpus(text).expect("a table");
        assert_eq!(
            gpus[0],
            Gpu {
                index: 0,
                uuid: "GPU-1b2c".to_owned(),
                name: "NVIDIA H200".to_owned(),
                total_bytes: Some(143_771 << 20),
                used_bytes: Some(1024 << 20),
                utilization_percent: Some(7),
                driver: "570.86.15".to_owned(),
            }
        );
        assert_eq!(
            (gpus[1].total_bytes, gpus[1].utilization_percent),
            (None, None)
        );
        assert_eq!(parse_gpus(""), Ok(Vec::new()));
        for bad in ["No devices were found", "x, GPU-1, A, 1, 1, 1, 1"] {
            let error = parse_gpus(bad).expect_err("no table");
            assert!(error.contains(bad), "{error}");
        }
    }

    #[test]
    fn programs_that_are_missing_fail_or_hang_are_told_apart() {
        let ask = |program: &str, query: &[&str], patience_ms| {
            ask_gpus(
                Path::new(program),
                query,
                Duration::from_millis(patience_ms),
            )
        };
        let missing = ask("./no-such-program", &[], 1000).expect_err("missing");
        assert!(
            missing.contains("there is no ./no-such-program"),
            "{missing}"
        );
        let script = "echo 'the driver is not loaded'; exit 9";
        let failing = ask("sh", &["-c", script], 20_000).expect_err("it fails");
        assert!(failing.contains("the driver is not loaded"), "{failing}");
        let hanging = ask("sh", &["-c", "exec sleep 600"], 50).expect_err("it hangs");
        assert!(hanging.contains("no answer within 0.05 s"), "{hanging}");
        let answer = ask("sh", &["-c", "echo 0, u, n, 1, 0, 0, d"], 20_000);
        assert_eq!(answer.expect("a table").len(), 1);
    }

    #[test]
    fn askers_share_one_answer() {
        let watch = GpuWatch::default();
        let kept = Err("what was said before".to_owned());
        let later = Instant::now() + Duration::from_secs(60); // fresh however slow this machine is
        watch.state.lock().last = Some((later, kept.clone()));
        assert_eq!(watch.gpus(), kept);
    }
}

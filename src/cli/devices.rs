//! `tinyloop devices`: what models can run on here, and why something is unusable.
//!
//! Asks this machine, not a server. What is not here: the choice (`runtime::device`).

use super::output::Output;
use crate::backend::cuda::{self, CudaDevice};
use crate::error::Error;
use crate::pool::devices::main_memory;

/// Arguments of `tinyloop devices`: none.
#[derive(Clone, Debug, clap::Args)]
pub struct DevicesArgs {}

/// Prints a line per device.
pub fn run(_args: &DevicesArgs) -> Result<(), Error> {
    let mut out = Output::new();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    out.line(&match main_memory() {
        Ok(memory) => {
            let free = memory.total_bytes.saturating_sub(memory.used_bytes);
            let total = memory.total_bytes;
            format!("cpu     {cores} threads, {}", room(free, total))
        }
        Err(why) => format!("cpu     {cores} threads, memory {why}"),
    })?;
    for line in gpu_lines(&cuda::devices()) {
        out.line(&line)?;
    }
    out.finish()
}

fn gpu_lines(found: &Result<Vec<CudaDevice>, String>) -> Vec<String> {
    match found {
        Err(why) => vec![format!("cuda    not available: {why}")],
        Ok(devices) if devices.is_empty() => {
            vec!["cuda    not available: the CUDA driver finds no GPU".to_owned()]
        }
        Ok(devices) => devices.iter().map(gpu_line).collect(),
    }
}

fn gpu_line(device: &CudaDevice) -> String {
    let id = format!("cuda:{}", device.ordinal);
    match &device.problem {
        Some(problem) => format!("{id:7} {}, unusable: {problem}", device.name),
        None => {
            let (major, minor) = device.capability;
            let room = room(device.free_bytes, device.total_bytes);
            format!("{id:7} {}, capability {major}.{minor}, {room}", device.name)
        }
    }
}

fn room(free_bytes: u64, total_bytes: u64) -> String {
    let gib = |bytes: u64| bytes as f64 / (1_u64 << 30) as f64;
    format!("{:.1} of {:.1} GiB free", gib(free_bytes), gib(total_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_device_says_whether_it_can_be_used() {
        let device = |ordinal, problem: Option<&str>| CudaDevice {
            ordinal,
            name: "NVIDIA H200".to_owned(),
            total_bytes: 140 << 30,
            free_bytes: 70 << 30,
            capability: (9, 0),
            problem: problem.map(str::to_owned),
        };
        let found = Ok(vec![device(0, None), device(1, Some("too old"))]);
        let wanted = [
            "cuda:0  NVIDIA H200, capability 9.0, 70.0 of 140.0 GiB free",
            "cuda:1  NVIDIA H200, unusable: too old",
        ];
        assert_eq!(gpu_lines(&found), wanted);
        let none = gpu_lines(&Err("no driver".to_owned()));
        assert_eq!(none, ["cuda    not available: no driver"]);
        assert_eq!(gpu_lines(&Ok(Vec::new())).len(), 1);
    }
}

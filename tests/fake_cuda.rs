//! The emulated CUDA driver against mistakes on purpose: each must be seen, or the tests of the
//! CUDA backend prove nothing. Every scenario is a process of `tests/fake_cuda/self_test.cpp`.

#[path = "common/fake_cuda.rs"]
mod fake_cuda;

use fake_cuda::{Flavour, build};
use ring::digest::{Context, SHA256};
use std::fs;
use std::path::Path;
use std::process::Command;

/// The hash in the first line of the committed PTX is that of the sources, so that nobody tests
/// other kernels than ship; `make check-kernels` compares the text itself.
#[test]
fn the_committed_ptx_is_of_these_sources() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let mut paths: Vec<_> = fs::read_dir(&folder)
        .expect("kernels/ is in the repository")
        .map(|entry| entry.expect("an entry can be read").path())
        .filter(|path| path.extension().is_some_and(|e| e == "cu" || e == "cuh"))
        .collect();
    paths.sort();
    let mut digest = Context::new(&SHA256);
    for path in paths {
        let name = path.file_name().expect("a file has a name");
        digest.update(name.as_encoded_bytes());
        digest.update(b"\0");
        digest.update(&fs::read(&path).expect("sources can be read"));
        digest.update(b"\0");
    }
    let hash: String = digest
        .finish()
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let ptx = fs::read_to_string(folder.join("kernels.ptx")).expect("kernels.ptx is committed");
    let first = ptx.lines().next().unwrap_or_default();
    assert!(
        first.ends_with(&hash),
        "kernels.ptx is of other sources: run `make kernels`\n{first}\n{hash}"
    );
}

/// What a scenario printed, and what the driver complained about.
struct Ran {
    out: String,
    complaints: String,
}

fn run_with(flavour: Flavour, settings: &[(&str, &str)], arguments: &str) -> Ran {
    let folder = build(flavour);
    let mut command = Command::new(folder.join("self_test"));
    for name in [
        "FAKE_CUDA_DEVICES",
        "FAKE_CUDA_MODE",
        "FAKE_CUDA_ORDER",
        "FAKE_CUDA_MEM_MB",
    ] {
        command.env_remove(name);
    }
    let output = command
        .arg(folder.join("libcuda.so"))
        .args(arguments.split_whitespace())
        .envs(settings.iter().copied())
        .output()
        .expect("the self test can be run");
    let ran = Ran {
        out: String::from_utf8(output.stdout).expect("plain text"),
        complaints: String::from_utf8(output.stderr).expect("plain text"),
    };
    assert!(
        output.status.success(),
        "{arguments}: {}\n{}",
        ran.out,
        ran.complaints
    );
    ran
}

fn run(arguments: &str) -> Ran {
    run_with(Flavour::Plain, &[], arguments)
}

impl Ran {
    /// What follows `name ` on its line.
    fn field(&self, name: &str) -> &str {
        self.out
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
            .unwrap_or_else(|| panic!("no {name:?} in {}", self.out))
    }

    fn values(&self) -> Vec<f32> {
        let values = self.field("values").split(' ');
        values.map(|value| value.parse().expect(value)).collect()
    }

    #[track_caller]
    fn fails_with(&self, code: &str, complaint: &str) {
        assert_eq!(self.field("synchronize"), code, "{}", self.complaints);
        assert_eq!(self.field("again"), code, "the fault does not stay");
        assert!(self.complaints.contains(complaint), "{}", self.complaints);
    }
}

#[test]
fn sound_kernels_are_right_in_every_order_and_build() {
    for flavour in [Flavour::Plain, Flavour::Undefined, Flavour::Race] {
        for order in ["forward", "reverse"] {
            for mode in ["lazy", "eager"] {
                let settings = [("FAKE_CUDA_ORDER", order), ("FAKE_CUDA_MODE", mode)];
                let values = |arguments: &str| {
                    let ran = run_with(flavour, &settings, arguments);
                    assert_eq!(ran.field("synchronize"), "0", "{}", ran.complaints);
                    ran.values()
                };
                assert_eq!(values("launch sound_sum 1 96 0 70")[0], 2415.0);
                let early = values("launch sound_early_exit 1 64 0 40");
                assert_eq!((early[0], early[39]), (32.0, 8.0));
                let halves = values("launch sound_half_warps 1 32 0 32");
                assert_eq!((halves[3], halves[31]), (120.0, 376.0));
                let product = values("launch sound_mma 1 32 0 128");
                for (i, value) in product.iter().enumerate() {
                    assert_eq!(*value, (i / 8) as f32 + (i % 8) as f32 / 16.0);
                }
                let copied = values("launch sound_copy 1 32 0 512");
                assert_eq!(copied[0], (511 * 512 / 2) as f32);
            }
        }
    }
}

#[test]
fn addresses_outside_an_allocation_are_illegal() {
    let place = "kernel faulty_beyond_end, block (0,0,0), thread (0,0,0): illegal address";
    run("launch faulty_beyond_end 2 64 0 64").fails_with("700", place);
    run("launch faulty_dynamic_end 1 64 256 64").fails_with("700", "illegal address");
    run("launch faulty_host_pointer 1 64 0 64 host")
        .fails_with("700", "does not point into device memory");
    run("launch faulty_shared_end 1 8 0 32")
        .fails_with("719", "a write beyond the end of shared array sums");
}

#[test]
fn barriers_and_warp_operations_that_diverge_end_the_launch() {
    run("launch faulty_divergent_barrier 2 64 0 64").fails_with("719", "divergent barrier");
    run("launch faulty_two_barriers 2 64 0 64").fails_with("719", "another __syncthreads");
    run("launch faulty_mask 2 32 0 64").fails_with("719", "not in its own mask");
    run("launch faulty_ended_lanes 2 32 0 64").fails_with("719", "of which lanes have ended");
}

#[test]
fn a_missing_barrier_changes_results_with_the_order_and_is_a_race() {
    let arguments = "launch faulty_no_barrier 1 64 0 64";
    let forward = run(arguments).values();
    let reverse = run_with(Flavour::Plain, &[("FAKE_CUDA_ORDER", "reverse")], arguments).values();
    assert!(forward[0].is_nan() && !reverse[0].is_nan());
    assert!(!forward[63].is_nan() && reverse[63].is_nan());
    run_with(Flavour::Race, &[], arguments).fails_with("719", "race in shared memory");
}

#[test]
fn copies_are_there_only_after_the_wait() {
    let values = run("launch faulty_no_wait 1 64 0 64").values();
    assert!(values[63].is_nan());
    run("launch faulty_copy_left 1 64 0 64").fails_with("719", "never waited for");
}

#[test]
fn shared_memory_is_poisoned_for_every_block() {
    for arguments in [
        "launch faulty_static_shared 2 64 0 64",
        "launch faulty_dynamic_shared 2 64 256 64",
    ] {
        let values = run(arguments).values();
        assert!(values.iter().all(|value| value.is_nan()), "{arguments}");
    }
}

#[test]
fn undefined_behaviour_is_named_with_its_line() {
    run_with(Flavour::Undefined, &[], "launch faulty_alignment 1 32 0 64")
        .fails_with("719", "not aligned for its type at");
}

#[test]
fn launches_beyond_the_bounds_are_refused() {
    let ran = run("launch sound_mma 1 64 0 128");
    assert_eq!(ran.field("launch"), "701");
    assert!(ran.complaints.contains("a block of 64 threads"));
    assert_eq!(run("launch sound_sum 1 64 50000 64").field("launch"), "1");
}

#[test]
fn ptx_that_does_not_fit_is_refused_with_a_log() {
    let load = |arguments: &str| {
        let ran = run(arguments);
        (ran.field("load").to_owned(), ran.field("log").to_owned())
    };
    assert_eq!(load("ptx 7.0 sm_80 sound_sum u32").0, "0");
    let (code, log) = load("ptx 7.0 sm_80 sound_sum u64");
    assert!(
        code == "218" && log.contains("disagree on the parameters"),
        "{log}"
    );
    let (code, log) = load("ptx 7.0 sm_80 no_such_kernel u32");
    assert!(code == "218" && log.contains("no_such_kernel"), "{log}");
    let (code, log) = load("ptx 9.9 sm_80 sound_sum u32");
    assert!(code == "222" && log.contains("9.9"), "an old driver: {log}");
    assert_eq!(load("ptx 7.0 sm_90 sound_sum u32").0, "209");
}

#[test]
fn devices_and_memory_are_what_the_knobs_say() {
    let with = |name: &str, value: &str, arguments: &str| {
        run_with(Flavour::Plain, &[(name, value)], arguments)
    };
    let none = with("FAKE_CUDA_DEVICES", "0", "memory 1");
    assert_eq!(none.field("ready"), "100");
    let old = with("FAKE_CUDA_CC", "7.5", "ptx 7.0 sm_80 sound_sum u32");
    assert_eq!(old.field("load"), "209");
    let small = with("FAKE_CUDA_MEM_MB", "100", "memory 101");
    assert_eq!(small.field("allocate"), "2");
    assert_eq!(small.field("free"), "100 of 100");
    let fits = with("FAKE_CUDA_MEM_MB", "100", "memory 99");
    assert_eq!(fits.field("free"), "1 of 100");
}

#[test]
fn work_runs_only_where_the_host_waits() {
    let lazy = run("pinned");
    assert_eq!((lazy.field("before"), lazy.field("after")), ("-1", "7"));
    let eager = run_with(Flavour::Plain, &[("FAKE_CUDA_MODE", "eager")], "pinned");
    assert_eq!(eager.field("before"), "7");
}

#[test]
fn graphs_replay_what_was_captured() {
    let ran = run("graph");
    assert_eq!(ran.field("wait in capture"), "900");
    let replays: Vec<&str> = ran
        .out
        .lines()
        .filter(|l| l.starts_with("replay"))
        .collect();
    assert_eq!(replays, ["replay 127", "replay 254"]);
    assert_eq!(ran.field("launches"), "4");
}

#[test]
fn a_lost_device_stays_lost_until_its_context_ends() {
    let ran = run("lost");
    let lines: Vec<&str> = ran.out.lines().collect();
    let wanted = [
        "synchronize 0",
        "synchronize 719",
        "allocate 719",
        "ready 0",
        "allocate 0",
    ];
    assert_eq!(lines, wanted);
}

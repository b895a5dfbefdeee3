//! The CPU backend against the scalar oracle: every weight type, every operation, awkward sizes,
//! every instruction set that this machine has (and the 16-wide layouts through plain arrays);
//! and bit equality of batches, chunks and thread counts. Random weights, fixed seeds.

#[path = "../common/cpu_paths.rs"]
mod cpu_paths;

mod attention;
mod exits;
mod invariance;
mod products;
mod refusals;
mod support;

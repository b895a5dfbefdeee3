//! The executor against a scripted runtime: every line of the policy, without a sleep.
//!
//! Most tests step the driver on their own thread (`start_without_thread`, `drive`) under a manual
//! clock, so that each step is where the test says. `threads` runs real threads; `random` drives
//! any sequence of operations against a small model; `native` asks a real one.

mod adaptive;
mod admission;
mod cancel;
mod drain;
mod fairness;
mod lifecycle;
mod metrics;
mod native;
mod order;
mod preemption;
mod random;
mod replicas;
mod streams;
mod support;
mod threads;

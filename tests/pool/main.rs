//! The pool of models: states, memory, loads on demand, unloads, reloads.
//!
//! Most tests drive a real pool with a scripted loader and a manual clock: a load ends when the test
//! says so, time passes when the test says so. What a test has to wait for (another thread's next
//! step) it waits for with a deadline, on the pool's own condition.

mod definition;
mod demand;
mod ledger;
mod native;
mod overrides;
mod reload;
mod rooms;
#[path = "../common/stand_in_model.rs"]
mod stand_in_model;
mod states;
mod storms;
mod support;
mod surprises;
mod unload;

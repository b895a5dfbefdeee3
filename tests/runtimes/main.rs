//! Every runtime behind the one trait: the same checks for all (`conformance`), then what is special
//! about those that forward: faults of servers (`faults`), child processes (`children`), several servers
//! of which some do not answer (`circuits`), the whole way
//! through HTTP (`front`).
//!
//! Other programs are stood in for by `tests/scripts/stand_in_server.py`, which speaks the wire formats
//! of vLLM and llama-server. A real llama-server runs when `TINYLOOP_LLAMA_SERVER` names one
//! (`make test-llama-server`). vLLM itself needs a GPU and is not run.

#[path = "../http/client.rs"]
#[expect(dead_code, reason = "the HTTP tests use more of it")]
mod client;

mod children;
mod circuits;
mod conformance;
mod embeddings;
mod faults;
mod front;
mod real;
mod scripted;
mod support;

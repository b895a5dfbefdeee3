//! What all routes that generate have in common, whatever they call it.
//!
//! Runs on the HTTP worker that took the request and holds it until the answer is out:
//!
//! ```text
//!   body ── prepare ──► Work { jobs, growing, shape } ── run ──► jobs ──► Update
//!                                                                          │ growing (pure)
//!        client ◄── one event, one chunk, one flush ◄── shape (pure) ◄── Step
//! ```
//!
//! A dialect is a translation of its body into a chat body (`prepare` checks that) and a
//! [`shape::Shape`]: how an answer looks to its client. What is not here: which fields a request has
//! (`openai`), text and stop strings (`scheduler::TokenStream`), tools and reasoning (`crate::chat`).

pub mod call;
pub mod embed;
pub mod events;
pub mod growing;
pub mod jobs;
pub mod prepare;
pub mod run;
pub mod shape;
pub mod timings;
pub mod usage;

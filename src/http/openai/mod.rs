//! The OpenAI API family: chat completions, text completions, models.
//!
//! Runs on HTTP workers. `fields`, `capabilities`, `sampling`, `extra_sampling`, `refusals`, `depth`, `structure`, `chat`, `messages`, `tools`, `completions`, `prompt`, `logprobs` and `answer`
//! are pure functions between JSON and our words; `shape` is how answers look, `reading` how what a model writes is told apart and held to a form;
//! `forward` makes the jobs of models that another server runs. Running the jobs: `http::generation`.

pub mod answer;
pub mod capabilities;
pub mod chat;
pub mod choice;
pub mod completions;
pub mod depth;
pub mod embeddings;
pub mod extra_sampling;
pub mod fields;
pub mod forward;
pub mod logprobs;
pub mod messages;
pub mod models;
pub mod prompt;
pub mod reading;
pub mod refusals;
pub mod sampling;
pub mod schedule;
pub mod shape;
pub mod structure;
pub mod tools;

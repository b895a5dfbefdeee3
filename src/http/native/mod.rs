//! The routes of our own under `/v1/native`: what no other API has a place for.
//!
//! Runs on HTTP workers. Errors have OpenAI's shape like everywhere else.

pub mod answer;
pub mod asked;
pub mod generate;
pub mod prefixes;
pub mod prompt;
pub mod tokens;

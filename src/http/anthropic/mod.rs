//! Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`.
//!
//! Runs on HTTP workers. `asked` and `blocks` translate a body into a chat body (pure); `answer` turns
//! the steps of an answer into content blocks and events (pure), `object` holds the types on the
//! wire, `shape` joins them to `generation`; `routes` answers. Errors speak this dialect through
//! `http::error_style`. Images, documents and tools that Anthropic runs itself are refused by name.

pub mod answer;
pub mod asked;
pub mod blocks;
pub mod object;
pub mod routes;
pub mod shape;

//! The OpenAI Responses API: `/v1/responses` and what belongs to it.
//!
//! Runs on HTTP workers. `asked` and `input` translate a body into a chat body (pure); `answer` turns
//! the steps of an answer into output items and typed events (pure), `object` holds the types on the
//! wire, `shape` joins them to `generation`; `store` keeps responses for `previous_response_id` and
//! the routes by id (pure, behind one lock in `kept`); `routes` answers. Hosted tools, conversations
//! and background responses are refused by name.

pub mod answer;
pub mod asked;
pub mod input;
pub mod kept;
pub mod object;
pub mod routes;
pub mod shape;
pub mod store;

//! Both HTTP planes, each on a connection layer of its own (`wire`).
//!
//! Reading order: `data_plane` (a request's way to its route), `router`, `exchange` (one request
//! and its answer), `errors` (the one table from error to status) and `error_style` (in which dialect it is worded), `generation/` (what all routes that generate have in common), `openai/` (chat,
//! completions, models), `dialect` with `responses/` and `anthropic/` (two APIs translated into chat bodies), `native/` (generate and score, tokenize, prefixes), `llama_server/` and `lmstudio/` (their routes), `openapi/` (the description of all routes), `isolation` (who reuses whose
//! prompts), `sse`, `ops` (health, readiness, metrics), `requests` and `live` (list and cancel),
//! `auth` (keys), `access` (what their clients may do), `quota` (requests and tokens per minute), `cors`, `access_log`, `management` and what it alone answers, `admin/`, `state` (what both planes know), `wire/` (connections).
//!
//! Everything here runs on HTTP workers (`wire` has its poll thread, `management` its own few workers). HTTP sees `pool` handles, never an engine. What is not here: scheduling, models.

pub mod access;
pub mod access_log;
pub mod admin;
pub mod anthropic;
pub mod auth;
pub mod cors;
pub mod data_plane;
pub mod dialect;
pub mod error_style;
pub mod errors;
pub mod exchange;
pub mod generation;
pub mod isolation;
pub mod live;
pub mod llama_server;
pub mod lmstudio;
pub mod management;
pub mod native;
pub mod openai;
pub mod openapi;
pub mod ops;
pub mod quota;
pub mod requests;
pub mod responses;
pub mod router;
pub mod sse;
pub mod state;
pub mod wire;

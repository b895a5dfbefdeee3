//! llama-server's own routes, so that its tools and its web UI find what they ask for.
//!
//! Runs on HTTP workers. `props` (properties and slots), `texts` (tokenize, detokenize, templates),
//! `completion` (from its body to ours) with `settings` and `shape` (how answers look), `embedding`. Errors have
//! llama-server's form (`error_style`). Field names and defaults are those of its README and of a running
//! one (build of 2026-05); deliberate differences stand in our README. What is not here: `/health`
//! and `/v1/models`, which are ours with its fields in them.

pub mod completion;
mod embedding;
mod props;
mod settings;
mod shape;
mod texts;

use super::errors::{ApiError, ErrorCode};
use super::exchange::Exchange;
use super::generation::call::Call;
use super::router::percent_decoded;

/// A route of llama-server's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LlamaRoute {
    /// `GET /props`
    Props,
    /// `GET /slots`
    Slots,
    /// `POST /slots/{id}`
    SlotAction,
    /// `POST /tokenize`
    Tokenize,
    /// `POST /detokenize`
    Detokenize,
    /// `POST /apply-template`
    ApplyTemplate,
    /// `POST /completion`
    Completion,
    /// `POST /embedding`
    Embedding,
    /// `GET`, `POST /lora-adapters`
    LoraAdapters,
    /// `POST /infill`
    Infill,
    /// `POST /rerank` and its other names
    Rerank,
}

impl LlamaRoute {
    /// The route of a path.
    #[must_use]
    pub fn of(path: &str) -> Option<Self> {
        Some(match path {
            "/props" => Self::Props,
            "/slots" => Self::Slots,
            "/tokenize" => Self::Tokenize,
            "/detokenize" => Self::Detokenize,
            "/apply-template" => Self::ApplyTemplate,
            "/completion" => Self::Completion,
            "/embedding" => Self::Embedding,
            "/lora-adapters" => Self::LoraAdapters,
            "/infill" => Self::Infill,
            "/rerank" | "/reranking" | "/v1/rerank" | "/v1/reranking" => Self::Rerank,
            _ => {
                let id = path.strip_prefix("/slots/")?;
                (!id.is_empty()).then_some(Self::SlotAction)?
            }
        })
    }

    /// For the log.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Props => "props",
            Self::Slots | Self::SlotAction => "slots",
            Self::Tokenize => "tokenize",
            Self::Detokenize => "detokenize",
            Self::ApplyTemplate => "apply-template",
            Self::Completion => "completion",
            Self::Embedding => "embedding",
            Self::LoraAdapters => "lora-adapters",
            Self::Infill => "infill",
            Self::Rerank => "rerank",
        }
    }

    /// Value of `Allow`.
    #[must_use]
    pub fn allow(self) -> &'static str {
        match self {
            Self::Props | Self::Slots => "GET, HEAD, OPTIONS",
            Self::LoraAdapters => "GET, HEAD, POST, OPTIONS",
            Self::SlotAction
            | Self::Tokenize
            | Self::Detokenize
            | Self::ApplyTemplate
            | Self::Completion
            | Self::Embedding
            | Self::Infill
            | Self::Rerank => "POST, OPTIONS",
        }
    }
}

/// Answers a request for one of these routes.
pub fn answer(route: LlamaRoute, call: &Call<'_>, exchange: Exchange) {
    match route {
        LlamaRoute::Props => reply(exchange, props::props(call)),
        LlamaRoute::Slots => reply(exchange, props::slots(call)),
        LlamaRoute::Tokenize => reply(exchange, texts::tokenize(call)),
        LlamaRoute::Detokenize => reply(exchange, texts::detokenize(call)),
        LlamaRoute::ApplyTemplate => reply(exchange, texts::apply_template(call)),
        LlamaRoute::Completion => completion::completion(call, exchange),
        LlamaRoute::Embedding => embedding::embedding(call, exchange),
        LlamaRoute::LoraAdapters if call.request.method() != "POST" => {
            exchange.json(&[(); 0]); // there are none
        }
        LlamaRoute::LoraAdapters => not_built(exchange, "adapters are not built"),
        LlamaRoute::SlotAction => not_built(
            exchange,
            "slots are not saved to files; what is kept of prompts is kept by itself, or \
             by POST /v1/native/prefixes",
        ),
        LlamaRoute::Infill => not_built(exchange, "there is no fill-in-the-middle"),
        LlamaRoute::Rerank => not_built(exchange, "there are no rerankers"),
    }
}

fn reply(exchange: Exchange, body: Result<serde_json::Value, ApiError>) {
    match body {
        Ok(body) => exchange.json(&body),
        Err(error) => exchange.error(&error),
    }
}

fn not_built(exchange: Exchange, why: &str) {
    exchange.error(&ApiError::new(ErrorCode::NotImplemented, why));
}

/// A value of the query, decoded; empty where there is only a name.
fn query_value(query: Option<&str>, name: &str) -> Option<String> {
    let pairs = query.unwrap_or_default().split('&');
    let mut values = pairs.filter_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (key == name).then_some(value)
    });
    percent_decoded(values.next()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_queries() {
        assert_eq!(LlamaRoute::of("/slots/3"), Some(LlamaRoute::SlotAction));
        assert_eq!(LlamaRoute::of("/v1/rerank"), Some(LlamaRoute::Rerank));
        for unknown in ["/slots/", "/prop", "/v1/props", ""] {
            assert_eq!(LlamaRoute::of(unknown), None, "{unknown}");
        }
        let query = Some("autoload=false&model=a%2Fb&fail");
        assert_eq!(query_value(query, "model").as_deref(), Some("a/b"));
        assert_eq!(query_value(query, "fail").as_deref(), Some(""));
        assert_eq!(query_value(query, "x"), None);
        assert_eq!(query_value(None, "model"), None);
    }
}

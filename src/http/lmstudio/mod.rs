//! LM Studio's REST APIs: `/api/v0/*`, which is OpenAI's with figures, and `/api/v1/*`.
//!
//! Runs on HTTP workers. `models` (lists), `v0` (answers with stats), `chat` (from the body of v1 to
//! ours) with `chat_shape` (its answer and its named events), `lifecycle` (load, unload, download).
//! Contracts as in LM Studio's documentation of 2026-04. What is not here: loading by itself, which is
//! the model's `load_on_demand` and `idle_unload_s`; a request's `ttl` is taken and changes nothing.

pub mod chat;
mod chat_shape;
mod lifecycle;
mod models;
pub mod v0;

use super::error_style::ErrorStyle;
use super::errors::{ApiError, ErrorCode};
use super::exchange::Exchange;
use super::generation::call::Call;
use super::openai::answer::Family;
use super::openai::embeddings;
use super::openai::fields::Fields;
use super::responses::kept::Responses;
use super::router::percent_decoded;
use std::sync::Arc;

/// A route of LM Studio's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LmStudioRoute {
    /// `GET /api/v0/models`
    V0Models,
    /// `GET /api/v0/models/{id}`, decoded
    V0Model(String),
    /// `POST /api/v0/chat/completions`
    V0Chat,
    /// `POST /api/v0/completions`
    V0Completions,
    /// `POST /api/v0/embeddings`
    V0Embeddings,
    /// `POST /api/v1/chat`
    Chat,
    /// `GET /api/v1/models`
    Models,
    /// `POST /api/v1/models/load`
    Load,
    /// `POST /api/v1/models/unload`
    Unload,
    /// `POST /api/v1/models/download`
    Download,
    /// `GET /api/v1/models/download/status/{job}`
    DownloadStatus,
}

impl LmStudioRoute {
    /// The route of a path.
    #[must_use]
    pub fn of(path: &str) -> Option<Self> {
        Some(match path {
            "/api/v0/models" => Self::V0Models,
            "/api/v0/chat/completions" => Self::V0Chat,
            "/api/v0/completions" => Self::V0Completions,
            "/api/v0/embeddings" => Self::V0Embeddings,
            "/api/v1/chat" => Self::Chat,
            "/api/v1/models" => Self::Models,
            "/api/v1/models/load" => Self::Load,
            "/api/v1/models/unload" => Self::Unload,
            "/api/v1/models/download" => Self::Download,
            _ => match path.strip_prefix("/api/v0/models/") {
                Some(id) => Self::V0Model(percent_decoded(id)?),
                None => path
                    .strip_prefix("/api/v1/models/download/status/")
                    .map(|_| Self::DownloadStatus)?,
            },
        })
    }

    /// For the log.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::V0Models | Self::V0Model(_) | Self::Models => "models",
            Self::V0Chat | Self::Chat => "chat",
            Self::V0Completions => "completions",
            Self::V0Embeddings => "embeddings",
            Self::Load | Self::Unload | Self::Download | Self::DownloadStatus => "lifecycle",
        }
    }

    /// Value of `Allow`.
    #[must_use]
    pub fn allow(&self) -> &'static str {
        match self {
            Self::V0Models | Self::V0Model(_) | Self::Models | Self::DownloadStatus => {
                "GET, HEAD, OPTIONS"
            }
            _ => "POST, OPTIONS",
        }
    }

    /// v0 words its errors as OpenAI does.
    #[must_use]
    pub fn error_style(&self) -> ErrorStyle {
        match self {
            Self::V0Models
            | Self::V0Model(_)
            | Self::V0Chat
            | Self::V0Completions
            | Self::V0Embeddings => ErrorStyle::OpenAi,
            _ => ErrorStyle::LmStudio,
        }
    }

    /// Whether it changes which models are loaded: for whoever has the management key.
    #[must_use]
    pub fn is_for_operators(&self) -> bool {
        matches!(
            self,
            Self::Load | Self::Unload | Self::Download | Self::DownloadStatus
        )
    }
}

/// Answers a request for one of these routes. Whether the caller is an operator was checked.
pub fn answer(
    route: &LmStudioRoute,
    call: &Call<'_>,
    responses: &Arc<Responses>,
    exchange: Exchange,
) {
    let body = match route {
        LmStudioRoute::V0Chat => return v0::answer(Family::Chat, call, exchange),
        LmStudioRoute::V0Completions => return v0::answer(Family::Completion, call, exchange),
        LmStudioRoute::Chat => return chat::chat(call, responses, exchange),
        LmStudioRoute::V0Models => Ok(models::v0_list(call.state, &call.access)),
        LmStudioRoute::V0Model(id) => models::v0_one(call.state, &call.access, id),
        LmStudioRoute::Models => Ok(models::list(call.state, &call.access)),
        LmStudioRoute::Load => lifecycle::load(call),
        LmStudioRoute::Unload => lifecycle::unload(call),
        LmStudioRoute::V0Embeddings => return embeddings::embeddings(call, exchange),
        LmStudioRoute::Download | LmStudioRoute::DownloadStatus => Err(ApiError::new(
            ErrorCode::NotImplemented,
            "models are files of the configuration; nothing is downloaded here",
        )),
    };
    match body {
        Ok(body) => exchange.json(&body),
        Err(error) => exchange.error(&error),
    }
}

/// `ttl` in seconds. How long an idle model stays is the configuration's `idle_unload_s`, so it is only
/// looked at.
fn check_ttl(fields: &Fields<'_>) -> Result<(), ApiError> {
    fields.count("ttl", 0).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_mean_routes() {
        let of = LmStudioRoute::of;
        assert_eq!(
            of("/api/v0/models/a%2Fb"),
            Some(LmStudioRoute::V0Model("a/b".to_owned()))
        );
        assert_eq!(of("/api/v1/models/load"), Some(LmStudioRoute::Load));
        assert_eq!(
            of("/api/v1/models/download/status/job_1"),
            Some(LmStudioRoute::DownloadStatus)
        );
        for unknown in [
            "/api/v1/models/x",
            "/api/v2/chat",
            "/api/v0/models/%zz",
            "/api/v0",
        ] {
            assert_eq!(of(unknown), None, "{unknown}");
        }
    }
}

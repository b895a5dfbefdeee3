//! Which route a method and a path mean, on both planes.
//!
//! Pure. A known path with a wrong method is a 405 that names the right ones, an unknown path a
//! 404. HEAD is answered wherever GET is (the wire layer leaves the body out). Each plane answers the
//! routes that are its own and says where the others are. What is not here: keys and CORS
//! (`data_plane`, `management`).

use super::error_style::ErrorStyle;
use super::errors::{ApiError, ErrorCode};
use super::llama_server::LlamaRoute;
use super::lmstudio::LmStudioRoute;

/// A route of either plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// `POST /v1/chat/completions`
    Chat,
    /// `POST /v1/completions`
    Completions,
    /// `POST /v1/embeddings`
    Embeddings,
    /// `POST /v1/responses`
    Responses,
    /// `POST /v1/responses/input_tokens`
    ResponseTokens,
    /// `GET`, `DELETE /v1/responses/{id}`, decoded
    Response(String),
    /// `GET /v1/responses/{id}/input_items`, decoded
    ResponseInput(String),
    /// `POST /v1/responses/{id}/cancel`, decoded
    ResponseCancel(String),
    /// `POST /v1/messages`
    Messages,
    /// `POST /v1/messages/count_tokens`
    MessageTokens,
    /// `GET /v1/models`
    Models,
    /// `GET /v1/models/{id}`, decoded
    Model(String),
    /// `GET /v1/requests`
    Requests,
    /// `POST /v1/requests/{id}/cancel`, decoded
    Cancel(String),
    /// `POST /v1/native/generate`
    Generate,
    /// `POST /v1/native/tokenize`
    Tokenize,
    /// `POST /v1/native/detokenize`
    Detokenize,
    /// `GET /v1/native/snapshot`
    Snapshot,
    /// `POST`, `GET`, `DELETE /v1/native/prefixes`
    Prefixes,
    /// `DELETE /v1/native/prefixes/{id}`, decoded
    Prefix(String),
    /// `GET /health`
    Health,
    /// `GET /ready`
    Ready,
    /// `GET /metrics`
    Metrics,
    /// `GET /openapi.json`
    OpenApi,
    /// `GET /`
    Root,
    /// llama-server's own routes
    Llama(LlamaRoute),
    /// `/api/v0/..` and `/api/v1/..`
    LmStudio(LmStudioRoute),
    /// `/v1/admin/..`, on the management plane only
    Admin(AdminRoute),
}

/// What operators ask for and change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminRoute {
    /// `GET /v1/admin/models`
    Models,
    /// `GET /v1/admin/models/{name}`, decoded
    Model(String),
    /// `POST /v1/admin/models/{name}/load`, decoded
    Load(String),
    /// `POST /v1/admin/models/{name}/unload`, decoded
    Unload(String),
    /// `GET /v1/admin/devices`, also as `/v1/admin/gpu-memory`
    Devices,
    /// `POST /v1/admin/reload`
    Reload,
}

impl Route {
    /// For the log: bounded in number whatever clients ask for.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Embeddings => "embeddings",
            Self::Responses => "responses",
            Self::ResponseTokens | Self::MessageTokens => "count_tokens",
            Self::Response(_) | Self::ResponseInput(_) | Self::ResponseCancel(_) => "response",
            Self::Messages => "messages",
            Self::Models | Self::Model(_) => "models",
            Self::Requests => "requests",
            Self::Cancel(_) => "cancel",
            Self::Generate => "generate",
            Self::Tokenize => "tokenize",
            Self::Detokenize => "detokenize",
            Self::Snapshot => "snapshot",
            Self::Prefixes | Self::Prefix(_) => "prefixes",
            Self::Health => "health",
            Self::Ready => "ready",
            Self::Metrics => "metrics",
            Self::OpenApi => "openapi",
            Self::Root => "root",
            Self::Llama(route) => route.label(),
            Self::LmStudio(route) => route.label(),
            Self::Admin(_) => "admin",
        }
    }

    /// In which dialect its errors are worded.
    #[must_use]
    pub fn error_style(&self) -> ErrorStyle {
        match self {
            Self::Messages | Self::MessageTokens => ErrorStyle::Anthropic,
            Self::Llama(_) => ErrorStyle::LlamaServer,
            Self::LmStudio(route) => route.error_style(),
            _ => ErrorStyle::OpenAi,
        }
    }

    /// Whether everybody may ask, key or not: probes of load balancers carry none. The README has the
    /// list, and a test holds it against this.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(
            self,
            Self::Health | Self::Ready | Self::Root | Self::OpenApi
        )
    }

    /// Value of `Allow`.
    #[must_use]
    pub fn allow(&self) -> &'static str {
        match self {
            Self::Chat
            | Self::Completions
            | Self::Embeddings
            | Self::Responses
            | Self::ResponseTokens
            | Self::ResponseCancel(_)
            | Self::Messages
            | Self::MessageTokens
            | Self::Generate
            | Self::Tokenize
            | Self::Detokenize
            | Self::Cancel(_)
            | Self::Admin(AdminRoute::Load(_) | AdminRoute::Unload(_) | AdminRoute::Reload) => {
                "POST, OPTIONS"
            }
            Self::Prefixes => "GET, HEAD, POST, DELETE, OPTIONS",
            Self::Prefix(_) => "DELETE, OPTIONS",
            Self::Response(_) => "GET, HEAD, DELETE, OPTIONS",
            Self::Llama(route) => route.allow(),
            Self::LmStudio(route) => route.allow(),
            _ => "GET, HEAD, OPTIONS",
        }
    }
}

/// Paths that the small worker set of the wire layer answers.
#[must_use]
pub fn is_ops_path(path: &str) -> bool {
    let is_page = matches!(
        path,
        "/health"
            | "/ready"
            | "/metrics"
            | "/v1/health"
            | "/healthz"
            | "/livez"
            | "/readyz"
            | "/v1/native/snapshot"
    );
    // Who wants to cancel must not wait for a worker that streams hold.
    is_page || path.starts_with("/v1/requests")
}

/// The route of a request. `path` is the target without its query.
pub fn route(method: &str, path: &str) -> Result<Route, ApiError> {
    let Some(route) = known_path(path) else {
        return Err(ApiError::new(
            ErrorCode::UnknownUrl,
            format!("unknown request URL: {method} {path}; see /v1/models, /v1/chat/completions"),
        ));
    };
    if method == "POST" && route == Route::Response("compact".to_owned()) {
        return Err(ApiError::new(
            ErrorCode::NotImplemented,
            "responses are not compacted here; go on with 'previous_response_id', or send the items \
             that shall count as 'input'",
        ));
    }
    let allow = route.allow();
    if allow.split(", ").any(|allowed| allowed == method) {
        return Ok(route);
    }
    let message = format!("{method} is not allowed for {path}; allowed: {allow}");
    Err(ApiError {
        allow: Some(allow),
        ..ApiError::new(ErrorCode::MethodNotAllowed, message)
    })
}

/// The route of a path without its query, whatever the method.
pub(super) fn known_path(path: &str) -> Option<Route> {
    let path = match path.strip_suffix('/') {
        Some(shorter) if !shorter.is_empty() => shorter,
        _ => path,
    };
    Some(match path {
        "/" => Route::Root,
        "/health" | "/v1/health" | "/healthz" | "/livez" => Route::Health,
        "/ready" | "/readyz" => Route::Ready,
        "/metrics" => Route::Metrics,
        "/openapi.json" => Route::OpenApi,
        // Clients whose base URL lacks /v1 are common; nothing else lives there.
        "/v1/chat/completions" | "/chat/completions" => Route::Chat,
        "/v1/completions" | "/completions" => Route::Completions,
        "/v1/embeddings" | "/embeddings" => Route::Embeddings,
        "/v1/responses" | "/responses" => Route::Responses,
        "/v1/responses/input_tokens" | "/responses/input_tokens" => Route::ResponseTokens,
        "/v1/messages" => Route::Messages,
        "/v1/messages/count_tokens" => Route::MessageTokens,
        "/v1/models" | "/models" => Route::Models,
        "/v1/requests" => Route::Requests,
        "/v1/native/generate" => Route::Generate,
        "/v1/native/tokenize" => Route::Tokenize,
        "/v1/native/detokenize" => Route::Detokenize,
        "/v1/native/snapshot" => Route::Snapshot,
        "/v1/native/prefixes" => Route::Prefixes,
        _ => {
            if let Some(route) = LlamaRoute::of(path) {
                return Some(Route::Llama(route));
            }
            if path.starts_with("/api/") {
                return LmStudioRoute::of(path).map(Route::LmStudio);
            }
            if let Some(rest) = path.strip_prefix("/v1/admin/") {
                return Some(Route::Admin(admin_path(rest)?));
            }
            if let Some(id) = path.strip_prefix("/v1/native/prefixes/") {
                return Some(Route::Prefix(percent_decoded(id)?));
            }
            if let Some(rest) = path.strip_prefix("/v1/requests/") {
                return Some(Route::Cancel(percent_decoded(
                    rest.strip_suffix("/cancel")?,
                )?));
            }
            let of_response = path.strip_prefix("/v1/responses/");
            if let Some(rest) = of_response.or_else(|| path.strip_prefix("/responses/")) {
                return response_path(rest);
            }
            let id = path
                .strip_prefix("/v1/models/")
                .or_else(|| path.strip_prefix("/models/"))?;
            Route::Model(percent_decoded(id)?)
        }
    })
}

/// What stands behind `/v1/responses/`.
fn response_path(path: &str) -> Option<Route> {
    let (id, rest) = path.split_once('/').unwrap_or((path, ""));
    let id = percent_decoded(id)?;
    Some(match rest {
        "" => Route::Response(id),
        "input_items" => Route::ResponseInput(id),
        "cancel" => Route::ResponseCancel(id),
        _ => return None,
    })
}

/// What stands behind `/v1/admin/`.
fn admin_path(path: &str) -> Option<AdminRoute> {
    let Some(model) = path.strip_prefix("models/") else {
        return Some(match path {
            "models" => AdminRoute::Models,
            "devices" | "gpu-memory" => AdminRoute::Devices,
            "reload" => AdminRoute::Reload,
            _ => return None,
        });
    };
    // Names may hold slashes; one that ends in "/load" must be sent with "%2Fload".
    if let Some(name) = model.strip_suffix("/load") {
        return Some(AdminRoute::Load(percent_decoded(name)?));
    }
    if let Some(name) = model.strip_suffix("/unload") {
        return Some(AdminRoute::Unload(percent_decoded(name)?));
    }
    Some(AdminRoute::Model(percent_decoded(model)?))
}

/// `%2F` to `/` and so on; None when it is not valid or not UTF-8.
#[must_use]
pub fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes().iter();
    while let Some(&byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || (*rest.next()? as char).to_digit(16);
        bytes.push((digit()? * 16 + digit()?) as u8);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_routes() {
        for (method, path, expected) in [
            ("POST", "/v1/chat/completions", Route::Chat),
            ("POST", "/v1/completions/", Route::Completions),
            ("OPTIONS", "/v1/completions", Route::Completions),
            ("POST", "/v1/embeddings", Route::Embeddings),
            ("POST", "/v1/responses", Route::Responses),
            ("POST", "/v1/responses/input_tokens", Route::ResponseTokens),
            ("GET", "/v1/responses/r1", Route::Response("r1".into())),
            ("DELETE", "/v1/responses/r1", Route::Response("r1".into())),
            (
                "GET",
                "/v1/responses/r1/input_items",
                Route::ResponseInput("r1".into()),
            ),
            (
                "POST",
                "/v1/responses/r1/cancel",
                Route::ResponseCancel("r1".into()),
            ),
            ("POST", "/v1/messages", Route::Messages),
            ("POST", "/v1/messages/count_tokens", Route::MessageTokens),
            ("GET", "/v1/models", Route::Models),
            ("GET", "/v1/models/a/b", Route::Model("a/b".into())),
            ("GET", "/v1/models/a%2Fb", Route::Model("a/b".into())),
            ("GET", "/v1/requests", Route::Requests),
            (
                "POST",
                "/v1/requests/a%2Fb/cancel",
                Route::Cancel("a/b".into()),
            ),
            ("GET", "/v1/native/snapshot", Route::Snapshot),
            ("POST", "/v1/native/generate", Route::Generate),
            ("POST", "/v1/native/tokenize/", Route::Tokenize),
            ("POST", "/v1/native/detokenize", Route::Detokenize),
            ("POST", "/v1/native/prefixes", Route::Prefixes),
            ("DELETE", "/v1/native/prefixes/", Route::Prefixes),
            (
                "DELETE",
                "/v1/native/prefixes/a1",
                Route::Prefix("a1".into()),
            ),
            ("HEAD", "/health", Route::Health),
            ("GET", "/", Route::Root),
            ("GET", "/v1/admin/models/", Route::Admin(AdminRoute::Models)),
            (
                "GET",
                "/v1/admin/models/a/b%20c",
                Route::Admin(AdminRoute::Model("a/b c".into())),
            ),
            (
                "POST",
                "/v1/admin/models/a/b/load",
                Route::Admin(AdminRoute::Load("a/b".into())),
            ),
            (
                "POST",
                "/v1/admin/models/x%2Funload/unload",
                Route::Admin(AdminRoute::Unload("x/unload".into())),
            ),
            (
                "GET",
                "/v1/admin/gpu-memory",
                Route::Admin(AdminRoute::Devices),
            ),
            ("POST", "/v1/admin/reload", Route::Admin(AdminRoute::Reload)),
            ("GET", "/props", Route::Llama(LlamaRoute::Props)),
            ("POST", "/completion/", Route::Llama(LlamaRoute::Completion)),
            ("POST", "/api/v1/chat", Route::LmStudio(LmStudioRoute::Chat)),
        ] {
            assert_eq!(route(method, path), Ok(expected), "{method} {path}");
        }
    }

    #[test]
    fn wrong_methods_and_paths() {
        let error = route("GET", "/v1/chat/completions").unwrap_err();
        assert_eq!((error.status(), error.allow), (405, Some("POST, OPTIONS")));
        let error = route("POST", "/v1/models").unwrap_err();
        assert_eq!(
            (error.status(), error.allow),
            (405, Some("GET, HEAD, OPTIONS"))
        );
        for (method, path) in [
            ("GET", "/v1/admin/models/a/load"),
            ("GET", "/v1/admin/reload"),
            ("POST", "/v1/admin/models/a"),
            ("POST", "/v1/admin/devices"),
            ("GET", "/completion"),
            ("POST", "/slots"),
            ("GET", "/api/v1/chat"),
        ] {
            assert_eq!(route(method, path).unwrap_err().status(), 405, "{path}");
        }
        for path in [
            "/v2",
            "/v1/requests/x",
            "/v1/requests/%zz/cancel",
            "/v1/models/%zz",
            "/v1/models/%ff",
            "/v1/admin",
            "/v1/admin/x",
            "/v1/admin/models/%zz/load",
            "",
        ] {
            assert_eq!(route("GET", path).unwrap_err().status(), 404, "{path}");
        }
    }
}

//! The data plane's handler: from a complete request to the function that answers it.
//!
//! Runs on HTTP workers (and the few ops workers); shared, immutable. The order is: request id,
//! route, key, then the route's own work. Whatever the wire layer refuses by itself gets the same
//! error shape here. A panic below costs one request: the wire layer answers 500.

use super::access::Access;
use super::access_log::{self, AccessRecord};
use super::anthropic::routes as anthropic;
use super::auth::Keys;
use super::cors::Cors;
use super::error_style::ErrorStyle;
use super::errors::{ApiError, ErrorCode};
use super::exchange::{Exchange, Manner, request_id, request_id_of};
use super::generation::call::Call;
use super::native::{self, prefixes, tokens};
use super::openai::{embeddings, models, shape};
use super::responses::kept::Responses;
use super::responses::routes as responses;
use super::router::{Route, is_ops_path, route};
use super::state::ServerState;
use super::wire::{Handler, Refusal, Request, Responder};
use super::{llama_server, lmstudio, openapi, ops, requests};
use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Everything a worker needs.
#[derive(Debug)]
pub struct DataPlane {
    /// The models and what is known about the server.
    pub state: Arc<ServerState>,
    /// Responses that clients come back to.
    pub responses: Arc<Responses>,
    /// The management key, with which LM Studio's clients may load and unload here.
    pub admin_keys: Keys,
    /// Which web pages may.
    pub cors: Cors,
    /// How often a silent stream shows a sign of life.
    pub stream_ping: Duration,
    /// Status of refusals for load, 503 or 429.
    pub overload_status: u16,
    /// Most bytes of a request's body that its line in the log shows; 0 = none of it.
    pub log_body_bytes: usize,
}

impl Handler for DataPlane {
    fn handle(&self, request: Request, responder: Responder) {
        let routed = route(request.method(), request.path());
        let label = routed.as_ref().map_or("unknown", Route::label);
        let quiet = matches!(routed, Ok(Route::Health | Route::Ready | Route::Metrics));
        let id = request_id(request.header_str("x-request-id"));
        let is_preflight = request.method() == "OPTIONS";
        let cors = self
            .cors
            .headers(request.header_str("origin"), is_preflight);
        let record = AccessRecord::new(id, label, quiet);
        let style = routed
            .as_ref()
            .map_or_else(|_| ErrorStyle::of_path(request.path()), Route::error_style);
        let exchange = Exchange::new(responder, record, cors, self.manner(style));
        match routed {
            Err(error) => exchange.error(&error),
            Ok(Route::Admin(_)) => exchange.error(&elsewhere(request.path())),
            Ok(_) if is_preflight => exchange.empty(204),
            Ok(route) => self.answer(&route, &request, exchange),
        }
    }

    fn is_ops(&self, path: &str) -> bool {
        is_ops_path(path)
    }

    fn refuse(&self, refusal: &Refusal<'_>) -> (Vec<(String, String)>, Vec<u8>) {
        let code = match ErrorCode::from_status(refusal.status) {
            // Whatever else stands in the way, this is why no retry here will help.
            ErrorCode::ServerOverloaded if self.state.is_draining() => ErrorCode::ShuttingDown,
            code => code,
        };
        if refusal.status == 503 {
            // Beside the executors' own refusals, so that their sum is what clients were refused.
            let metrics = self.state.pool().metrics();
            metrics.refused_unread(code.row().2);
        }
        let error = ApiError {
            numbers: self.state.wire_numbers(),
            ..ApiError::new(code, refusal.reason)
        };
        let style = refusal
            .path
            .map_or_else(ErrorStyle::default, ErrorStyle::of_path);
        let error = self.manner(style).apply(&error, "");
        let id = request_id(None);
        access_log::refused_unread(&id, refusal.path, error.status(), code.row().2);
        let mut headers = vec![
            ("content-type".to_owned(), "application/json".to_owned()),
            ("x-request-id".to_owned(), id),
        ];
        let extra = error.headers().into_iter();
        headers.extend(extra.map(|(name, value)| (name.to_owned(), value)));
        (headers, style.body(&error).to_string().into_bytes())
    }
}

impl DataPlane {
    fn manner(&self, style: ErrorStyle) -> Manner {
        Manner {
            style,
            overload_status: self.overload_status,
            state: Arc::clone(&self.state),
        }
    }

    fn answer(&self, route: &Route, request: &Request, mut exchange: Exchange) {
        let access = match self.access(route, request, &mut exchange) {
            Ok(access) => access,
            Err(error) => return exchange.error(&error),
        };
        let (state, kept) = (&self.state, &self.responses);
        let client = access.name().cloned();
        let hangup = exchange.hangup();
        let asked = Arc::clone(&exchange.record.asked);
        let call = || Call {
            state,
            hangup: hangup.clone(),
            waited: Cell::default(),
            asked: Arc::clone(&asked),
            ping: self.stream_ping,
            request,
            client: client.clone(),
            access: access.clone(),
        };
        match route {
            Route::Root => exchange.json(&ops::root(state)),
            Route::Health => exchange.ops(&ops::health(state)),
            Route::Ready => exchange.ops(&ops::ready(state, ops::Audience::Clients)),
            Route::Metrics if access.is_restricted() => exchange.error(&metrics_elsewhere()),
            Route::Metrics => exchange.ops(&ops::metrics(state)),
            Route::OpenApi => exchange.ops(&openapi::page(openapi::data_plane())),
            Route::Models => exchange.json(&models::list(state, &access, request.query())),
            Route::Model(id) => match models::one(state, &access, id) {
                Ok(body) => exchange.json(&body),
                Err(error) => exchange.error(&error),
            },
            Route::Requests => exchange.ops(&requests::list(state, client.as_deref())),
            Route::Snapshot => exchange.ops(&requests::snapshot(state, client.as_deref(), &access)),
            Route::Cancel(name) => match requests::cancel(state, name, client.as_deref()) {
                Ok(answer) => exchange.ops(&answer),
                Err(error) => exchange.error(&error),
            },
            Route::Generate => native::generate::generate(&call(), exchange),
            Route::Tokenize => tokens::tokenize(&call(), exchange),
            Route::Detokenize => tokens::detokenize(&call(), exchange),
            Route::Prefixes => prefixes::all(&call(), exchange),
            Route::Prefix(id) => prefixes::one(&call(), id, exchange),
            Route::Chat => shape::chat(&call(), exchange),
            Route::Completions => shape::completions(&call(), exchange),
            Route::Embeddings => embeddings::embeddings(&call(), exchange),
            Route::Responses => responses::create(&call(), kept, exchange),
            Route::ResponseTokens => responses::input_tokens(&call(), kept, exchange),
            Route::Response(id) => responses::one(&call(), kept, id, exchange),
            Route::ResponseInput(id) => responses::input_items(&call(), kept, id, exchange),
            Route::ResponseCancel(id) => responses::cancel(&call(), kept, id, exchange),
            Route::Messages => anthropic::messages(&call(), exchange),
            Route::MessageTokens => anthropic::count_tokens(&call(), exchange),
            Route::Llama(route) => llama_server::answer(*route, &call(), exchange),
            Route::LmStudio(route) => lmstudio::answer(route, &call(), kept, exchange),
            Route::Admin(_) => exchange.error(&elsewhere(request.path())),
        }
    }

    /// Who asks, and whether its requests per minute allow one more.
    fn access(
        &self,
        route: &Route,
        request: &Request,
        exchange: &mut Exchange,
    ) -> Result<Access, ApiError> {
        if route.is_open() {
            return Ok(Access::default());
        }
        if matches!(route, Route::LmStudio(route) if route.is_for_operators()) {
            let checked = self.admin_keys.check_request(request);
            return match checked {
                Err(error) if error.code == ErrorCode::BadRequest => Err(error),
                Ok(_) if self.admin_keys.are_asked() => {
                    exchange.record.key = Some("management".into());
                    Ok(Access::default())
                }
                _ => Err(for_operators(request.path())),
            };
        }
        let access = self.state.keys().check_request(request)?;
        exchange.record.key = access.name().cloned();
        exchange.limit(access.quota());
        let is_work = request.method() == "POST" && !matches!(route, Route::Cancel(_));
        if is_work && let Some(quota) = access.quota() {
            quota.count_request(Instant::now())?;
        }
        if is_work && self.log_body_bytes > 0 {
            exchange.record.body = shown(request.body(), self.log_body_bytes);
        }
        // The header wins where both are there.
        if is_work
            && request.header("x-request-id").is_none()
            && let Some(id) = request_id_of(request.body())?
        {
            exchange.rename(id);
        }
        Ok(access)
    }
}

/// The beginning of a body, and whether there is more.
fn shown(body: &[u8], bytes_max: usize) -> Option<String> {
    let cut = body.get(..bytes_max);
    let text = String::from_utf8_lossy(cut.unwrap_or(body));
    Some(match cut {
        Some(_) if body.len() > bytes_max => format!("{text}.. ({} bytes)", body.len()),
        _ => text.into_owned(),
    })
}

/// Refuses a load or an unload to whoever may only ask models.
fn for_operators(path: &str) -> ApiError {
    let message = format!(
        "{path} needs the management key (`management.admin_key`) as 'Authorization: Bearer KEY'; \
         without one loads and unloads are on the management plane"
    );
    ApiError::new(ErrorCode::Forbidden, message)
}

/// Metrics name all models, also those that a key with a list of models may not know of.
fn metrics_elsewhere() -> ApiError {
    let message = "metrics tell of all models, and this key is for some (`models`); /metrics is on the \
                   management plane (127.0.0.1:8081 unless told otherwise) as well";
    ApiError::new(ErrorCode::Forbidden, message)
}

/// Loading and unloading is not for whoever may ask models.
fn elsewhere(path: &str) -> ApiError {
    let message =
        format!("{path} is on the management plane (127.0.0.1:8081 unless told otherwise)");
    ApiError::new(ErrorCode::UnknownUrl, message)
}

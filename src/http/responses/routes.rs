//! The routes of the Responses API.
//!
//! On HTTP workers. A response that another key made does not exist for whoever asks here. What is
//! not here: running the jobs (`generation::run`).

use super::asked::Asked;
use super::kept::Responses;
use super::shape::{ResponseShape, json_page};
use super::store::{Item, Turn};
use crate::http::dialect::count_prompt;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::exchange::Exchange;
use crate::http::generation::call::Call;
use crate::http::generation::prepare::{self, Work};
use crate::http::generation::run::run;
use crate::http::openai::fields::parse_object;
use crate::http::router::percent_decoded;
use serde_json::{Value, json};
use std::sync::Arc;

/// Items of a page unless asked otherwise, and at most.
const PAGE: (usize, usize) = (20, 100);

/// `POST /v1/responses`
pub fn create(call: &Call<'_>, responses: &Arc<Responses>, exchange: Exchange) {
    run(prepared(call, responses), call, exchange);
}

fn prepared(call: &Call<'_>, responses: &Arc<Responses>) -> Result<Work<ResponseShape>, ApiError> {
    let body = parse_object(call.request.body())?;
    let asked = Asked::parse(&body, responses, call.client.as_deref())?;
    let prepared = prepare::chat(call, &asked.chat).map_err(|error| asked.origins.own(error))?;
    let (responses, owner) = (Arc::clone(responses), call.client.clone());
    Ok(prepared.shaped(|info| ResponseShape::new(info, asked, responses, owner)))
}

/// `POST /v1/responses/input_tokens`: what a request would cost, without a place in the queue.
pub fn input_tokens(call: &Call<'_>, responses: &Responses, exchange: Exchange) {
    let counted = parse_object(call.request.body()).and_then(|body| {
        let asked = Asked::parse(&body, responses, call.client.as_deref())?;
        count_prompt(call, &asked.chat).map_err(|error| asked.origins.own(error))
    });
    match counted {
        Ok(n) => exchange.json(&json!({"object": "response.input_tokens", "input_tokens": n})),
        Err(error) => exchange.error(&error),
    }
}

/// `GET` and `DELETE /v1/responses/{id}`
pub fn one(call: &Call<'_>, responses: &Responses, id: &str, exchange: Exchange) {
    let owner = call.client.as_deref();
    if call.request.method() == "DELETE" {
        return match responses.delete(id, owner) {
            true => exchange.json(&json!({"id": id, "object": "response", "deleted": true})),
            false => exchange.error(&unknown(id)),
        };
    }
    let wants_stream = query(call, "stream").any(|value| matches!(&*value, "true" | "1"));
    if wants_stream {
        return exchange.error(&ApiError::unsupported(
            "stream",
            "the events of a response are sent once, to the client that made it",
        ));
    }
    match responses.json(id, owner) {
        Some(json) => exchange.ops(&json_page(json.to_vec())),
        None => exchange.error(&unknown(id)),
    }
}

/// `POST /v1/responses/{id}/cancel`: only background responses can be cancelled this way.
pub fn cancel(call: &Call<'_>, responses: &Responses, id: &str, exchange: Exchange) {
    if responses.json(id, call.client.as_deref()).is_none() {
        return exchange.error(&unknown(id));
    }
    exchange.error(&ApiError::new(
        ErrorCode::BadRequest,
        "only background responses can be cancelled, and there are none here; hang up, or POST \
         /v1/requests/{id}/cancel with the value of x-request-id",
    ));
}

/// `GET /v1/responses/{id}/input_items`
pub fn input_items(call: &Call<'_>, responses: &Responses, id: &str, exchange: Exchange) {
    let Some(turns) = responses.seen(id, call.client.as_deref()) else {
        return exchange.error(&unknown(id));
    };
    match Page::of(|name| query(call, name).last()) {
        Ok(page) => exchange.json(&page.list(&turns)),
        Err(error) => exchange.error(&error),
    }
}

/// Values of a field of the query.
fn query<'a>(call: &'a Call<'_>, name: &'a str) -> impl Iterator<Item = String> + 'a {
    let parts = call.request.query().unwrap_or_default().split('&');
    let pairs = parts.filter_map(|part| part.split_once('='));
    pairs
        .filter(move |(key, _)| *key == name)
        .filter_map(|(_, value)| percent_decoded(value))
}

fn unknown(id: &str) -> ApiError {
    let shown: String = id.chars().take(100).collect();
    let message = format!(
        "no response '{shown}' is kept: it never was, is too old, was pushed out by newer ones, or \
         was made with \"store\": false"
    );
    ApiError::new(ErrorCode::ResponseNotFound, message)
}

/// Which items of a list are wanted.
#[derive(Debug)]
struct Page {
    limit: usize,
    is_ascending: bool,
    after: Option<String>,
}

impl Page {
    /// Reads the query; `last` gives the last value of a field.
    fn of(last: impl Fn(&str) -> Option<String>) -> Result<Self, ApiError> {
        let (usual, most) = PAGE;
        let limit = match last("limit") {
            None => usual,
            Some(text) => match text.parse::<usize>() {
                Ok(limit) if (1..=most).contains(&limit) => limit,
                _ => {
                    let text = format!("'limit' must be an integer from 1 to {most}");
                    return Err(ApiError::invalid("limit", text));
                }
            },
        };
        let is_ascending = match last("order").as_deref() {
            None | Some("desc") => false,
            Some("asc") => true,
            Some(_) => {
                let text = "'order' must be \"asc\" or \"desc\"";
                return Err(ApiError::invalid("order", text));
            }
        };
        Ok(Self {
            limit,
            is_ascending,
            after: last("after"),
        })
    }

    fn list(&self, turns: &[Arc<Turn>]) -> Value {
        let mut items: Vec<Value> = turns
            .iter()
            .flat_map(|turn| turn.items())
            .map(Item::value)
            .collect();
        if !self.is_ascending {
            items.reverse();
        }
        let behind = self.after.as_deref().and_then(|after| {
            let place = items.iter().position(|item| item["id"] == after);
            place.map(|place| place + 1)
        });
        let from = behind.unwrap_or(0);
        let to = items.len().min(from + self.limit);
        let page = &items[from..to];
        json!({
            "object": "list", "data": page, "first_id": page.first().map(|item| &item["id"]),
            "last_id": page.last().map(|item| &item["id"]), "has_more": to < items.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::responses::store::Ledger;

    fn page(query: &[(&str, &str)]) -> Result<Page, ApiError> {
        Page::of(|name| {
            let found = query.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn items_come_in_pages_newest_first() {
        let turn = |ids: &[&str]| {
            let items: Vec<Value> = ids.iter().map(|id| json!({"id": id})).collect();
            Turn::new(&items, &Ledger::default())
        };
        let turns = [turn(&["a", "b"]), turn(&["c"])];
        let ids = |query: &[(&str, &str)]| {
            let list = page(query).expect("valid").list(&turns);
            let data = list["data"].as_array().expect("a list").clone();
            let ids = data
                .iter()
                .map(|item| item["id"].as_str().expect("an id").to_owned());
            (ids.collect::<String>(), list["has_more"] == true)
        };
        assert_eq!(ids(&[]), ("cba".to_owned(), false));
        assert_eq!(
            ids(&[("order", "asc"), ("limit", "2")]),
            ("ab".to_owned(), true)
        );
        assert_eq!(
            ids(&[("order", "asc"), ("after", "b")]),
            ("c".to_owned(), false)
        );
        assert_eq!(ids(&[("after", "a")]), (String::new(), false));
        for (name, value) in [
            ("limit", "0"),
            ("limit", "101"),
            ("limit", "x"),
            ("order", "up"),
        ] {
            let error = page(&[(name, value)]).expect_err(value);
            assert_eq!(error.param.as_deref(), Some(name));
        }
    }
}

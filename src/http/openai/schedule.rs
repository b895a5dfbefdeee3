//! How a request asks to be scheduled: priority and latency objectives, in headers or in the body.
//!
//! Pure. Headers exist for clients that cannot add fields to the body, and for proxies that speak for
//! them. The same setting given twice must be the same: guessing which one was meant would hide a
//! mistake, so a contradiction is a 400 that names both. What is not here: what the scheduler does
//! with it, and the limit of the client's key (`generate::Call::schedule`).

use super::fields::Fields;
use crate::http::errors::ApiError;
use std::ops::RangeInclusive;
use std::time::Duration;

/// Higher runs sooner, 0 is ordinary: the scheduler's direction, not vLLM's.
const PRIORITY: RangeInclusive<i64> = -100..=100;
/// An objective of 0 can't be met; beyond a day it is a mistake in units.
const SLO_MS: RangeInclusive<i64> = 1..=86_400_000;

/// Settings of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// Higher first.
    pub priority: i32,
    /// Objective for the wait in milliseconds; None = the server's.
    pub slo_ms: Option<u64>,
    /// Objective for the first token in milliseconds.
    pub slo_ttft_ms: Option<u64>,
    /// Longest wait in the queue; None = the server's.
    pub queue_timeout: Option<Duration>,
}

impl Schedule {
    /// Reads body and headers. `header` gives the values of all fields of a name.
    pub fn parse<'a>(
        fields: &Fields<'_>,
        header: impl Fn(&str) -> Vec<&'a [u8]>,
    ) -> Result<Self, ApiError> {
        let setting = |field: &str, name: &str, range: RangeInclusive<i64>| {
            let body = fields.integer(field, range.clone())?;
            let header = header_integer(name, &header(name), range)?;
            agreed(field, body, name, header)
        };
        Ok(Self {
            priority: setting("priority", "x-priority", PRIORITY)?.unwrap_or(0) as i32,
            slo_ms: setting("slo_ms", "x-slo-ms", SLO_MS)?.map(|ms| ms as u64),
            slo_ttft_ms: setting("slo_ttft_ms", "x-slo-ttft-ms", SLO_MS)?.map(|ms| ms as u64),
            queue_timeout: fields
                .integer("queue_timeout_ms", SLO_MS)?
                .map(|ms| Duration::from_millis(ms as u64)),
        })
    }
}

/// A decimal integer with an optional minus, nothing else, and at most one field of the name.
fn header_integer(
    name: &str,
    values: &[&[u8]],
    range: RangeInclusive<i64>,
) -> Result<Option<i64>, ApiError> {
    let invalid = |why: &str| {
        let (low, high) = (range.start(), range.end());
        let message = format!("header '{name}' {why}; it must be an integer from {low} to {high}");
        Err(ApiError::invalid(name, message))
    };
    let value = match values {
        [] => return Ok(None),
        [value] => value.trim_ascii(),
        _ => return invalid("is sent more than once"),
    };
    let digits = value.strip_prefix(b"-").unwrap_or(value);
    let is_decimal = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(value).unwrap_or_default();
    match text.parse::<i64>() {
        Ok(number) if is_decimal && range.contains(&number) => Ok(Some(number)),
        _ if is_decimal => invalid("is out of range"),
        _ => invalid("is not an integer"),
    }
}

fn agreed(
    field: &str,
    body: Option<i64>,
    name: &str,
    header: Option<i64>,
) -> Result<Option<i64>, ApiError> {
    match (body, header) {
        (Some(body), Some(header)) if body != header => {
            let message = format!(
                "'{field}' is {body} in the body and {header} in the header '{name}'; send one, or \
                 the same twice"
            );
            Err(ApiError::invalid(name, message))
        }
        (body, header) => Ok(body.or(header)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn parse(body: &Value, headers: &[(&str, &'static str)]) -> Result<Schedule, ApiError> {
        let map = body.as_object().expect("the test gives an object");
        Schedule::parse(&Fields::new(map), |wanted| {
            let named = headers.iter().filter(|(name, _)| *name == wanted);
            named.map(|(_, value)| value.as_bytes()).collect()
        })
    }

    #[test]
    fn body_and_headers_say_the_same_things() {
        let expected = Schedule {
            priority: -5,
            slo_ms: Some(700),
            slo_ttft_ms: Some(90),
            queue_timeout: None,
        };
        let patient = parse(&json!({"queue_timeout_ms": 250}), &[]).expect("valid");
        assert_eq!(patient.queue_timeout, Some(Duration::from_millis(250)));
        let body = json!({"priority": -5, "slo_ms": 700, "slo_ttft_ms": 90});
        let headers = [
            ("x-priority", "-5"),
            ("x-slo-ms", " 700 "),
            ("x-slo-ttft-ms", "90"),
        ];
        assert_eq!(parse(&body, &[]), Ok(expected));
        assert_eq!(parse(&json!({}), &headers), Ok(expected));
        assert_eq!(parse(&body, &headers), Ok(expected));
        assert_eq!(parse(&json!({}), &[]), Ok(Schedule::default()));
    }

    #[test]
    fn bad_values_and_contradictions_name_their_place() {
        for (body, headers, param) in [
            (json!({"priority": 101}), vec![], "priority"),
            (json!({"priority": "high"}), vec![], "priority"),
            (json!({"slo_ms": 0}), vec![], "slo_ms"),
            (json!({"slo_ttft_ms": 1.5}), vec![], "slo_ttft_ms"),
            (json!({}), vec![("x-priority", "high")], "x-priority"),
            (json!({}), vec![("x-priority", "")], "x-priority"),
            (json!({}), vec![("x-priority", "+5")], "x-priority"),
            (json!({}), vec![("x-priority", "-")], "x-priority"),
            (json!({}), vec![("x-priority", "-101")], "x-priority"),
            (json!({}), vec![("x-slo-ms", "0")], "x-slo-ms"),
            (json!({}), vec![("x-slo-ms", "1.5")], "x-slo-ms"),
            (
                json!({}),
                vec![("x-slo-ms", "99999999999999999999")],
                "x-slo-ms",
            ),
            (json!({}), vec![("x-slo-ttft-ms", "5ms")], "x-slo-ttft-ms"),
            (
                json!({}),
                vec![("x-slo-ms", "5"), ("x-slo-ms", "5")],
                "x-slo-ms",
            ),
            (
                json!({"priority": 1}),
                vec![("x-priority", "2")],
                "x-priority",
            ),
        ] {
            let error = parse(&body, &headers).expect_err(&format!("{body} {headers:?}"));
            assert_eq!(error.param.as_deref(), Some(param), "{body} {headers:?}");
            assert_eq!(error.status(), 400);
        }
    }
}

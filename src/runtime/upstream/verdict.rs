//! What a failed call means: for the call (again, or an end), for its client (in which words), for the
//! server (one failure more towards counting as gone).
//!
//! Pure. In this order, for a call that failed:
//!
//! 1. Something of its answer was passed on: it ends; a client cannot be told twice.
//! 2. As often repeated as may be: it ends.
//! 3. The server was not reached, or the connection broke: again after a short wait that doubles.
//! 4. 429, 502 or 503: again after the wait that the server asks for, if it is not too long.
//! 5. Else it ends. A timeout and a 500 may have cost the server the whole work already.
//!
//! Words for clients name the host and the status. The server's own message is told only where it is
//! about the request (400, 413, 422), shortened and without the key: those of 401 and 403 repeat parts
//! of keys, those of 5xx tell what is inside.

use crate::config::CallLimits;
use crate::request::{RequestError, UpstreamFault};
use std::time::Duration;

/// First wait before a repetition; it doubles.
const RETRY_WAIT: Duration = Duration::from_millis(100);
/// Characters of a server's message that are told.
const MESSAGE_CHARS_MAX: usize = 300;

/// How a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// No connection came about.
    #[error("not reached: {0}")]
    Unreachable(String),
    /// The connection ended before the answer did.
    #[error("the connection broke: {0}")]
    Broken(String),
    /// Nothing came for too long.
    #[error("silent for too long")]
    Silent,
    /// It answered with an error.
    #[error("status {status}")]
    Status {
        /// HTTP status.
        status: u16,
        /// What it asks for.
        retry_after: Option<Duration>,
        /// The message of its error body, as it came.
        message: Option<String>,
        /// Its error body says that the prompt does not fit the model's context.
        is_too_long: bool,
    },
    /// What came is no answer.
    #[error("no answer that makes sense: {0}")]
    Nonsense(String),
    /// It told an error in the middle of its answer.
    #[error("an error in its answer")]
    Told(String),
}

/// When to try again; None = the call ends. `n_retried` so far.
#[must_use]
pub fn retry_wait(
    failure: &Failure,
    has_sent: bool,
    n_retried: u32,
    limits: &CallLimits,
) -> Option<Duration> {
    if has_sent || n_retried >= limits.retries {
        return None;
    }
    let doubled = RETRY_WAIT.saturating_mul(1 << n_retried.min(10));
    let backoff = doubled.min(limits.retry_wait_max);
    match failure {
        Failure::Unreachable(_) | Failure::Broken(_) => Some(backoff),
        Failure::Status {
            status: 429 | 502 | 503,
            retry_after,
            ..
        } => Some(retry_after.unwrap_or(backoff)).filter(|wait| *wait <= limits.retry_wait_max),
        _ => None,
    }
}

/// Whether it speaks for the server being gone. That it is full does not, nor what is wrong with the
/// request or the configuration.
#[must_use]
pub fn counts(failure: &Failure) -> bool {
    match failure {
        Failure::Unreachable(_) | Failure::Broken(_) | Failure::Silent | Failure::Nonsense(_) => {
            true
        }
        Failure::Status { status, .. } => *status >= 500 && *status != 503,
        Failure::Told(_) => false,
    }
}

/// How the call ends. `host` for people; `redact` takes the key out of a text.
#[must_use]
pub fn verdict(failure: &Failure, host: &str, redact: impl Fn(&str) -> String) -> RequestError {
    let upstream = |fault, text: String| RequestError::Upstream { fault, text };
    let error = |text: String| upstream(UpstreamFault::Error, text);
    match failure {
        // Another replica may be reached; the scheduler tries that if nothing was passed on.
        Failure::Unreachable(_) => {
            RequestError::ReplicaLost(format!("the upstream {host} was {failure}"))
        }
        Failure::Broken(_) => {
            RequestError::ReplicaLost(format!("the connection to the upstream {host} broke"))
        }
        Failure::Silent => upstream(
            UpstreamFault::Timeout,
            format!("the upstream {host} was silent for too long"),
        ),
        Failure::Nonsense(_) => error(format!("the upstream {host} gave no sound answer")),
        Failure::Told(_) => error(format!("the upstream {host} failed during its answer")),
        Failure::Status {
            status,
            retry_after,
            message,
            is_too_long,
        } => match status {
            429 | 503 => RequestError::Overloaded {
                retry_after_ms: retry_after.map(|wait| wait.as_millis() as u64),
            },
            400 | 413 | 422 => {
                let words = message.as_deref().map(|text| shown(&redact(text)));
                let words = words.unwrap_or_else(|| format!("status {status}"));
                let text = format!("the upstream refuses the request: {words}");
                match is_too_long {
                    true => RequestError::ContextTooLong(text),
                    false => RequestError::Invalid(text),
                }
            }
            401 | 403 => error(format!(
                "the upstream {host} refuses the key of this server ({status})"
            )),
            404 => error(format!("the upstream {host} does not know the model (404)")),
            408 | 504 => upstream(
                UpstreamFault::Timeout,
                format!("the upstream {host} timed out ({status})"),
            ),
            _ => error(format!("the upstream {host} failed ({status})")),
        },
    }
}

/// A message of somebody else, fit to be shown: one line, not long.
#[must_use]
pub fn shown(text: &str) -> String {
    let line = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    line.take(MESSAGE_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(status: u16, retry_after_s: Option<u64>) -> Failure {
        Failure::Status {
            status,
            retry_after: retry_after_s.map(Duration::from_secs),
            message: Some("the key sk-1 is\nnot good".to_owned()),
            is_too_long: false,
        }
    }

    #[test]
    fn only_what_another_try_may_mend_is_tried_again() {
        let limits = CallLimits {
            retries: 2,
            retry_wait_max: Duration::from_secs(5),
            ..CallLimits::default()
        };
        let gone = || Failure::Unreachable(String::new());
        let broken = || Failure::Broken(String::new());
        let ms = |ms| Some(Duration::from_millis(ms));
        #[rustfmt::skip]
        let table = [
            (gone(), false, 0, ms(100)),
            (gone(), false, 1, ms(200)),
            (gone(), false, 2, None),
            (gone(), true, 0, None),
            (broken(), false, 0, ms(100)),
            (broken(), true, 0, None),
            (Failure::Silent, false, 0, None),
            (Failure::Nonsense(String::new()), false, 0, None),
            (status(502, None), false, 0, ms(100)),
            (status(503, Some(2)), false, 0, ms(2000)),
            (status(429, Some(5)), false, 1, ms(5000)),
            (status(429, Some(6)), false, 0, None),
            (status(500, None), false, 0, None),
            (status(504, None), false, 0, None),
            (status(400, None), false, 0, None),
            (status(401, None), false, 0, None),
        ];
        for (failure, has_sent, n_retried, expected) in table {
            let wait = retry_wait(&failure, has_sent, n_retried, &limits);
            assert_eq!(wait, expected, "{failure:?} {has_sent} {n_retried}");
        }
    }

    #[test]
    fn clients_hear_what_happened_and_no_secret() {
        let end =
            |failure: &Failure| verdict(failure, "host:1", |text| text.replace("sk-1", "[key]"));
        let words = end(&status(400, None));
        let expected = "the upstream refuses the request: the key [key] is not good";
        assert_eq!(words, RequestError::Invalid(expected.to_owned()));
        let long = Failure::Status {
            status: 400,
            retry_after: None,
            message: Some("9 of 8 tokens".to_owned()),
            is_too_long: true,
        };
        let text = "the upstream refuses the request: 9 of 8 tokens".to_owned();
        assert_eq!(end(&long), RequestError::ContextTooLong(text));
        for code in [401, 403, 404, 500, 502, 418, 301] {
            let RequestError::Upstream { fault, text } = end(&status(code, None)) else {
                panic!("{code}");
            };
            assert_eq!(fault, UpstreamFault::Error);
            assert!(
                text.contains(&code.to_string()) && !text.contains("good"),
                "{text}"
            );
        }
        for failure in [Failure::Silent, status(408, None), status(504, None)] {
            let fault = UpstreamFault::Timeout;
            assert!(matches!(end(&failure), RequestError::Upstream { fault: f, .. } if f == fault));
        }
        let full = RequestError::Overloaded {
            retry_after_ms: Some(3000),
        };
        assert_eq!(end(&status(429, Some(3))), full);
        let broken = Failure::Broken("reset".to_owned());
        assert!(matches!(end(&broken), RequestError::ReplicaLost(_)));
        assert_eq!(shown(&"x".repeat(1000)).len(), MESSAGE_CHARS_MAX);
    }

    #[test]
    fn full_servers_and_bad_requests_do_not_count_as_gone() {
        for failure in [status(500, None), status(502, None), Failure::Silent] {
            assert!(counts(&failure), "{failure:?}");
        }
        for code in [400, 401, 404, 429, 503] {
            assert!(!counts(&status(code, None)), "{code}");
        }
    }
}

//! Talking to the management plane of a running server: address, key, errors in plain words.
//!
//! Runs on the main thread. Connects directly, whatever proxy the environment names: the plane is on
//! this machine or near it. What is not here: what is asked (`models`, `load_model`, `top`).

use crate::error::Error;
use serde_json::Value;
use std::io::ErrorKind;
use std::time::Duration;

/// Longest wait for an answer; the server starts loads and does not wait for them.
const ANSWER_MAX: Duration = Duration::from_secs(30);
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Longest answer that is read, /metrics of many models included.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
const KEY_VARIABLE: &str = "TINYLOOP_ADMIN_KEY";

/// Where the server is.
#[derive(Clone, Debug, clap::Args)]
pub struct AdminArgs {
    /// Management plane of the server.
    #[arg(
        long = "admin",
        value_name = "URL",
        default_value = "http://127.0.0.1:8081"
    )]
    pub url: String,
    /// Its key [default: the environment variable TINYLOOP_ADMIN_KEY, which other users cannot see].
    #[arg(long, value_name = "KEY")]
    pub admin_key: Option<String>,
}

/// A server's management plane.
pub struct AdminClient {
    agent: ureq::Agent,
    base: String,
    key: Option<String>,
}

impl std::fmt::Debug for AdminClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AdminClient({})", self.base) // never the key
    }
}

impl AdminClient {
    /// Connects to nothing yet.
    pub fn new(args: &AdminArgs) -> Result<Self, Error> {
        let base = match args.url.split_once("://") {
            None => format!("http://{}", args.url),
            Some(("http" | "https", _)) => args.url.clone(),
            Some((scheme, _)) => {
                let text = format!("--admin {}: {scheme} is not http or https", args.url);
                return Err(Error::Usage(text));
            }
        };
        let from_environment = || std::env::var(KEY_VARIABLE).ok();
        let key = args.admin_key.clone().or_else(from_environment);
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(ANSWER_MAX))
            .timeout_connect(Some(CONNECT_MAX))
            .http_status_as_error(false)
            .max_redirects(0) // a key is for one address
            .max_redirects_will_error(false)
            .proxy(None)
            .build();
        Ok(Self {
            agent: agent.into(),
            base: base.trim_end_matches('/').to_owned(),
            key: key.filter(|key| !key.is_empty()),
        })
    }

    /// Its address, for titles.
    #[must_use]
    pub fn base(&self) -> &str {
        &self.base
    }

    /// `GET`, as JSON.
    pub fn get(&self, path: &str) -> Result<Value, Error> {
        self.json(path, &self.text(path)?)
    }

    /// `GET`, as it is.
    pub fn text(&self, path: &str) -> Result<String, Error> {
        let request = self.agent.get(self.url(path));
        let request = match &self.key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        };
        self.answer(request.call())
    }

    /// `POST` with a JSON body.
    pub fn post(&self, path: &str, body: &Value) -> Result<Value, Error> {
        let request = self.agent.post(self.url(path));
        let request = request.header("content-type", "application/json");
        let request = match &self.key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        };
        let text = self.answer(request.send(body.to_string()))?;
        self.json(path, &text)
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    fn json(&self, path: &str, text: &str) -> Result<Value, Error> {
        serde_json::from_str(text).map_err(|error| {
            let what = format!("{}{path} is no management plane of tinyloop", self.base);
            Error::other(&what, error)
        })
    }

    fn answer(
        &self,
        answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<String, Error> {
        let mut answer = answer.map_err(|error| self.transport_error(error))?;
        let status = answer.status().as_u16();
        let body = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX);
        let text = body
            .read_to_string()
            .map_err(|error| self.transport_error(error))?;
        match status {
            200..=299 => Ok(text),
            _ => Err(refusal(status, &text)),
        }
    }

    fn transport_error(&self, error: ureq::Error) -> Error {
        let base = &self.base;
        match error {
            ureq::Error::Io(error) if error.kind() == ErrorKind::ConnectionRefused => {
                Error::Other(format!(
                    "nothing listens on {base}: start 'tinyloop serve', or say with --admin where \
                     its management plane is (it prints the address)"
                ))
            }
            ureq::Error::BadUri(why) => Error::Usage(format!("--admin {base}: {why}")),
            ureq::Error::Http(why) => Error::Usage(format!("--admin {base}: {why}")),
            ureq::Error::HostNotFound => {
                Error::Other(format!("--admin {base}: there is no host of that name"))
            }
            error => Error::other(base, error),
        }
    }
}

/// What the server says is wrong.
fn refusal(status: u16, text: &str) -> Error {
    let body: Value = serde_json::from_str(text).unwrap_or_default();
    let message = body["error"]["message"].as_str().map(str::to_owned);
    let message = message.unwrap_or_else(|| format!("the server answered with status {status}"));
    match status {
        401 => Error::Usage(format!("{message}; use --admin-key or {KEY_VARIABLE}")),
        400 => Error::Usage(message),
        _ => Error::Other(message),
    }
}

/// A model's name as one segment of a path.
#[must_use]
pub fn path_segment(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                text.push(char::from(byte));
            }
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

/// Bytes for people.
#[must_use]
pub fn bytes_text(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ if value < 100.0 => format!("{value:.1} {}", UNITS[unit]),
        _ => format!("{value:.0} {}", UNITS[unit]),
    }
}

/// A table: columns as wide as their widest cell, two spaces between them; the first row is the head.
/// Columns whose index is in `right` end at the same place instead of beginning there.
#[must_use]
pub fn table(rows: &[Vec<String>], right: &[usize]) -> String {
    let n_columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..n_columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let cell: String = cell.chars().map(printable).collect();
            let width = widths[column];
            match right.contains(&column) {
                true => line.push_str(&format!("{cell:>width$}  ")),
                false => line.push_str(&format!("{cell:<width$}  ")),
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Names and errors come from elsewhere: nothing in them may move a terminal's cursor.
fn printable(character: char) -> char {
    match character.is_control() {
        true => ' ',
        false => character,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(url: &str) -> AdminArgs {
        AdminArgs {
            url: url.to_owned(),
            admin_key: Some("secret".to_owned()),
        }
    }

    #[test]
    fn addresses_with_and_without_scheme() {
        for (given, base) in [
            ("http://127.0.0.1:1/", "http://127.0.0.1:1"),
            ("box:8081", "http://box:8081"),
            ("https://box", "https://box"),
        ] {
            let client = AdminClient::new(&args(given)).expect("an address");
            assert_eq!(client.base(), base);
            assert!(!format!("{client:?}").contains("secret"));
        }
        let error = AdminClient::new(&args("ftp://box")).expect_err("no web address");
        assert_eq!(error.exit_code(), 2);
    }

    #[test]
    fn what_the_server_says_is_what_the_user_reads() {
        let body = r#"{"error": {"message": "no such model"}}"#;
        assert_eq!(refusal(404, body).to_string(), "no such model");
        assert_eq!(
            (
                refusal(404, body).exit_code(),
                refusal(400, body).exit_code()
            ),
            (1, 2)
        );
        assert!(refusal(401, body).to_string().contains(KEY_VARIABLE));
        assert!(refusal(502, "<html>").to_string().contains("502"));
    }

    #[test]
    fn names_become_segments_and_tables_line_up() {
        assert_eq!(path_segment("a/b c%é"), "a%2Fb%20c%25%C3%A9");
        assert_eq!(bytes_text(1023), "1023 B");
        assert_eq!(bytes_text(1536), "1.5 KiB");
        assert_eq!(bytes_text(200 << 30), "200 GiB");
        let rows = [vec!["A", "N"], vec!["bé\x1b", "10"]];
        let rows = rows.map(|row| row.into_iter().map(str::to_owned).collect());
        assert_eq!(table(&rows, &[1]), "A     N\nbé   10\n");
    }
}

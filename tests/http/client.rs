//! A small HTTP/1.1 client for tests: one connection, blocking reads with a deadline, chunks one
//! by one as they arrive. It checks framing strictly and hides nothing.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// How long a test waits for bytes that must come.
const DEADLINE: Duration = Duration::from_secs(20);

/// A connection.
pub(crate) struct Client {
    reader: BufReader<TcpStream>,
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(field, _)| field == name);
        found.map(|(_, value)| value.as_str())
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| {
            panic!("{error}: {}", String::from_utf8_lossy(&self.body));
        })
    }

    /// `data:` payloads of an event stream.
    pub(crate) fn events(&self) -> Vec<String> {
        let text = String::from_utf8(self.body.clone()).expect("events are UTF-8");
        let blocks = text.split("\n\n").filter(|block| !block.is_empty());
        blocks
            .filter_map(|block| block.strip_prefix("data: "))
            .map(str::to_owned)
            .collect()
    }
}

impl Client {
    pub(crate) fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("the server listens");
        stream
            .set_read_timeout(Some(DEADLINE))
            .expect("a timeout can be set");
        stream.set_nodelay(true).expect("nodelay can be set");
        Self {
            reader: BufReader::new(stream),
        }
    }

    pub(crate) fn send_raw(&mut self, text: &str) {
        self.reader
            .get_mut()
            .write_all(text.as_bytes())
            .expect("the server reads");
    }

    /// As much of it as the server takes.
    pub(crate) fn try_send_raw(&mut self, text: &str) {
        let _ = self.reader.get_mut().write_all(text.as_bytes());
    }

    pub(crate) fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) {
        let mut text = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n");
        for (name, value) in headers {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        if !body.is_empty() || method == "POST" {
            text.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        self.send_raw(&format!("{text}\r\n{body}"));
    }

    pub(crate) fn get(&mut self, path: &str) -> Answer {
        self.send("GET", path, &[], "");
        self.read_answer()
    }

    pub(crate) fn post(&mut self, path: &str, body: &Value) -> Answer {
        self.send("POST", path, &[], &body.to_string());
        self.read_answer()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.reader
            .read_line(&mut line)
            .expect("a line arrives in time");
        assert!(line.ends_with("\r\n"), "broken line {line:?}");
        line.truncate(line.len() - 2);
        line
    }

    /// Status line and headers; the body is still to be read.
    pub(crate) fn read_head(&mut self) -> Answer {
        let line = self.line();
        let status = line.split(' ').nth(1).and_then(|word| word.parse().ok());
        let status = status.unwrap_or_else(|| panic!("bad status line {line:?}"));
        let mut headers = Vec::new();
        loop {
            let line = self.line();
            if line.is_empty() {
                break;
            }
            let (name, value) = line
                .split_once(": ")
                .expect("a header has a name and a value");
            headers.push((name.to_lowercase(), value.to_owned()));
        }
        let body = Vec::new();
        Answer {
            status,
            headers,
            body,
        }
    }

    /// The next chunk of a chunked body; None at its end.
    pub(crate) fn read_chunk(&mut self) -> Option<Vec<u8>> {
        let line = self.line();
        let size = usize::from_str_radix(&line, 16).expect("a chunk begins with its size");
        let mut data = vec![0; size];
        self.reader
            .read_exact(&mut data)
            .expect("the chunk arrives in time");
        assert_eq!(self.line(), "", "a chunk ends with a line break");
        (size > 0).then_some(data)
    }

    pub(crate) fn read_answer(&mut self) -> Answer {
        let mut answer = self.read_head();
        if answer.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.read_chunk() {
                answer.body.extend(chunk);
            }
        } else if answer.status != 204 {
            let length = answer.header("content-length").map(|length| length.parse());
            let length = length.expect("a length").expect("a number");
            answer.body = vec![0; length];
            self.reader
                .read_exact(&mut answer.body)
                .expect("the body arrives in time");
        }
        answer
    }

    /// Whether the server has closed the connection (waits for it).
    pub(crate) fn is_closed(&mut self) -> bool {
        matches!(self.reader.read(&mut [0]), Ok(0) | Err(_))
    }
}

//! A server whose connections each get what the test wrote down: any bytes, in any pieces, or silence.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// What a connection gets.
#[derive(Clone, Debug)]
pub(crate) enum Script {
    /// These bytes after the request was read, then the end.
    Bytes(Vec<u8>),
    /// These bytes, then nothing until the client leaves.
    ThenSilence(Vec<u8>),
    /// Closed before anything is read.
    Closed,
}

/// See the module.
pub(crate) struct Scripted {
    pub(crate) address: SocketAddr,
    /// Whole requests, in the order they came.
    pub(crate) requests: Receiver<String>,
    thread: Option<JoinHandle<()>>,
}

/// A status without a body of interest.
pub(crate) fn status(line: &str, headers: &str, body: &str) -> Script {
    let length = body.len();
    let text = format!(
        "HTTP/1.1 {line}\r\ncontent-length: {length}\r\nconnection: close\r\n{headers}\r\n{body}"
    );
    Script::Bytes(text.into_bytes())
}

/// An event stream that ends when the connection does.
pub(crate) fn stream(events: &str) -> Vec<u8> {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
    [head.as_bytes(), events.as_bytes()].concat()
}

/// A chunk of a chat answer.
pub(crate) fn delta(text: &str) -> String {
    let chunk = serde_json::json!({"choices": [{"index": 0, "delta": {"content": text}}]});
    format!("data: {chunk}\n\n")
}

/// What ends a chat answer.
pub(crate) fn ending() -> String {
    let end = serde_json::json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]});
    let usage =
        serde_json::json!({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}});
    format!("data: {end}\n\ndata: {usage}\n\ndata: [DONE]\n\n")
}

impl Scripted {
    /// One script per connection, in turn; behind the last one nothing is accepted.
    pub(crate) fn start(scripts: Vec<Script>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it has an address");
        let (sender, requests) = channel();
        let thread = std::thread::Builder::new()
            .name("scripted".to_owned())
            .spawn(move || serve(&listener, scripts, &Arc::new(sender)))
            .expect("a thread");
        Self {
            address,
            requests,
            thread: Some(thread),
        }
    }

    /// Waits until all scripts are played.
    pub(crate) fn finish(mut self) -> Vec<String> {
        let thread = self.thread.take().expect("joined once");
        thread.join().expect("the scripts are sound");
        self.requests.try_iter().collect()
    }
}

fn serve(listener: &TcpListener, scripts: Vec<Script>, requests: &Arc<Sender<String>>) {
    let play = |script: Script| {
        let (stream, _) = listener.accept().expect("a client comes");
        let requests = Arc::clone(requests);
        std::thread::Builder::new()
            .name("scripted-connection".to_owned())
            .spawn(move || connection(stream, script, &requests))
            .expect("a thread")
    };
    let threads: Vec<_> = scripts.into_iter().map(play).collect();
    for thread in threads {
        thread.join().expect("the script is sound");
    }
}

fn connection(mut stream: TcpStream, script: Script, requests: &Sender<String>) {
    let bytes = match &script {
        Script::Closed => return,
        Script::Bytes(bytes) | Script::ThenSilence(bytes) => bytes,
    };
    let _ = requests.send(read_request(&mut stream));
    let _ = stream.write_all(bytes); // it may have left
    if matches!(script, Script::ThenSilence(_)) {
        let _ = stream.read(&mut [0]); // until it leaves
    }
}

/// Head and body of one request.
fn read_request(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    let mut byte = [0];
    while !text.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|n| n == 1) {
        text.extend(byte);
    }
    let head = String::from_utf8_lossy(&text).to_lowercase();
    let length = head.split("content-length: ").nth(1);
    let length = length.and_then(|rest| rest.split("\r\n").next()?.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    stream.read_exact(&mut body).expect("a whole body");
    text.extend(body);
    String::from_utf8(text).expect("requests are text")
}

//! The whole way: clients of a `tinyloop serve` whose models other programs run.
//!
//! `near` is a tinyloop with a stand-in model and a key; `front` has it as a remote model twice, once
//! asking for consent, and a child process that stands in for vLLM.

use crate::client::{Answer, Client};
use crate::scripted::{Script, Scripted, stream};
use crate::support::{PATIENCE, Serve, stand_in, wait_for};
use serde_json::{Value, json};
use std::process::Command;
use std::time::Instant;
use tinyloop::http::errors::ApiError;

const KEY: &str = "front-secret-4711";

struct Front {
    near: Serve,
    front: Serve,
    /// Public name of the child's model, unlike any other on this machine.
    child: String,
}

impl Front {
    fn start(name: &str) -> Self {
        let near = format!(
            "[server]\napi_keys = [{KEY:?}]\n[models.there.fake]\ntick_s = 0.001\nmax_inflight = 8\n"
        );
        let near = Serve::start(&format!("{name}-near"), &near, &[]);
        let child = format!("child-{}-{name}", std::process::id());
        let remote = format!(
            "base_url = \"http://{}/v1\"\nmodel = \"there\"\napi_key_env = \"FAR_KEY\"\n\
             dialect = \"tinyloop\"\n",
            near.address
        );
        let binary = stand_in().display().to_string();
        let config = format!(
            "[executor]\nreplica_wait_ms = 200\n\
             [models.far.openai_remote]\n{remote}\n\
             [models.open.openai_remote]\nallow_remote = \"always\"\n{remote}\n\
             [models.{child}.vllm_serve]\nbinary = {binary:?}\nmodel = \"org/m\"\n"
        );
        Self {
            front: Serve::start(name, &config, &[("FAR_KEY", KEY)]),
            near,
            child,
        }
    }

    fn post(&self, path: &str, body: &Value) -> Answer {
        Client::connect(self.front.address).post(path, body)
    }

    fn chat(&self, model: &str, fields: Value) -> Answer {
        let mut body = json!({"model": model, "max_tokens": 5,
            "messages": [{"role": "user", "content": "hello"}]});
        let map = body.as_object_mut().expect("an object");
        map.extend(fields.as_object().expect("an object").clone());
        self.post("/v1/chat/completions", &body)
    }

    /// Process id and port of the child.
    fn child(&self) -> (u32, u16) {
        find_child(&self.child).expect("the child runs")
    }
}

fn find_child(name: &str) -> Option<(u32, u16)> {
    let processes = std::fs::read_dir("/proc").expect("there is a /proc");
    processes.flatten().find_map(|process| {
        let pid = process.file_name().to_str()?.parse().ok()?;
        let line = std::fs::read_to_string(process.path().join("cmdline")).ok()?;
        let words: Vec<&str> = line.split('\0').collect();
        let is_it = words.contains(&name) && words.contains(&"serve");
        let port = words.iter().position(|word| *word == "--port")?;
        let port = words.get(port + 1)?.parse().ok()?;
        is_it.then_some((pid, port))
    })
}

fn content(answer: &Answer) -> String {
    let body = answer.json();
    assert_eq!(answer.status, 200, "{body}");
    let text = body["choices"][0]["message"]["content"].as_str();
    text.expect("a text").to_owned()
}

#[test]
fn chats_completions_streams_and_refusals() {
    let front = Front::start("front");
    consent(&front);
    whole_answers(&front);
    streams(&front);
    logprobs(&front);
    native(&front);
    missing_capabilities(&front);
    cancels(&front);
    lost(front);
}

/// Nothing leaves unless the request, or the configuration, says so.
fn consent(front: &Front) {
    let refused = front.chat("far", json!({}));
    let error = &refused.json()["error"];
    assert_eq!(refused.status, 403);
    assert_eq!(error["code"], "remote_not_allowed");
    assert_eq!(error["param"], "allow_remote");
    assert_eq!(
        content(&front.chat("far", json!({"allow_remote": true}))),
        "hello"
    );
    let body = json!({"model": "far", "prompt": "hello", "max_tokens": 2});
    let mut client = Client::connect(front.front.address);
    let header = [("x-allow-remote", "true")];
    client.send("POST", "/v1/completions", &header, &body.to_string());
    assert_eq!(client.read_answer().json()["choices"][0]["text"], "he");
}

fn whole_answers(front: &Front) {
    let answer = front.chat("open", json!({"max_tokens": 7, "n": 2}));
    assert_eq!(content(&answer), "hellohe");
    let body = answer.json();
    assert_eq!(body["model"], "open");
    assert_eq!(body["choices"][1]["message"]["content"], "hellohe");
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["usage"]["prompt_tokens"], 5);
    assert_eq!(body["usage"]["completion_tokens"], 14);
    // Both jobs are counted as the other server counts them, not by the bytes of their prompt.
    wait_for("the counts of the other server", || {
        let answer = Client::connect(front.front.address).get("/metrics");
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        text.contains("tinyloop_prompt_tokens_total{model=\"open\"} 10\n")
    });
    let stopped = front.chat("open", json!({"max_tokens": 9, "stop": "lo"}));
    assert_eq!(content(&stopped), "hel");
    assert_eq!(stopped.json()["choices"][0]["finish_reason"], "stop");
    let kept = json!({"max_tokens": 9, "stop": "lo", "include_stop_str_in_output": true});
    assert_eq!(content(&front.chat("open", kept)), "hello");
    let body = json!({"model": "open", "prompt": ["ab", "cd"], "max_tokens": 3});
    let body = front.post("/v1/completions", &body).json();
    assert_eq!(body["choices"][0]["text"], "aba");
    assert_eq!(body["choices"][1]["text"], "cdc");
    assert_eq!(body["usage"]["prompt_tokens"], 4);
    // What the other server refuses is the request's fault, in its words.
    let refused = front.chat("open", json!({"max_tokens": 1_000_000}));
    let error = refused.json();
    assert_eq!(refused.status, 400, "{error}");
    let message = error["error"]["message"].as_str().expect("a text");
    assert!(message.contains("context length"), "{message}");
}

fn streams(front: &Front) {
    let fields = json!({"stream": true, "stream_options": {"include_usage": true}});
    let answer = front.chat("open", fields);
    assert_eq!(answer.status, 200);
    let events = answer.events();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    let chunks: Vec<Value> = events[..events.len() - 1]
        .iter()
        .map(|event| serde_json::from_str(event).expect("JSON"))
        .collect();
    let pieces = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
    assert_eq!(pieces.clone().collect::<String>(), "hello");
    assert_eq!(pieces.count(), 1 + 5, "token by token, behind the opening");
    let usage = &chunks.last().expect("a chunk")["usage"];
    assert_eq!(usage["completion_tokens"], 5);
}

fn logprobs(front: &Front) {
    let fields = json!({"logprobs": true, "top_logprobs": 1, "max_tokens": 2});
    let body = front.chat("open", fields).json();
    let content = body["choices"][0]["logprobs"]["content"].as_array();
    let content = content.unwrap_or_else(|| panic!("{body}"));
    assert_eq!(content.len(), 2);
    assert_eq!(content[0]["token"], "h");
    assert_eq!(content[0]["logprob"], -0.5);
    assert_eq!(content[1]["top_logprobs"][0]["token"], "e");
    let body = json!({"model": "open", "prompt": "ab", "max_tokens": 2, "logprobs": 1});
    let body = front.post("/v1/completions", &body).json();
    let found = &body["choices"][0]["logprobs"];
    assert_eq!(found["tokens"], json!(["a", "b"]));
    assert_eq!(found["text_offset"], json!([0, 1]));
    assert_eq!(found["token_logprobs"], json!([-0.5, -0.5]));
}

fn native(front: &Front) {
    let body = json!({"model": "open", "prompt": "hello", "max_tokens": 3});
    let body = front.post("/v1/native/generate", &body).json();
    assert_eq!(
        (&body["text"], &body["finish_reason"]),
        (&json!("hel"), &json!("length"))
    );
    assert_eq!(body["usage"]["completion_tokens"], 3);
}

fn missing_capabilities(front: &Front) {
    let chat = "/v1/chat/completions";
    let text = "/v1/completions";
    let generate = "/v1/native/generate";
    let messages = json!([{"role": "user", "content": "x"}]);
    let image = json!([{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:"}}]}]);
    #[rustfmt::skip]
    let table = [
        (chat, json!({"messages": messages, "loops": 2}), "loops"),
        (chat, json!({"messages": messages, "min_loops": 1}), "loops"),
        (chat, json!({"messages": messages, "adaptive": {"rule": "kl", "threshold": 1}}), "loops"),
        (chat, json!({"messages": messages, "cache_window": 64}), "cache_window"),
        (chat, json!({"messages": image}), "vision"),
        (text, json!({"prompt": [1, 2]}), "token_ids"),
        (text, json!({"prompt": "a", "echo": true}), "echo"),
        (text, json!({"prompt": "a", "n": 1, "best_of": 2}), "best_of"),
        (generate, json!({"prompt": "a", "mode": "score"}), "prompt_logprobs"),
        (generate, json!({"tokens": [1]}), "token_ids"),
        (generate, json!({"prompt": "a", "return_tokens": true}), "token_ids"),
        ("/v1/native/tokenize", json!({"text": "a"}), "tokenize"),
        ("/v1/native/detokenize", json!({"tokens": [1]}), "tokenize"),
        ("/v1/native/prefixes", json!({"text": "a"}), "prefixes"),
    ];
    for (path, mut body, capability) in table {
        body["model"] = json!("open");
        let answer = front.post(path, &body);
        let error = answer.json()["error"].clone();
        assert_eq!(answer.status, 400, "{path} {body}: {error}");
        assert_eq!(
            error["code"], "missing_capability",
            "{path} {body}: {error}"
        );
        let message = error["message"].as_str().expect("a text");
        assert!(
            message.contains(&format!("'{capability}'")),
            "{body}: {message}"
        );
        assert_eq!(answer.header("x-should-retry"), Some("false"));
    }
    // What it understands is forwarded: the stand-in for vLLM does not mind.
    let fields = json!({"response_format": {"type": "json_object"}, "min_p": 0.1});
    assert_eq!(front.chat(&front.child, fields).status, 200);
}

/// A client that leaves ends its job at the child.
fn cancels(front: &Front) {
    let (_, port) = front.child();
    let seen = || {
        Client::connect(([127, 0, 0, 1], port).into())
            .get("/stand-in")
            .json()
    };
    let body = json!({"model": front.child, "stream": true,
        "messages": [{"role": "user", "content": "tokens endless pause 0.01"}]});
    let mut client = Client::connect(front.front.address);
    client.send("POST", "/v1/chat/completions", &[], &body.to_string());
    assert_eq!(client.read_head().status, 200);
    assert!(client.read_chunk().is_some());
    assert_eq!(seen()["running"], 1);
    drop(client);
    wait_for("the abort", || seen()["running"] == 0);
    let bodies = seen()["bodies"].clone();
    assert_eq!(bodies[0]["response_format"]["type"], "json_object");
    assert_eq!(bodies[0]["min_p"], 0.1);
}

fn lost(mut front: Front) {
    front.near.process.kill().expect("it runs");
    front.near.process.wait().expect("it is ours");
    let answer = front.chat("open", json!({}));
    let error = answer.json()["error"].clone();
    assert!((502..=504).contains(&answer.status), "{error}");
    assert!(!error.to_string().contains(KEY));
}

/// Log and quota count the tokens that the other server told, not the bytes of the prompt.
#[test]
fn the_tokens_of_other_servers_are_in_the_log_and_in_the_quota() {
    let near = "[models.there.fake]\ntick_s = 0.001\n";
    let near = Serve::start("counts-near", near, &[]);
    let config = format!(
        "[keys.limited]\nkey = \"k\"\ntokens_per_minute = 900\n\
         [models.far.openai_remote]\nbase_url = \"http://{}/v1\"\nmodel = \"there\"\n\
         allow_remote = \"always\"\n",
        near.address
    );
    let front = Serve::start("counts", &config, &[]);
    // The other server counts the texts: 400 + 5. What goes over the wire is longer.
    let rest = "x".repeat(400);
    for (stream, idx) in [(false, 1), (true, 2)] {
        let body = json!({"model": "far", "max_tokens": 5, "stream": stream, "request_id": format!("count-{idx}"),
            "messages": [{"role": "system", "content": rest}, {"role": "user", "content": "hello"}]});
        let mut client = Client::connect(front.address);
        client.send(
            "POST",
            "/v1/chat/completions",
            &[("x-api-key", "k")],
            &body.to_string(),
        );
        assert_eq!(client.read_answer().status, 200);
        let told = format!("id=count-{idx} ");
        let mut line = String::new();
        wait_for("its line", || {
            let log = front.log();
            let found = log.lines().find(|line| line.contains(&told));
            line = found.unwrap_or_default().to_owned();
            !line.is_empty()
        });
        assert!(line.contains(" prompt_tokens=405 "), "{line}");
        assert!(line.contains(" completion_tokens=5 "), "{line}");
    }
    let mut client = Client::connect(front.address);
    client.send("GET", "/v1/models", &[("x-api-key", "k")], "");
    let answer = client.read_answer();
    let left = answer.header("x-ratelimit-remaining-tokens").expect("told");
    let left: u64 = left.parse().expect("a number");
    // 900 less 2 x (405 + 5), and a few that time gives back; a guess from the bytes would leave 690.
    assert!((80..400).contains(&left), "{left}");
}

/// One of two servers is gone: its jobs go to the other, and no client notices.
#[test]
fn a_lost_server_costs_nobody_an_answer() {
    let near = "[models.there.fake]\ntick_s = 0.001\n";
    let near = Serve::start("failover-near", near, &[]);
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let gone = nobody.local_addr().expect("it has an address");
    drop(nobody);
    let config = format!(
        "[models.two.openai_remote]\nbase_urls = [\"http://{gone}/v1\", \"http://{}/v1\"]\n\
         model = \"there\"\nhealth_path = \"\"\nallow_remote = \"always\"\n\
         limits = {{ retries = 0, failures_max = 2 }}\n",
        near.address
    );
    let front = Serve::start("failover", &config, &[]);
    for _ in 0..8 {
        let body = json!({"model": "two", "max_tokens": 5,
            "messages": [{"role": "user", "content": "hello"}]});
        let answer = Client::connect(front.address).post("/v1/chat/completions", &body);
        assert_eq!(content(&answer), "hello");
    }
}

/// However the server ends, its child does not outlive it.
#[test]
fn children_are_no_orphans() {
    for signal in ["TERM", "KILL"] {
        let mut front = Front::start(&format!("orphan-{signal}"));
        let (pid, _) = front.child();
        let command = format!("kill -{signal} {}", front.front.process.id());
        let sent = Command::new("sh").args(["-c", &command]).status();
        assert!(sent.expect("there is a shell").success());
        let deadline = Instant::now() + PATIENCE;
        while front
            .front
            .process
            .try_wait()
            .expect("it is ours")
            .is_none()
        {
            assert!(Instant::now() < deadline, "it does not end");
            std::thread::yield_now();
        }
        wait_for("the child's end", || {
            find_child(&front.child).is_none_or(|(found, _)| found != pid)
        });
    }
}

/// Calls and thoughts of another server reach the client as if they were ours, with ids and numbers of
/// our own; the tools reach that server as the client wrote them.
#[test]
fn calls_and_thoughts_of_another_server_come_through() {
    let event = |delta: Value, finish: Value| {
        let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
        format!("data: {}\n\n", json!({"choices": [choice]}))
    };
    let call = |id: Value, name: Value, arguments: &str| {
        let function = json!({"name": name, "arguments": arguments});
        json!({"tool_calls": [{"index": 0, "id": id, "type": "function", "function": function}]})
    };
    let usage = json!({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 8,
        "completion_tokens_details": {"reasoning_tokens": 2}}});
    // As servers do it that number every call 0.
    let events = [
        event(json!({"role": "assistant", "content": null}), Value::Null),
        event(json!({"reasoning_content": "h"}), Value::Null),
        event(json!({"reasoning": "m"}), Value::Null),
        event(call(json!("a"), json!("f"), ""), Value::Null),
        event(call(Value::Null, Value::Null, "{\"x\":"), Value::Null),
        event(call(Value::Null, Value::Null, " 1}"), Value::Null),
        event(call(json!("b"), json!("g"), "{}"), Value::Null),
        event(json!({}), json!("tool_calls")),
        format!("data: {usage}\n\ndata: [DONE]\n\n"),
    ];
    let answer = || Script::Bytes(stream(&events.concat()));
    let server = Scripted::start(vec![answer(), answer()]);
    let config = format!(
        "[models.far.openai_remote]\nbase_url = \"http://{}/v1\"\nmodel = \"there\"\n\
         allow_remote = \"always\"\nhealth_path = \"\"\n",
        server.address
    );
    let front = Serve::start("front-tools", &config, &[]);
    let tools = json!([{"type": "function", "function": {"name": "f", "strict": true}},
        {"type": "function", "function": {"name": "g"}}]);
    let mut body = json!({"model": "far", "messages": [{"role": "user", "content": "x"}],
        "tools": tools, "tool_choice": "auto", "parallel_tool_calls": true});
    let whole = Client::connect(front.address).post("/v1/chat/completions", &body);
    let whole = whole.json();
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{whole}");
    let message = &choice["message"];
    assert_eq!(
        (&message["content"], &message["reasoning_content"]),
        (&Value::Null, &json!("hm"))
    );
    let functions: Vec<Value> = message["tool_calls"]
        .as_array()
        .expect("calls")
        .iter()
        .map(|call| call["function"].clone())
        .collect();
    let expected = [
        json!({"name": "f", "arguments": "{\"x\": 1}"}),
        json!({"name": "g", "arguments": "{}"}),
    ];
    assert_eq!(functions, expected);
    assert_eq!(
        whole["usage"]["completion_tokens_details"]["reasoning_tokens"],
        2
    );
    body["stream"] = json!(true);
    let streamed = Client::connect(front.address).post("/v1/chat/completions", &body);
    let text = String::from_utf8(streamed.body).expect("events are UTF-8");
    assert!(text.contains("\"index\":1,\"id\":\"call_"), "{text}");
    assert!(text.contains("\"finish_reason\":\"tool_calls\""), "{text}");
    drop(front);
    for request in server.finish() {
        let body = request.split("\r\n\r\n").nth(1).expect("a body");
        let body: Value = serde_json::from_str(body).expect("JSON");
        assert_eq!(body["tools"], tools);
        assert_eq!(
            (&body["tool_choice"], &body["parallel_tool_calls"]),
            (&json!("auto"), &json!(true))
        );
    }
}

/// Who waits for a whole answer is told whether a lost replica had made some of it.
#[test]
fn a_whole_answer_lost_with_its_replica_says_whether_it_had_begun() {
    let name = format!("crashes-{}", std::process::id());
    let binary = stand_in().display().to_string();
    let config = format!("[models.{name}.vllm_serve]\nbinary = {binary:?}\nmodel = \"org/m\"\n");
    let front = Serve::start("crashes", &config, &[]);
    let body = json!({"model": name, "messages": [{"role": "user", "content": "crash"}]});
    let answer = Client::connect(front.address).post("/v1/chat/completions", &body);
    let error = &answer.json()["error"];
    assert_eq!(
        (answer.status, &error["code"]),
        (503, &json!("replica_lost"))
    );
    assert_eq!(error["completion_tokens"], 2, "{error}");
    let message = error["message"].as_str().expect("a text");
    assert!(message.contains("after 2 tokens"), "{message}");
    let before = ApiError::replica_lost(0);
    assert!(
        before.message.contains("before the first token"),
        "{before:?}"
    );
    assert_eq!(before.numbers, [("completion_tokens", 0.0)]);
}

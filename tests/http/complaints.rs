//! More of what people complained about, under the numbers of `cases`: the rest of what a case names.

use super::{TestServer, wait_for};
use crate::client::Client;
use crate::fake::Alphabet;
use crate::real_engine::serve_tiny;
use crate::shared::{post, with};
use crate::streams::chat;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tinyloop::clock::SystemClock;
use tinyloop::config::{
    Config, EngineConfig, ExecutorConfig, ModelConfig, ModelSource, PoolConfig,
};
use tinyloop::pool::{LoadOverride, Pool, PoolError, PoolParts, RuntimeState, SourceLoader};
use tinyloop::runtime::native::BackendKind;
use tinyloop::scheduler::Metrics;
use tinyloop::server::Server;

const CHAT: &str = "/v1/chat/completions";
const PATIENCE: Duration = Duration::from_secs(60);

fn tiny_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models/tiny_llama.gguf")
}

fn tiny(name: &str, file: PathBuf) -> ModelConfig {
    let mut model = ModelConfig::new(name, ModelSource::File(file));
    model.engine = EngineConfig {
        threads: Some(1),
        max_sequences: 4,
        kv_tokens: Some(256),
        context_length: Some(128),
        ..EngineConfig::default()
    };
    model
}

/// A server over a pool that may hold `cpu_bytes`, with these models, loaded or failed.
fn serve(models: Vec<ModelConfig>, cpu_bytes: Option<u64>) -> (Server, Arc<Pool>) {
    let metrics = Arc::new(Metrics::new());
    let pool = Arc::new(Pool::with_parts(PoolParts {
        metrics: Arc::clone(&metrics),
        clock: Arc::new(SystemClock),
        loader: Arc::new(SourceLoader::new(BackendKind::Cpu, metrics)),
        config: PoolConfig {
            cpu_bytes,
            ..PoolConfig::default()
        },
    }));
    for model in models {
        pool.add(model).expect("the names differ");
    }
    pool.load_enabled();
    assert!(pool.wait_started(PATIENCE));
    let mut config = Config::default();
    config.server.port = 0;
    config.management.enabled = false;
    let server = Server::start(&config, Arc::clone(&pool)).expect("the server starts");
    (server, pool)
}

#[test]
fn case_15_usage_of_several_choices_comes_once_behind_all_ends() {
    let server = TestServer::start(Alphabet::at_once());
    let asked = json!({"n": 2, "max_tokens": 4, "stream_options": {"include_usage": true}});
    let completion = json!({"prompt": ["hi", "yo"], "max_tokens": 4, "stream": true,
        "stream_options": {"include_usage": true}});
    for (path, body) in [(CHAT, chat(&asked)), ("/v1/completions", completion)] {
        let answer = server.client().post(path, &body);
        let events = answer.events();
        let (done, chunks) = events.split_last().expect("a stream ends");
        assert_eq!(done, "[DONE]");
        let chunks = chunks.iter().map(|chunk| serde_json::from_str(chunk));
        let chunks: Vec<Value> = chunks.collect::<Result<_, _>>().expect("JSON");
        let (last, before) = chunks.split_last().expect("chunks");
        assert_eq!(last["choices"], json!([]), "{path}");
        assert_eq!(last["usage"]["completion_tokens"], 8, "{path}");
        let n_ends = before.iter().filter(|chunk| {
            assert!(chunk.get("usage").is_some_and(Value::is_null), "{chunk}");
            chunk["choices"][0]["finish_reason"] == "length"
        });
        assert_eq!(n_ends.count(), 2, "{path}");
    }
}

/// Who leaves, and who cancels: what was computed for them is counted, no more and no less.
#[test]
fn case_15_counts_are_right_when_an_answer_is_broken_off() {
    let runtime = Alphabet::stepped(1);
    let server = TestServer::start(Arc::clone(&runtime));
    let options = json!({"max_tokens": 100, "stream_options": {"include_usage": true}});
    let ask = |id: &str| {
        let mut client = server.client();
        let headers = [("x-request-id", id)];
        client.send("POST", CHAT, &headers, &chat(&options).to_string());
        wait_for("the job", || runtime.n_active() == 1);
        for _ in 0..3 {
            runtime.step();
        }
        client.read_head();
        client
    };
    let mut cancelled = ask("by-id");
    let told = server
        .client()
        .post("/v1/requests/by-id/cancel", &json!({}));
    assert_eq!(told.status, 200);
    let mut stream = Vec::new();
    while let Some(chunk) = cancelled.read_chunk() {
        stream.extend(chunk);
    }
    let stream = String::from_utf8(stream).expect("text");
    assert!(
        stream.contains(r#""finish_reason":"cancelled""#),
        "{stream}"
    );
    // The stream tells the same as the metrics.
    assert!(
        stream.contains(r#""usage":{"prompt_tokens":18,"completion_tokens":3,"#),
        "{stream}"
    );
    wait_for("the slot", || server.executor.snapshot().in_flight == 0);
    let left = ask("left");
    drop(left);
    wait_for("the counts", || {
        let text = server.executor.metrics_text("");
        text.contains("tinyloop_completion_tokens_total{model=\"test/model\"} 6\n")
            && text.contains("tinyloop_prompt_tokens_total{model=\"test/model\"} 36\n")
            && text
                .contains("tinyloop_requests_total{model=\"test/model\",outcome=\"cancelled\"} 2\n")
    });
}

/// A file that is no model says which key or tensor is wrong, and nobody else hears anything of it: not the
/// models beside it, which answer while it is tried again and again, nor its own clients, who hear no paths.
#[test]
fn case_21_the_fault_of_a_file_names_its_key_or_tensor() {
    let sound = std::fs::read(tiny_file()).expect("the committed model");
    let at = |needle: &[u8]| {
        let found = sound
            .windows(needle.len())
            .position(|window| window == needle);
        found.expect("it is there") + needle.len()
    };
    let edited = |place: usize, bytes: &[u8]| {
        let mut edited = sound.clone();
        edited[place..place + bytes.len()].copy_from_slice(bytes);
        edited
    };
    // Behind a key stands the kind of its value; behind a tensor's name the number of its dimensions, the
    // dimensions, its type and its offset.
    let blocks = at(b"llama.block_count");
    let norm = at(b"output_norm.weight");
    let faults: [(&str, Vec<u8>, &str); 7] = [
        ("short", sound[..sound.len() - 100].to_vec(), "tensor"),
        ("kind", edited(blocks, &8_u32.to_le_bytes()), "block_count"),
        (
            "value",
            edited(blocks + 4, &u32::MAX.to_le_bytes()),
            "block_count",
        ),
        (
            "shape",
            edited(norm + 4, &u64::MAX.to_le_bytes()),
            "output_norm.weight",
        ),
        (
            "type",
            edited(norm + 12, &999_u32.to_le_bytes()),
            "output_norm.weight",
        ),
        (
            "offset",
            edited(norm + 16, &(1_u64 << 40).to_le_bytes()),
            "output_norm.weight",
        ),
        ("header", sound[..20].to_vec(), "truncated"),
    ];
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let mut models = vec![tiny("sound", tiny_file())];
    for (name, bytes, _) in &faults {
        let path = folder.join(format!("case_21_names_{name}.gguf"));
        std::fs::write(&path, bytes).expect("the folder is there");
        models.push(tiny(name, path));
    }
    let (server, pool) = serve(models, None);
    let mut client = Client::connect(server.address());
    let body = json!({"model": "sound", "prompt": "ab", "max_tokens": 4, "temperature": 0});
    let said = client.post("/v1/completions", &body).json()["choices"][0]["text"].clone();
    assert!(said.is_string());
    for (name, _, word) in &faults {
        for _ in 0..3 {
            let report = pool.report(name).expect("a row");
            assert_eq!(report.runtime_state, RuntimeState::Failed, "{name}");
            let why = report.last_error.expect("a reason");
            assert!(why.contains(word) && why.contains(name), "{name}: {why}");
            assert!(!why.contains("panic"), "{name}: {why}");
            pool.load(name, &LoadOverride::default())
                .expect("it is tried");
            let again = client.post("/v1/completions", &body).json();
            assert_eq!(again["choices"][0]["text"], said);
            assert_eq!(
                pool.wait_settled(name, PATIENCE),
                Some(RuntimeState::Failed)
            );
        }
        let hidden = client.post(
            "/v1/completions",
            &with(body.clone(), &json!({"model": name})),
        );
        assert_eq!(hidden.json()["error"]["code"], "model_failed");
        assert!(!hidden.json().to_string().contains(".gguf"));
    }
    assert_eq!(client.get("/health").status, 200);
    server.shutdown(Duration::ZERO);
}

/// Of `/metrics`.
fn gauge(client: &mut Client, line: &str) -> u64 {
    let text = String::from_utf8(client.get("/metrics").body).expect("text");
    let value = text.lines().find_map(|each| each.strip_prefix(line));
    let value = value.unwrap_or_else(|| panic!("{line} is not in\n{text}"));
    value.trim().parse::<f64>().expect("a number") as u64
}

/// Weights, K/V, buffers and what is kept for reuse are in one book with one limit: it does not move under load,
/// what is kept makes room for whoever needs it, and a second model does not fit into what only seems free.
#[test]
fn case_22_one_ledger_counts_weights_kv_and_caches() {
    let (server, pool) = serve(vec![tiny("alone", tiny_file())], None);
    let held = pool.devices().remove(0).used_bytes;
    let memory = pool.report("alone").expect("a row").memory;
    assert_eq!(held, memory.total_bytes());
    assert!(memory.weight_bytes > 0 && memory.kv_bytes > 0);
    server.shutdown(Duration::ZERO);

    let mut second = tiny("second", tiny_file());
    second.lifecycle.enabled = false;
    let (server, pool) = serve(vec![tiny("first", tiny_file()), second], Some(held * 3 / 2));
    let mut client = Client::connect(server.address());
    let mut most_cached = 0;
    for number in 0..30 {
        let prompt = format!("{number} is where this begins, and it goes on for a while then");
        let body = json!({"model": "first", "prompt": prompt, "max_tokens": 8, "ignore_eos": true});
        assert_eq!(
            client.post("/v1/completions", &body).status,
            200,
            "{number}"
        );
        let cached = gauge(&mut client, "tinyloop_cache_bytes{model=\"first\"}");
        most_cached = most_cached.max(cached);
        assert!(cached <= memory.kv_bytes, "{cached} of {}", memory.kv_bytes);
        let kinds = ["weights", "kv", "scratch"].map(|kind| {
            let line = format!("tinyloop_memory_bytes{{device=\"cpu\",kind=\"{kind}\"}}");
            gauge(&mut client, &line)
        });
        assert_eq!(kinds.iter().sum::<u64>(), held, "{kinds:?}");
        assert_eq!(pool.devices()[0].used_bytes, held);
    }
    assert!(
        most_cached > memory.kv_bytes / 2,
        "{most_cached}: the cache was never full"
    );
    // Two answers that need all of it at once get it: nothing is refused, nothing is lost.
    let long = json!({"model": "first", "prompt": "x", "max_tokens": 120, "ignore_eos": true});
    let mut both = [
        Client::connect(server.address()),
        Client::connect(server.address()),
    ];
    for client in &mut both {
        client.send("POST", "/v1/completions", &[], &long.to_string());
    }
    for client in &mut both {
        let answer = client.read_answer();
        assert_eq!(answer.json()["usage"]["completion_tokens"], 120);
    }
    // The second would fit beside the first without its cache; but that is counted.
    let refused = pool.load("second", &LoadOverride::default());
    let Err(PoolError::NoRoom { room, .. }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(room.limit_bytes, held * 3 / 2);
    assert!(room.needed_bytes > room.free_bytes, "{room}");
    server.shutdown(Duration::ZERO);
}

/// Every route that takes a form refuses one that cannot be followed, says where it stands, and accepts nothing
/// into the queue for it.
#[test]
fn case_17_every_route_refuses_and_queues_nothing() {
    let server = serve_tiny(ExecutorConfig::default(), EngineConfig::default(), |_| {});
    let mut client = server.client();
    let bad = json!({"type": "object", "properties": {"a": {"type": "thing"}}});
    let messages = json!([{"role": "user", "content": "hi"}]);
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": bad}});
    let format = json!({"type": "json_schema", "name": "s", "schema": bad});
    let response_format =
        json!({"type": "json_schema", "json_schema": {"name": "s", "schema": bad}});
    #[rustfmt::skip]
    let cases = [
        (CHAT, json!({"messages": messages, "response_format": response_format}), "response_format.json_schema.schema"),
        (CHAT, json!({"messages": messages, "json_schema": bad}), "json_schema"),
        (CHAT, json!({"messages": messages, "tools": [tool], "tool_choice": "required"}), "tools[0].function.parameters"),
        ("/v1/completions", json!({"prompt": "x", "guided_json": bad}), "guided_json"),
        ("/v1/completions", json!({"prompt": "x", "structured_outputs": {"json": bad}}), "structured_outputs.json"),
        ("/v1/responses", json!({"input": "x", "text": {"format": format}}), "text.format.schema"),
        ("/v1/native/generate", json!({"prompt": "x", "json_schema": bad}), "json_schema"),
        ("/api/v0/chat/completions", json!({"messages": messages, "response_format": response_format}), "response_format.json_schema.schema"),
    ];
    for (path, body, param) in cases {
        for stream in [false, true] {
            let answer = client.post(path, &with(body.clone(), &json!({"stream": stream})));
            let error = answer.json()["error"].clone();
            assert_eq!(answer.status, 400, "{path}: {error}");
            assert_eq!(
                (&error["code"], &error["param"]),
                (&json!("invalid_json_schema"), &json!(param)),
                "{path}: {error}"
            );
            assert_eq!(answer.header("x-should-retry"), Some("false"), "{path}");
        }
    }
    // In the words of other servers.
    let llama = client.post("/completion", &json!({"prompt": "x", "json_schema": bad}));
    assert_eq!(llama.status, 400);
    let message = llama.json()["error"]["message"].to_string();
    assert!(message.contains("json_schema"), "{message}");
    let tool = json!({"name": "f", "input_schema": bad});
    let anthropic = client.post(
        "/v1/messages",
        &json!({"messages": messages, "max_tokens": 5,
        "tools": [tool], "tool_choice": {"type": "any"}}),
    );
    assert_eq!(anthropic.status, 400);
    let message = anthropic.json()["error"]["message"].to_string();
    assert!(message.contains("schema"), "{message}");
    let counted = server.executor.metrics_text("");
    for outcome in ["done", "cancelled", "error"] {
        let none = format!("tinyloop_requests_total{{model=\"tiny\",outcome=\"{outcome}\"}} 0\n");
        assert!(counted.contains(&none), "{outcome}: {counted}");
    }
}

/// One odd schema among many tools, or a hundred kilobytes of them, is no reason to refuse a request that
/// enforces none of them; where they are enforced the fault names its tool.
#[test]
fn case_17_many_tools_and_odd_ones_do_not_spoil_a_request() {
    let engine = EngineConfig {
        context_length: Some(1024),
        ..EngineConfig::default()
    };
    let server = serve_tiny(ExecutorConfig::default(), engine, |_| {});
    let function = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let sound = json!({"type": "object", "required": ["ok"], "additionalProperties": false,
        "properties": {"ok": {"type": "boolean"}}});
    let odd = json!({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}});
    let ask = |tools: &Value, extra: Value| {
        let body = json!({"messages": [{"role": "user", "content": "hi"}], "tools": tools,
            "max_tokens": 60, "seed": 1, "parallel_tool_calls": false});
        server.client().post(CHAT, &with(body, &extra))
    };
    let tools = json!([function("good", sound.clone()), function("bad", odd)]);
    assert_eq!(ask(&tools, json!({})).status, 200);
    let named = json!({"type": "function", "function": {"name": "good"}});
    let answer = ask(&tools, json!({"tool_choice": named}));
    assert_eq!(answer.status, 200, "only what is enforced has to be sound");
    let refused = ask(&tools, json!({"tool_choice": "required"}));
    let error = refused.json()["error"].clone();
    assert_eq!(
        (refused.status, &error["code"]),
        (400, &json!("invalid_json_schema"))
    );
    assert_eq!(error["param"], "tools[1].function.parameters", "{error}");

    // 150 kB of schemas. The tiny model's template does not show tools, so that the prompt is short.
    let words: Vec<String> = (0..30)
        .map(|idx| format!("one of the long names, number {idx}"))
        .collect();
    let large = json!({"type": "object", "required": ["kind"], "additionalProperties": false,
        "properties": {"kind": {"enum": words}, "ok": {"type": "boolean"}}});
    let tools: Vec<Value> = (0..128)
        .map(|idx| function(&format!("f{idx}"), large.clone()))
        .collect();
    let tools = json!(tools);
    assert!(tools.to_string().len() > 100_000);
    let free = ask(&tools, json!({"tool_choice": "none"}));
    assert_eq!(free.status, 200, "{}", free.json());
    let forced = ask(&tools, json!({"tool_choice": "required"}));
    let error = forced.json()["error"].clone();
    let says_why = error["code"] == "invalid_json_schema" && error["param"].is_string();
    let is_long = error["code"] == "context_length_exceeded";
    assert!(forced.status == 200 || says_why || is_long, "{error}");
}

/// Rules that are no rules, that never end, or that blow up, from one client, while another one's answer runs:
/// each is that client's own 400, and not a byte of the other changes.
#[test]
fn case_18_the_rules_of_one_client_are_nobody_elses_matter() {
    let server = serve_tiny(ExecutorConfig::default(), EngineConfig::default(), |_| {});
    let body = json!({"prompt": "once upon", "max_tokens": 300, "seed": 1, "temperature": 1.0,
        "ignore_eos": true});
    let alone = post(&server, "/v1/completions", &body)["choices"][0]["text"].clone();
    let mut running = server.client();
    running.send("POST", "/v1/completions", &[], &body.to_string());
    let mut nested = json!({"type": "string"});
    for _ in 0..60 {
        nested = json!({"type": "array", "items": nested, "minItems": 3});
    }
    let nested_regex = "(".repeat(3000) + &")".repeat(3000);
    let regex_that_explodes = "((((a{1,200}){1,200}){1,200}){1,200}){1,200}";
    let mut client = server.client();
    for rules in [
        json!({"guided_regex": "("}),
        json!({"guided_regex": "(?<=a)b"}),
        json!({"guided_regex": regex_that_explodes}),
        json!({"guided_regex": nested_regex}),
        json!({"regex": "[\u{0}-"}),
        json!({"grammar": "root ::= root"}),
        json!({"grammar": "root ::= \"a\" missing"}),
        json!({"grammar": "\u{0}"}),
        json!({"json_schema": {"$ref": "#"}}),
        json!({"json_schema": {"$ref": "http://127.0.0.1:1/s.json"}}),
        json!({"json_schema": {"type": "string", "pattern": "("}}),
        json!({"json_schema": {"allOf": [{"type": "string"}, {"type": "integer"}]}}),
        json!({"json_schema": {"enum": []}}),
        json!({"json_schema": nested}),
    ] {
        let ask = json!({"prompt": "x", "max_tokens": 3});
        let answer = client.post("/v1/completions", &with(ask, &rules));
        // Some of them can be followed for three tokens; none may hurt the server.
        assert!(
            matches!(answer.status, 200 | 400),
            "{rules}: {}",
            answer.json()
        );
        if answer.status == 400 {
            let error = answer.json()["error"].clone();
            assert!(error["param"].is_string(), "{rules}: {error}");
        }
    }
    assert_eq!(running.read_answer().json()["choices"][0]["text"], alone);
    let health = client.get("/health");
    assert_eq!(
        (health.status, &health.json()["status"]),
        (200, &json!("ok"))
    );
    let fine = json!({"prompt": "x", "choice": ["fine"], "max_tokens": 20});
    let fine = post(&server, "/v1/completions", &fine);
    assert_eq!(fine["choices"][0]["text"], "fine");
}

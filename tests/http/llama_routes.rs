//! llama-server's routes over a runtime that says the alphabet. Sets of fields are contracts: they were
//! read off a running llama-server (build of 2026-05).

use super::{TestServer, wait_for};
use crate::client::Answer;
use crate::fake::Alphabet;
use crate::native::events;
use crate::shared::{keys, post};
use serde_json::{Value, json};

const COMPLETION_KEYS: &[&str] = &[
    "content",
    "generation_settings",
    "has_new_line",
    "id_slot",
    "index",
    "model",
    "prompt",
    "stop",
    "stop_type",
    "stopping_word",
    "timings",
    "tokens",
    "tokens_cached",
    "tokens_evaluated",
    "tokens_predicted",
    "truncated",
];
#[rustfmt::skip]
const SETTINGS_KEYS: &[&str] = &[
    "adaptive_decay", "adaptive_target", "backend_sampling", "chat_format", "dry_allowed_length",
    "dry_base", "dry_multiplier", "dry_penalty_last_n", "dry_sequence_breakers",
    "dynatemp_exponent", "dynatemp_range", "frequency_penalty", "generation_prompt", "grammar",
    "grammar_lazy", "grammar_triggers", "ignore_eos", "logit_bias", "lora", "max_tokens",
    "min_keep", "min_p", "mirostat", "mirostat_eta", "mirostat_tau", "n_discard", "n_keep",
    "n_predict", "n_probs", "post_sampling_probs", "presence_penalty", "preserved_tokens",
    "reasoning_format", "reasoning_in_content", "repeat_last_n", "repeat_penalty", "samplers",
    "seed", "speculative.types", "stop", "stream", "temperature", "timings_per_token", "top_k",
    "top_n_sigma", "top_p", "typical_p", "xtc_probability", "xtc_threshold",
];
const TIMINGS_KEYS: &[&str] = &[
    "cache_n",
    "predicted_ms",
    "predicted_n",
    "predicted_per_second",
    "predicted_per_token_ms",
    "prompt_ms",
    "prompt_n",
    "prompt_per_second",
    "prompt_per_token_ms",
];

#[test]
fn a_completion_has_llama_servers_fields() {
    let server = TestServer::start(Alphabet::at_once());
    let body = json!({"prompt": "hi", "n_predict": 3, "seed": 0, "id_slot": 2, "n_keep": 4,
        "cache_prompt": true});
    let whole = post(&server, "/completion", &body);
    assert_eq!(keys(&whole), COMPLETION_KEYS);
    assert_eq!(keys(&whole["generation_settings"]), SETTINGS_KEYS);
    assert_eq!(keys(&whole["timings"]), TIMINGS_KEYS);
    for (name, expected) in [
        ("index", json!(0)),
        ("content", json!("abc")),
        ("tokens", json!([])),
        ("stop", json!(true)),
        ("model", json!("test/model")),
        ("tokens_predicted", json!(3)),
        ("tokens_evaluated", json!(2)),
        ("prompt", json!("hi")),
        ("has_new_line", json!(false)),
        ("truncated", json!(false)),
        ("stop_type", json!("limit")),
        ("stopping_word", json!("")),
    ] {
        assert_eq!(whole[name], expected, "{name}");
    }
    let settings = &whole["generation_settings"];
    for (name, expected) in [
        ("temperature", json!(0.8_f32)),
        ("top_k", json!(40)),
        ("top_p", json!(0.95_f32)),
        ("min_p", json!(0.05_f32)),
        ("n_predict", json!(3)),
        ("seed", json!(0)),
        ("repeat_last_n", json!(64)),
        ("stream", json!(false)),
    ] {
        assert_eq!(settings[name], expected, "{name}");
    }
    assert_eq!(settings["samplers"][0], "penalties");
    assert_eq!(whole["timings"]["predicted_n"], 3);
    assert_eq!(whole["timings"]["prompt_n"], 2);
}

#[test]
fn a_stream_says_what_the_whole_answer_says() {
    let server = TestServer::start(Alphabet::at_once());
    let body = |stream: bool| {
        json!({"prompt": [104, "i"], "n_predict": 9, "seed": 0, "stop": ["fg"], "n_probs": 2,
            "return_tokens": true, "stream": stream})
    };
    let mut whole = post(&server, "/completion", &body(false));
    let answer = server.client().post("/completion", &body(true));
    let events = events(&answer); // all of it is JSON: there is no [DONE]
    let (end, pieces) = events.split_last().expect("events");
    let joined = |name: &str| -> Vec<Value> {
        let lists = pieces.iter().filter_map(|piece| piece[name].as_array());
        lists.flatten().cloned().collect()
    };
    let content: String = pieces
        .iter()
        .filter_map(|p| p["content"].as_str())
        .collect();
    assert_eq!(json!(content), whole["content"]);
    assert_eq!(json!("abcde"), whole["content"]);
    assert_eq!(json!(joined("tokens")), whole["tokens"]);
    let probs = json!(joined("completion_probabilities"));
    assert_eq!(probs, whole["completion_probabilities"]);
    for piece in pieces {
        assert_eq!(
            keys(piece),
            [
                "completion_probabilities",
                "content",
                "id_slot",
                "index",
                "stop",
                "tokens",
                "tokens_evaluated",
                "tokens_predicted"
            ]
        );
        assert_eq!(piece["stop"], false);
    }
    assert_eq!(keys(end), COMPLETION_KEYS);
    let mut end = end.clone();
    for answer in [&mut end, &mut whole] {
        let map = answer.as_object_mut().expect("an object");
        for name in ["content", "tokens", "timings", "completion_probabilities"] {
            map.remove(name);
        }
        answer["generation_settings"]["stream"] = Value::Null;
    }
    assert_eq!(end, whole);
    assert_eq!(
        (&end["stop_type"], &end["stopping_word"]),
        (&json!("word"), &json!("fg"))
    );
}

#[test]
fn probabilities_name_their_tokens() {
    let server = TestServer::start(Alphabet::at_once());
    let body = json!({"prompt": "hi", "n_predict": 1, "seed": 0, "n_probs": 2});
    let whole = post(&server, "/completion", &body);
    let token = |id: u8, logprob: f64| json!({"id": id, "token": char::from(id), "bytes": [id], "logprob": logprob});
    let mut entry = token(b'a', -0.5);
    entry["top_logprobs"] = json!([token(b'a', -0.5), token(b'b', -1.5)]);
    assert_eq!(whole["completion_probabilities"], json!([entry]));
    assert_eq!(whole["tokens"], json!([]), "they were not asked for");
}

#[test]
fn several_prompts_and_choices_come_as_a_list() {
    let server = TestServer::start(Alphabet::at_once());
    let body = json!({"prompt": ["a", [98, "c"]], "n_predict": 1, "n_cmpl": 2, "seed": 0});
    let list = post(&server, "/completion", &body);
    let shown = |name: &str| -> Vec<Value> {
        let items = list.as_array().expect("a list").iter();
        items.map(|item| item[name].clone()).collect()
    };
    assert_eq!(shown("index"), [0, 1, 2, 3]);
    assert_eq!(shown("prompt"), ["a", "a", "bc", "bc"]);
    assert_eq!(shown("tokens_evaluated"), [1, 1, 2, 2]);
}

#[test]
fn fields_can_be_chosen_and_nothing_be_generated() {
    let server = TestServer::start(Alphabet::at_once());
    let body = json!({"prompt": "hi", "n_predict": 2, "seed": 0,
        "response_fields": ["content", "generation_settings/n_predict", "nothing"]});
    assert_eq!(
        post(&server, "/completion", &body),
        json!({"content": "ab", "generation_settings/n_predict": 2})
    );
    let empty = post(
        &server,
        "/completion",
        &json!({"prompt": "hi", "n_predict": 0}),
    );
    assert_eq!(
        (&empty["content"], &empty["tokens_predicted"]),
        (&json!(""), &json!(0))
    );
    let full = post(&server, "/completion", &json!({"prompt": "hi", "seed": 0}));
    assert_eq!(
        (&full["truncated"], &full["stop_type"]),
        (&json!(true), &json!("limit"))
    );
    assert_eq!(full["generation_settings"]["n_predict"], -1);
}

#[test]
fn errors_have_llama_servers_form() {
    let server = TestServer::start(Alphabet::at_once());
    let error = |answer: Answer| {
        let body = answer.json();
        assert_eq!(body["error"]["code"], answer.status, "{body}");
        let kind = body["error"]["type"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        (answer.status, kind)
    };
    for (path, body, status, kind) in [
        ("/completion", json!({}), 400, "invalid_request_error"),
        (
            "/completion",
            json!({"prompt": "x", "lora": [1]}),
            400,
            "invalid_request_error",
        ),
        (
            "/completion",
            json!({"prompt": "x".repeat(300)}),
            400,
            "exceed_context_size_error",
        ),
        (
            "/completion",
            json!({"prompt": "x", "model": "none"}),
            404,
            "not_found_error",
        ),
        (
            "/infill",
            json!({"input_prefix": "x"}),
            501,
            "not_supported_error",
        ),
        ("/lora-adapters", json!([]), 501, "not_supported_error"),
        (
            "/slots/0?action=save",
            json!({"filename": "x"}),
            501,
            "not_supported_error",
        ),
        (
            "/v1/rerank",
            json!({"query": "x"}),
            501,
            "not_supported_error",
        ),
        (
            "/tokenize",
            json!({"content": 5}),
            400,
            "invalid_request_error",
        ),
        (
            "/detokenize",
            json!({"tokens": [260]}),
            400,
            "invalid_request_error",
        ),
        ("/apply-template", json!({}), 400, "invalid_request_error"),
        (
            "/completion",
            json!({"prompt": "[img-1]", "image_data": [{"id": 1, "data": "aGk="}]}),
            400,
            "invalid_request_error",
        ),
    ] {
        let found = error(server.client().post(path, &body));
        assert_eq!(found, (status, kind.to_owned()), "{path} {body}");
    }
    let long = server
        .client()
        .post("/completion", &json!({"prompt": "x".repeat(300)}));
    let long = long.json();
    assert_eq!(
        (&long["error"]["n_prompt_tokens"], &long["error"]["n_ctx"]),
        (&json!(300), &json!(256))
    );
    assert_eq!(server.client().get("/lora-adapters").json(), json!([]));
    let broken = TestServer::start(Alphabet::broken());
    let body = json!({"prompt": "x", "stream": true});
    let found = error(broken.client().post("/completion", &body));
    assert_eq!(found, (500, "server_error".to_owned()));
}

#[test]
fn a_stream_that_breaks_ends_with_the_error() {
    let alphabet = Alphabet::stepped(1);
    let server = TestServer::start(alphabet.clone());
    let mut client = server.client();
    let body = json!({"prompt": "x", "stream": true, "timings_per_token": true});
    client.send("POST", "/completion", &[], &body.to_string());
    wait_for("the job", || alphabet.n_active() == 1);
    alphabet.step();
    client.read_head();
    let first = client.read_chunk().expect("a piece");
    let first = String::from_utf8(first).expect("UTF-8");
    let first: Value = serde_json::from_str(first.trim_start_matches("data: ")).expect("JSON");
    assert_eq!(keys(&first["timings"]), TIMINGS_KEYS);
    alphabet.fail_all();
    let last = String::from_utf8(client.read_chunk().expect("the error")).expect("UTF-8");
    assert!(last.contains("\"code\":500"), "{last}");
    assert_eq!(client.read_chunk(), None);
}

#[test]
fn texts_become_tokens_and_come_back() {
    let server = TestServer::start(Alphabet::at_once());
    let post = |path: &str, body: Value| post(&server, path, &body);
    assert_eq!(
        post("/tokenize", json!({"content": "hi"})),
        json!({"tokens": [104, 105]})
    );
    assert_eq!(post("/tokenize", json!({})), json!({"tokens": []}));
    assert_eq!(
        post("/tokenize", json!({"content": [1, "hi", 2]})),
        json!({"tokens": [1, 104, 105, 2]})
    );
    let body = json!({"content": "a<|im_end|>", "parse_special": false});
    assert_eq!(
        post("/tokenize", body)["tokens"].as_array().map(Vec::len),
        Some(11)
    );
    let body = json!({"content": "á<|im_end|>", "with_pieces": true});
    assert_eq!(
        post("/tokenize", body),
        json!({"tokens": [{"id": 195, "piece": [195]}, {"id": 161, "piece": [161]},
            {"id": 259, "piece": "<|im_end|>"}]})
    );
    assert_eq!(
        post("/detokenize", json!({"tokens": [104, 105, 259]})),
        json!({"content": "hi<|im_end|>"})
    );
    let body = json!({"messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(
        post("/apply-template", body),
        json!({"prompt": "user:hi;assistant:"})
    );
}

#[test]
fn properties_and_slots_tell_what_the_server_is() {
    let alphabet = Alphabet::stepped(2);
    let server = TestServer::start(alphabet.clone());
    let get = |path: &str| server.client().get(path).json();
    let props = get("/props?autoload=false");
    assert_eq!(props["default_generation_settings"]["n_ctx"], 256);
    let params = &props["default_generation_settings"]["params"];
    assert_eq!(keys(params), SETTINGS_KEYS);
    assert_eq!(
        (&params["n_predict"], &params["top_k"]),
        (&json!(-1), &json!(40))
    );
    assert_eq!(
        (&props["total_slots"], &props["model_alias"]),
        (&json!(2), &json!("test/model"))
    );
    assert_eq!(
        (&props["bos_token"], &props["eos_token"]),
        (&json!("<|bos|>"), &json!("<|eos|>"))
    );
    assert_eq!(props["modalities"]["vision"], false);
    assert!(
        props["chat_template"]
            .as_str()
            .is_some_and(|text| text.contains("m.role"))
    );
    assert_eq!(server.client().get("/props?model=none").status, 404);

    let idle = json!({"id": 0, "n_ctx": 256, "speculative": false, "is_processing": false});
    assert_eq!(get("/slots")[0], idle);
    let mut clients: Vec<_> = (0..2).map(|_| server.client()).collect();
    for client in &mut clients {
        let body = json!({"prompt": "x", "n_predict": 3}).to_string();
        client.send("POST", "/completion", &[], &body);
    }
    wait_for("both jobs", || alphabet.n_active() == 2);
    let slots = get("/slots");
    assert_eq!(slots[1]["is_processing"], true);
    assert_eq!(slots[1]["next_token"][0]["n_remain"], 3);
    assert!(slots[1]["id_task"].is_u64(), "{slots}");
    assert_ne!(slots[0]["id_task"], slots[1]["id_task"]);
    assert_eq!(props["media_marker"], "<__media__>");
    assert_eq!(server.client().get("/slots?fail_on_no_slot=1").status, 503);
    alphabet.run_out();
    for client in &mut clients {
        assert_eq!(client.read_answer().status, 200);
    }
    wait_for("free slots", || {
        server.client().get("/slots?fail_on_no_slot=1").status == 200
    });
    let meta = get("/v1/models")["data"][0]["meta"].clone();
    for name in [
        "vocab_type",
        "n_vocab",
        "n_ctx",
        "n_ctx_train",
        "n_embd",
        "n_params",
        "size",
    ] {
        assert!(meta[name].is_number(), "{name}");
    }
}

#[test]
fn a_chat_shows_times_when_asked() {
    let server = TestServer::start(Alphabet::at_once());
    let body = |stream: bool, timed: bool| {
        json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "seed": 0,
            "stream": stream, "timings_per_token": timed})
    };
    let chat = "/v1/chat/completions";
    let whole = post(&server, chat, &body(false, true));
    assert_eq!(keys(&whole["timings"]), TIMINGS_KEYS);
    assert_eq!(
        post(&server, chat, &body(false, false)).get("timings"),
        None
    );
    let answer = server.client().post(chat, &body(true, true));
    let mut events = answer.events();
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    let timings: Vec<Value> = events
        .iter()
        .map(|event| serde_json::from_str::<Value>(event).expect("JSON")["timings"].clone())
        .collect();
    assert_eq!(timings[0], Value::Null);
    let counts: Vec<&Value> = timings[1..].iter().map(|it| &it["predicted_n"]).collect();
    assert_eq!(counts, [&json!(1), &json!(2), &json!(2)]);
}

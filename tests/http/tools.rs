//! Tools and reasoning over HTTP: a runtime that writes what models of each family write, and the real
//! engine under a grammar.

use crate::TestServer;
use crate::client::{Answer, Client};
use crate::real_engine::serve_tiny;
use crate::shared::with;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::SystemTime;
use tinyloop::config::{Config, EngineConfig, ExecutorConfig};
use tinyloop::pool::{LoadedModel, ModelMeta, Pool, RuntimeWatch};
use tinyloop::request::{FinishReason, GenerationRequest};
use tinyloop::runtime::Runtime;
use tinyloop::runtime::fake::{self, FakeRuntime, Pace};
use tinyloop::scheduler::{Executor, ExecutorContext, Metrics};
use tinyloop::server::Server;
use tinyloop::tokenizer::{ChatTemplate, Grammars, Tokenizer};

const CHAT: &str = "/v1/chat/completions";
pub(crate) const HERMES: &str = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}\
    {{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\
    {{ c.function.arguments | tojson }}</tool_call>{% endfor %};{% endfor %}\
    {% if add_generation_prompt %}assistant:{% endif %}";
const PLAIN: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:";

/// A model with this template that answers every request with `text`.
pub(crate) fn serve(template: &str, text: &'static str) -> TestServer {
    let tokenizer = Arc::new(Tokenizer::bytes());
    let script = move |request: &GenerationRequest| {
        let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
        let n_tokens = tokens.len().min(request.max_tokens as usize);
        let reason = match n_tokens == tokens.len() {
            true => FinishReason::Stop,
            false => FinishReason::Length,
        };
        fake::answer(request, &tokens[..n_tokens], reason)
    };
    let vocabulary = Some(Arc::clone(&tokenizer));
    let runtime: Arc<dyn Runtime> = Arc::new(FakeRuntime::new(
        fake::capability(8),
        Pace::AtOnce,
        vocabulary,
        Box::new(script),
    ));
    let pool = Arc::new(Pool::new(Arc::new(Metrics::new())));
    let context = ExecutorContext::new("m", Arc::clone(pool.metrics()));
    let executor = Executor::with_context(vec![runtime], ExecutorConfig::default(), context);
    executor.start().expect("the driver starts");
    let executor = Arc::new(executor);
    let template = ChatTemplate::compile(template, "", "").expect("the template is valid");
    pool.insert(LoadedModel {
        name: "m".to_owned(),
        aliases: Vec::new(),
        created: SystemTime::now(),
        executor: Arc::clone(&executor),
        grammars: Some(Arc::new(Grammars::new(Arc::clone(&tokenizer)))),
        tokenizer: Some(tokenizer),
        chat_template: Ok(Arc::new(template)),
        context_length: 4096,
        meta: ModelMeta::default(),
        runtimes: RuntimeWatch::default(),
    })
    .expect("the name is free");
    let mut config = Config::default();
    config.server.port = 0;
    config.server.http_workers = 8;
    config.management.enabled = false;
    let server = Server::start(&config, pool).expect("the server starts");
    TestServer {
        address: server.address(),
        server: Some(server),
        executor,
    }
}

fn body(extra: Value) -> Value {
    let function = |name: &str| {
        json!({"type": "function", "function": {"name": name, "description": "d",
            "parameters": {"type": "object", "required": ["city"], "properties": {
                "city": {"enum": ["Graz", "Linz"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}}}})
    };
    with(
        json!({
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [function("weather"), function("add")],
        }),
        &extra,
    )
}

fn ok(client: &mut Client, body: &Value) -> Answer {
    let answer = client.post(CHAT, body);
    let text = String::from_utf8_lossy(&answer.body).into_owned();
    assert_eq!(answer.status, 200, "{body}: {text}");
    answer
}

/// The message and the reason of a whole answer, with ids taken out.
fn whole(client: &mut Client, body: &Value) -> (Value, Value) {
    let mut choice = ok(client, body).json()["choices"][0].take();
    let calls = choice.pointer_mut("/message/tool_calls");
    if let Some(calls) = calls.and_then(Value::as_array_mut) {
        assert!(!calls.is_empty());
        let mut ids: Vec<String> = Vec::new();
        for call in calls {
            let id = call.as_object_mut().and_then(|call| call.remove("id"));
            let id = id
                .and_then(|id| id.as_str().map(str::to_owned))
                .expect("an id");
            assert!(id.starts_with("call_") && !ids.contains(&id));
            ids.push(id);
        }
    }
    (choice["message"].take(), choice["finish_reason"].take())
}

/// The same from a stream, joined as clients join it.
fn streamed(client: &mut Client, body: &Value) -> (Value, Value) {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let answer = ok(client, &body);
    let events = answer.events();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    let (mut content, mut reasoning, mut finish) = (String::new(), String::new(), Value::Null);
    let mut calls: Vec<Value> = Vec::new();
    for event in &events[..events.len() - 1] {
        let mut chunk: Value = serde_json::from_str(event).expect("JSON");
        let choice = chunk["choices"][0].take();
        let delta: Map<String, Value> = choice["delta"].as_object().expect("a delta").clone();
        content.push_str(
            delta
                .get("content")
                .and_then(Value::as_str)
                .unwrap_or_default(),
        );
        let thought = delta.get("reasoning_content").and_then(Value::as_str);
        reasoning.push_str(thought.unwrap_or_default());
        for piece in delta
            .get("tool_calls")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            let index = piece["index"].as_u64().expect("an index") as usize;
            let fragment = piece["function"]["arguments"].as_str().expect("arguments");
            if index == calls.len() {
                assert!(piece["id"].as_str().expect("an id").starts_with("call_"));
                assert_eq!((&piece["type"], fragment), (&json!("function"), ""));
                let name = piece["function"]["name"].clone();
                calls
                    .push(json!({"type": "function", "function": {"name": name, "arguments": ""}}));
            } else {
                assert_eq!(
                    index + 1,
                    calls.len(),
                    "a call goes on before the next begins"
                );
                assert!(piece.get("id").is_none() && piece["function"].get("name").is_none());
                let joined = calls[index]["function"]["arguments"]
                    .as_str()
                    .unwrap_or_default();
                let joined = format!("{joined}{fragment}");
                calls[index]["function"]["arguments"] = json!(joined);
            }
        }
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
    }
    let content = match content.is_empty() && !calls.is_empty() {
        true => Value::Null,
        false => json!(content),
    };
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !reasoning.is_empty() {
        message["reasoning_content"] = json!(reasoning);
    }
    if !calls.is_empty() {
        message["tool_calls"] = json!(calls);
    }
    (message, finish)
}

fn called(content: Value, calls: &[(&str, &str)]) -> Value {
    let call = |(name, arguments): &(&str, &str)| json!({"type": "function", "function": {"name": name, "arguments": arguments}});
    let calls: Vec<Value> = calls.iter().map(call).collect();
    json!({"role": "assistant", "content": content, "refusal": null, "tool_calls": calls})
}

#[test]
fn case_19_calls_of_every_family_have_their_own_index() {
    let calls = [("weather", "{\"city\": \"Graz\"}"), ("add", "{}")];
    #[rustfmt::skip]
    let table = [
        (HERMES, Value::Null, "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Graz\"}}\n</tool_call>\n\
          <tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_call>"),
        (PLAIN, json!("Sure."), "Sure.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Graz\"}}\n</tool_call>\n\
          <tool_call>\n{\"name\": \"add\"}\n</tool_call>"),
        ("{# ipython <|start_header_id|> #}{{ messages[0].content }}", Value::Null,
         "{\"name\": \"weather\", \"parameters\": {\"city\": \"Graz\"}}; {\"name\": \"add\", \"parameters\": {}}"),
        ("{# [TOOL_CALLS] #}{{ messages[0].content }}", Value::Null,
         "[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {\"city\": \"Graz\"}}, {\"name\": \"add\", \"arguments\": {}}]"),
        ("{# [TOOL_CALLS] #}{{ messages[0].content }}", Value::Null,
         "[TOOL_CALLS]weather[ARGS]{\"city\": \"Graz\"}[TOOL_CALLS]add[ARGS]{}"),
        ("{# <|START_ACTION|> #}{{ messages[0].content }}", Value::Null,
         "<|START_ACTION|>[{\"tool_name\": \"weather\", \"parameters\": {\"city\": \"Graz\"}}, \
          {\"tool_name\": \"add\", \"parameters\": {}}]<|END_ACTION|>"),
        ("{# <｜tool▁calls▁begin｜> #}{{ messages[0].content }}", Value::Null,
         "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Graz\"}\n```<｜tool▁call▁end｜>\n\
          <｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ];
    for (template, content, text) in table {
        let server = serve(template, text);
        let mut client = server.client();
        let expected = (called(content, &calls), json!("tool_calls"));
        assert_eq!(whole(&mut client, &body(json!({}))), expected, "{text}");
        assert_eq!(streamed(&mut client, &body(json!({}))), expected, "{text}");
        // Without tools the same text is text.
        for extra in [json!({"tools": null}), json!({"tool_choice": "none"})] {
            let said = whole(&mut client, &body(extra));
            let message = json!({"role": "assistant", "content": text, "refusal": null});
            assert_eq!(said, (message, json!("stop")));
        }
    }
}

#[test]
fn a_cut_call_keeps_what_there_is() {
    let text = "<tool_call>{\"name\": \"add\", \"arguments\": {\"city\": \"Linz\"}}</tool_call>";
    let server = serve(HERMES, text);
    let mut client = server.client();
    let cut = called(Value::Null, &[("add", "{\"ci")]);
    for read in [whole, streamed] {
        let found = read(&mut client, &body(json!({"max_tokens": 44})));
        assert_eq!(found.1, "length");
        assert_eq!(found.0, cut);
    }
}

#[test]
fn thoughts_are_told_apart_and_counted() {
    let text = "<think>\nhm\n</think>\n\nYes.";
    let thinks = format!("{HERMES}{{# <think></think> #}}");
    let opens = format!(
        "{HERMES}{{% if enable_thinking is not defined or enable_thinking %}}<think>\n{{% endif %}}{{# </think> #}}"
    );
    let server = serve(&thinks, text);
    let mut client = server.client();
    let expected =
        json!({"role": "assistant", "content": "Yes.", "refusal": null, "reasoning_content": "hm"});
    for extra in [json!({}), json!({"tools": null})] {
        let expected = (expected.clone(), json!("stop"));
        assert_eq!(whole(&mut client, &body(extra.clone())), expected);
        assert_eq!(streamed(&mut client, &body(extra)), expected);
    }
    let usage = ok(&mut client, &body(json!({}))).json()["usage"].clone();
    // All between the opening mark and the end of the closing one: a byte is a token here.
    let n_thought = usage["completion_tokens_details"]["reasoning_tokens"].as_u64();
    assert_eq!(n_thought, Some("\nhm\n</think>".len() as u64));
    let kept = whole(&mut client, &body(json!({"reasoning_format": "none"})));
    assert_eq!(kept.0["content"], text);
    let refused = client.post(CHAT, &body(json!({"reasoning_format": "xml"})));
    assert_eq!(refused.json()["error"]["param"], "reasoning_format");
    drop(client);
    drop(server);

    let server = serve(&opens, "hm\n</think>\n\nYes.");
    let mut client = server.client();
    let found = whole(&mut client, &body(json!({})));
    assert_eq!(found.0, expected);
    for quiet in [
        json!({"enable_thinking": false}),
        json!({"reasoning_effort": "none"}),
        json!({"chat_template_kwargs": {"enable_thinking": false}, "reasoning_effort": "high"}),
    ] {
        let found = whole(&mut client, &body(quiet.clone()));
        assert_eq!(found.0["content"], "hm\n</think>\n\nYes.", "{quiet}");
    }
}

#[test]
fn log_probabilities_add_up_over_calls_and_thoughts() {
    let text = "<think>a</think>b <tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
    let server = serve(&format!("{HERMES}{{# <think> #}}"), text);
    let mut client = server.client();
    let asked = body(json!({"logprobs": true}));
    let all = ok(&mut client, &asked).json()["choices"][0]["logprobs"]["content"].clone();
    assert_eq!(all.as_array().map(Vec::len), Some(text.len()));
    let mut asked = asked;
    asked["stream"] = json!(true);
    let answer = ok(&mut client, &asked);
    let mut joined: Vec<Value> = Vec::new();
    for event in answer.events().iter().filter(|event| *event != "[DONE]") {
        let chunk: Value = serde_json::from_str(event).expect("JSON");
        let entries = chunk["choices"][0]["logprobs"]["content"]
            .as_array()
            .cloned();
        joined.extend(entries.into_iter().flatten());
    }
    assert_eq!(Value::from(joined), all);
}

#[test]
fn past_calls_and_results_reach_the_prompt() {
    let server = serve(HERMES, "ok");
    let history = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function",
            "function": {"name": "add", "arguments": "{\"city\":\"Graz\"}"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]);
    let mut client = server.client();
    let answer = ok(
        &mut client,
        &body(json!({"messages": history, "tools": null})),
    );
    let prompt =
        "user:hi;assistant:<tool_call>add{\"city\": \"Graz\"}</tool_call>;tool:3;assistant:";
    assert_eq!(answer.json()["usage"]["prompt_tokens"], prompt.len());
    for (bad, param) in [
        (
            json!({"messages": [{"role": "tool", "content": "3"}]}),
            "messages[0].tool_call_id",
        ),
        (
            json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}),
            "tools[0].function.name",
        ),
        (
            json!({"tool_choice": {"type": "function", "function": {"name": "nope"}}}),
            "tool_choice",
        ),
        (json!({"functions": [{"name": "f"}]}), "functions"),
    ] {
        let answer = client.post(CHAT, &body(bad));
        assert_eq!(
            (answer.status, &answer.json()["error"]["param"]),
            (400, &json!(param))
        );
    }
}

#[test]
fn a_schema_is_refused_where_it_is_enforced_only() {
    let server = serve_tiny(ExecutorConfig::default(), EngineConfig::default(), |_| {});
    let mut client = server.client();
    let tools = json!([
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {"a": {"type": "thing"}}}}},
    ]);
    ok(&mut client, &body(json!({"tools": tools, "max_tokens": 2})));
    let answer = client.post(
        CHAT,
        &body(json!({"tools": tools, "tool_choice": "required"})),
    );
    let error = answer.json()["error"].clone();
    assert_eq!(
        (answer.status, &error["code"]),
        (400, &json!("invalid_json_schema"))
    );
    assert_eq!(error["param"], "tools[1].function.parameters", "{error}");
}

fn sound(arguments: &str) {
    let value: Value =
        serde_json::from_str(arguments).unwrap_or_else(|e| panic!("{arguments}: {e}"));
    assert!(
        value["city"] == "Graz" || value["city"] == "Linz",
        "{value}"
    );
    let days = value
        .get("days")
        .map(|days| days.as_i64().expect("an integer"));
    assert!(days.is_none_or(|days| (1..=9).contains(&days)), "{value}");
    assert!(
        value.as_object().is_some_and(|map| map.len() <= 2),
        "{value}"
    );
}

/// Random weights: nothing but the grammar makes these calls sound.
#[test]
fn required_calls_are_sound_with_random_weights() {
    let server = serve_tiny(ExecutorConfig::default(), EngineConfig::default(), |_| {});
    let mut client = server.client();
    for seed in 0..6 {
        let extra = json!({"tool_choice": "required", "parallel_tool_calls": false, "seed": seed, "max_tokens": 300});
        let (message, finish) = whole(&mut client, &body(extra));
        assert_eq!(finish, "tool_calls", "{message}");
        assert_eq!(
            (
                &message["content"],
                message["tool_calls"].as_array().map(Vec::len)
            ),
            (&Value::Null, Some(1))
        );
        sound(
            message["tool_calls"][0]["function"]["arguments"]
                .as_str()
                .expect("text"),
        );
    }
    let named = json!({"type": "function", "function": {"name": "add"}});
    let extra = json!({"tool_choice": named, "seed": 3, "max_tokens": 300});
    let (message, finish) = streamed(&mut client, &body(extra));
    assert_eq!(
        (finish, &message["tool_calls"][0]["function"]["name"]),
        (json!("stop"), &json!("add"))
    );
    // The model decides, but what it calls is sound, and a form for the text holds beside tools.
    let mut tools = body(json!({}))["tools"].clone();
    tools[0]["function"]["strict"] = json!(true);
    let text = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}});
    for extra in [
        json!({"response_format": text}),
        json!({"tools": tools, "max_tokens": 12}),
    ] {
        let found = whole(&mut client, &body(extra.clone()));
        let content = found.0["content"].as_str().map(str::to_owned);
        let is_form = extra.get("response_format").is_none()
            || content
                .as_deref()
                .is_none_or(|text| text == "\"yes\"" || text == "\"no\"");
        assert!(is_form, "{found:?}");
    }
}

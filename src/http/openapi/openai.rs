//! The OpenAI routes: chat, completions, models.

use super::fields::{forms, joined, of_chats, steering};
use super::schema::{
    any_of, array, boolean, both, constant, integer, integer_in, list, nullable, number, number_in,
    object, one_of, reference, some_of, string,
};
use super::{Api, OF_MODELS, Operation};
use serde_json::{Value, json};

pub(super) fn describe(api: &mut Api) {
    requests(api);
    answers(api);
    models(api);
    embeddings(api);
    let chat = Operation::new("openai", "createChatCompletion", "Answer a conversation")
        .body("ChatRequest")
        .json(200, "ChatAnswer")
        .events("ChatChunk")
        .errors(OF_MODELS);
    let completion = Operation::new("openai", "createCompletion", "Continue texts")
        .body("CompletionRequest")
        .json(200, "CompletionAnswer")
        .events("CompletionAnswer")
        .errors(OF_MODELS);
    api.operation("POST", "/v1/chat/completions", &chat);
    api.operation("POST", "/v1/completions", &completion);
    let all = json!({"type": "string", "enum": ["true", "1", "false"]});
    let models = Operation::new("openai", "listModels", "The loaded models")
        .query("all", all, "every configured model, with its state")
        .json(200, "ModelList");
    let one = Operation::new("openai", "retrieveModel", "One loaded model")
        .json(200, "Model")
        .errors(&[404]);
    api.operation("GET", "/v1/models", &models);
    api.operation("GET", "/v1/models/{id}", &one);
}

/// Fields that every generating route of this server takes under the same name.
pub(super) fn common_fields() -> Value {
    json!({
        "model": string("a name of /v1/models; may be left out where there is one; `model@4` asks for 4 loops"),
        "stream": boolean("answer as server-sent events"),
        "temperature": number_in(0.0, 2.0, "0 = always the likeliest token"),
        "top_p": number_in(0.0, 1.0, "nucleus sampling"),
        "top_k": integer_in(-1, 4_294_967_295, "0 and -1 = all"),
        "min_p": number_in(0.0, 1.0, "least probability next to that of the likeliest"),
        "presence_penalty": number_in(-2.0, 2.0, "off at 0"),
        "frequency_penalty": number_in(-2.0, 2.0, "off at 0"),
        "repeat_penalty": number_in(0.01, 10.0, "off at 1; also as repetition_penalty"),
        "repeat_last_n": integer_in(-1, 4_294_967_295, "window of the repeat penalty; -1 = all"),
        "seed": json!({"type": "integer", "description": "the same seed, the same answer"}),
        "logit_bias": json!({"type": "object", "additionalProperties": number_in(-100.0, 100.0, "added to the logit")}),
        "stop": any_of(&[string("where it ends"), array(json!({"type": "string", "minLength": 1}))]),
        "stop_token_ids": array(integer("a token that ends it")),
        "ignore_eos": boolean("go on behind the end token"),
        "min_tokens": integer("no end before so many"),
        "response_format": json!({"type": "object", "description": "text, json_object or json_schema"}),
        "priority": integer_in(-100, 100, "higher sooner, within what the key allows"),
        "slo_ms": json!({"type": "integer", "minimum": 1, "description": "refuse where the predicted wait is longer"}),
        "slo_ttft_ms": json!({"type": "integer", "minimum": 1, "description": "the same to the first token"}),
        "queue_timeout_ms": json!({"type": "integer", "minimum": 1, "description": "longest wait in the queue"}),
        "cache_salt": string("prompts are reused only under the same"),
        "loops": json!({"type": "integer", "minimum": 1, "description": "depth of a looped model"}),
        "min_loops": json!({"type": "integer", "minimum": 1, "description": "fewest loops that are accepted under load"}),
        "cache_window": integer("attention window in tokens; 0 = full"),
    })
}

fn requests(api: &mut Api) {
    api.schema(
        "Generation",
        json!({"type": "object", "properties": joined([common_fields(), steering(), forms()])}),
    );
    let part = object(
        &["type", "text"],
        json!({"type": constant("text"), "text": string("what is said")}),
    );
    let message = object(
        &["role"],
        json!({
            "role": one_of(&["system", "developer", "user", "assistant", "tool"]),
            "content": any_of(&[string("what is said"), array(part), json!({"type": "null"})]),
            "name": string("of the speaker"),
            "tool_calls": array(json!({"type": "object"})),
            "tool_call_id": string("which call it answers"),
        }),
    );
    api.schema("Message", message);
    let own = json!({
            "messages": some_of(reference("Message")),
            "max_tokens": integer_in(-1, 4_294_967_295, "longest answer; -1 = what the context leaves"),
            "max_completion_tokens": integer_in(-1, 4_294_967_295, "the same, and stronger"),
            "n": integer_in(1, 128, "choices"),
            "logprobs": boolean("with log-probabilities"),
            "top_logprobs": integer_in(0, 20, "so many alternatives"),
            "tools": array(json!({"type": "object"})),
            "stream_options": object(&[], json!({"include_usage": boolean("a last chunk with usage")})),
    });
    let chat = object(&["messages"], joined([own, of_chats()]));
    api.schema("ChatRequest", both(reference("Generation"), chat));
    let prompt = any_of(&[
        string("a text"),
        some_of(string("a text")),
        some_of(integer("a token")),
        some_of(some_of(integer("a token"))),
    ]);
    let completion = object(
        &["prompt"],
        json!({
            "prompt": prompt,
            "max_tokens": integer_in(-1, 4_294_967_295, "16 where nothing is said; 0 scores the prompt"),
            "n": integer_in(1, 128, "choices per prompt"),
            "best_of": integer_in(1, 128, "candidates per prompt"),
            "echo": boolean("the prompt before the answer"),
            "logprobs": integer_in(0, 20, "so many alternatives"),
            "stream_options": object(&[], json!({"include_usage": boolean("a last chunk with usage")})),
        }),
    );
    api.schema(
        "CompletionRequest",
        both(reference("Generation"), completion),
    );
}

/// What answers and chunks have in common.
fn frame(object_name: &str, choice: Value, has_usage: bool) -> Value {
    let usage = nullable(reference("Usage"));
    let mut required = vec!["id", "object", "created", "model", "choices"];
    required.extend(has_usage.then_some("usage"));
    object(
        &required,
        json!({
            "id": string("of the answer; also its name for the cancel route"),
            "object": constant(object_name),
            "created": integer("unix seconds"),
            "model": string("who answers"),
            "system_fingerprint": string("changes when the answers of a seed may change"),
            "choices": array(choice),
            "usage": usage,
        }),
    )
}

fn usage(api: &mut Api) {
    let loops = object(
        &["asked", "granted", "used_mean"],
        json!({
            "asked": integer("loops"), "granted": integer("loops"), "used_mean": nullable(number("loops")),
        }),
    );
    let usage = object(
        &["prompt_tokens", "completion_tokens", "total_tokens"],
        json!({
            "prompt_tokens": integer("each prompt once"),
            "completion_tokens": integer("of all choices"),
            "total_tokens": integer("both"),
            "prompt_tokens_details": object(&["cached_tokens"], json!({"cached_tokens": integer("reused")})),
            "completion_tokens_details":
                object(&["reasoning_tokens"], json!({"reasoning_tokens": integer("thought")})),
            "loops": loops,
        }),
    );
    api.schema("Usage", usage);
}

fn answers(api: &mut Api) {
    usage(api);
    let finish = nullable(one_of(&["stop", "length", "tool_calls", "cancelled"]));
    let token = json!({
        "token": string("its text"), "logprob": number("natural log"), "bytes": nullable(array(integer("a byte"))),
    });
    let mut scored = object(
        &["token", "logprob", "bytes", "top_logprobs"],
        token.clone(),
    );
    scored["properties"]["top_logprobs"] = array(object(&["token", "logprob", "bytes"], token));
    let logprobs = nullable(object(
        &["content"],
        json!({"content": nullable(array(scored))}),
    ));
    let call = object(
        &["function"],
        json!({
            "index": integer("which call of the choice"), "id": string("of the call"), "type": constant("function"),
            "function": object(&["arguments"], json!({
                "name": string("which function"), "arguments": string("JSON text"),
            })),
        }),
    );
    let said = json!({
        "role": constant("assistant"),
        "content": nullable(string("what is said")),
        "refusal": json!({"type": "null"}),
        "reasoning_content": string("what it thought before"),
        "tool_calls": array(call),
    });
    let choice = |key: &str, said: Value| {
        let properties = json!({
            "index": integer("of the choice"), key: said, "logprobs": logprobs, "finish_reason": finish,
        });
        object(&["index", key, "logprobs", "finish_reason"], properties)
    };
    let message = choice("message", object(&["role", "content"], said.clone()));
    api.schema("ChatAnswer", frame("chat.completion", message, true));
    let delta = choice("delta", object(&[], said));
    api.schema("ChatChunk", frame("chat.completion.chunk", delta, false));
    let logprobs = object(
        &["tokens", "token_logprobs", "top_logprobs", "text_offset"],
        json!({
            "tokens": array(string("a token")),
            "token_logprobs": array(nullable(number("natural log"))),
            "top_logprobs": array(nullable(json!({"type": "object"}))),
            "text_offset": array(integer("in characters")),
        }),
    );
    let text = object(
        &["index", "text", "logprobs", "finish_reason"],
        json!({
            "index": integer("of the choice"), "text": string("what comes next"),
            "logprobs": nullable(logprobs), "finish_reason": finish,
        }),
    );
    api.schema("CompletionAnswer", frame("text_completion", text, false));
}

fn embeddings(api: &mut Api) {
    let input = any_of(&[
        string("a text"),
        some_of(string("a text")),
        some_of(integer("a token")),
        some_of(some_of(integer("a token"))),
    ]);
    let request = object(
        &["input"],
        json!({
            "model": string("a name of /v1/models; may be left out where there is one"),
            "input": input,
            "encoding_format": one_of(&["float", "base64"]),
            "dimensions": integer_in(1, 1_000_000, "so many coordinates of each vector"),
        }),
    );
    api.schema("EmbeddingRequest", request);
    let item = object(
        &["object", "index", "embedding"],
        json!({
            "object": constant("embedding"), "index": integer("of the input"),
            "embedding": any_of(&[array(number("a coordinate")), string("f32, little-endian, in base64")]),
        }),
    );
    let usage = object(
        &["prompt_tokens", "total_tokens"],
        json!({"prompt_tokens": integer("of all inputs"), "total_tokens": integer("the same")}),
    );
    let answer = object(
        &["object", "data", "model", "usage"],
        json!({
            "object": constant("list"), "data": array(item), "model": string("who answers"), "usage": usage,
        }),
    );
    api.schema("EmbeddingList", answer);
    let operation = Operation::new("openai", "createEmbedding", "Texts as vectors")
        .body("EmbeddingRequest")
        .json(200, "EmbeddingList")
        .errors(OF_MODELS);
    api.operation("POST", "/v1/embeddings", &operation);
}

fn models(api: &mut Api) {
    let model = object(
        &["id", "object", "created", "owned_by"],
        json!({
            "id": string("what requests name"),
            "object": constant("model"),
            "created": integer("unix seconds"),
            "owned_by": string("tinyloop"),
            "max_model_len": integer("tokens of prompt and answer"),
            "capabilities": array(string("a word")),
            "aliases": array(string("another name")),
            "meta": json!({"type": "object"}),
            "status": object(&["value"], json!({"value": string("the state"), "error": string("why it failed")})),
            "load_on_demand": boolean("a request loads it"),
        }),
    );
    api.schema("Model", model);
    api.schema("ModelList", list(reference("Model")));
}

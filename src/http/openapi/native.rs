//! The native routes: generate, tokenize, prefixes, snapshot.

use super::schema::{
    any_of, array, boolean, both, closed, constant, integer, integer_in, nullable, number, object,
    one_of, reference, some_of, string,
};
use super::{Api, OF_MODELS, Operation};
use serde_json::{Value, json};

pub(super) fn describe(api: &mut Api) {
    generate(api);
    tokens(api);
    prefixes(api);
}

fn generate(api: &mut Api) {
    let prompt = json!({
        "prompt": string("a text"),
        "tokens": some_of(integer("a token")),
        "messages": some_of(reference("Message")),
        "mode": one_of(&["generate", "score"]),
        "max_tokens": integer("longest answer"),
        "logprobs": integer_in(0, 20, "so many alternatives"),
        "score_from": integer("tokens before this one are not scored"),
        "return_tokens": boolean("token ids too"),
    });
    let request = both(
        reference("Generation"),
        json!({"type": "object", "properties": prompt}),
    );
    api.schema("NativeRequest", request);
    answers(api);
    let operation = Operation::new("native", "generate", "Continue a prompt, or score it")
        .body("NativeRequest")
        .json(200, "NativeAnswer")
        .events("NativeEvent")
        .errors(OF_MODELS);
    api.operation("POST", "/v1/native/generate", &operation);
}

/// Parts of answers.
fn parts(api: &mut Api) {
    let entry = object(
        &["token", "text", "bytes", "logprob"],
        json!({
            "token": integer("its id"), "text": string("its text"), "bytes": array(integer("a byte")),
            "logprob": nullable(number("natural log")),
            "top": array(object(&["token", "text", "logprob"], json!({
                "token": integer("its id"), "text": string("its text"), "logprob": number("natural log"),
            }))),
        }),
    );
    api.schema("NativeToken", entry);
    let ms = || nullable(number("milliseconds"));
    let timings = object(
        &["queue_ms", "ttft_ms", "total_ms"],
        json!({"queue_ms": ms(), "ttft_ms": ms(), "total_ms": ms()}),
    );
    api.schema("NativeTimings", timings);
}

fn answers(api: &mut Api) {
    parts(api);
    let frame = |object_name: &str| {
        json!({
            "id": string("24 hexadecimal characters"), "object": constant(object_name),
            "created": integer("unix seconds"), "model": string("who answers"),
            "system_fingerprint": string("changes when the answers of a seed may change"),
            "usage": nullable(reference("Usage")), "timings": nullable(reference("NativeTimings")),
            "logprobs": array(reference("NativeToken")),
        })
    };
    let with = |mut frame: Value, more: Value| {
        if let (Some(frame), Value::Object(more)) = (frame.as_object_mut(), more) {
            frame.extend(more);
        }
        frame
    };
    let framed = ["id", "object", "created", "model", "usage", "timings"];
    let required = |more: &[&'static str]| [&framed, more].concat();
    let generation = json!({
        "text": string("up to a stop string"), "tokens": array(integer("a token")),
        "finish_reason": one_of(&["stop", "length", "cancelled"]),
    });
    let whole = with(frame("native.generation"), generation.clone());
    let whole = object(&required(&["text", "finish_reason"]), whole);
    let score = json!({
        "perplexity": nullable(number("e to the negated mean")), "mean_logprob": number("natural log"),
        "n_scored": integer("tokens that count"),
    });
    let score = with(frame("native.score"), score);
    let score = object(
        &required(&["perplexity", "mean_logprob", "n_scored", "logprobs"]),
        score,
    );
    api.schema("NativeAnswer", any_of(&[whole, score]));
    let piece = json!({
        "type": constant("piece"), "text": string("what comes next"), "tokens": array(integer("a token")),
        "logprobs": array(reference("NativeToken")),
    });
    let end = with(frame("native.generation"), generation);
    let end = with(end, json!({"type": constant("end")}));
    let events = [
        object(&["type", "text"], piece),
        object(&required(&["type", "finish_reason"]), end),
        reference("Error"),
    ];
    api.schema("NativeEvent", any_of(&events));
}

fn tokens(api: &mut Api) {
    let request = closed(
        &[],
        json!({
            "model": string("a name of /v1/models"),
            "text": string("what becomes tokens"),
            "messages": some_of(reference("Message")),
            "add_generation_prompt": boolean("the opening of an answer"),
            "continue_final_message": boolean("the last message goes on"),
            "chat_template_kwargs": json!({"type": "object"}),
            "reasoning_effort": string("for the template"),
            "add_special": boolean("what the model begins with"),
            "parse_special": boolean("names of control tokens become them"),
            "with_pieces": boolean("each token's text"),
        }),
    );
    api.schema("TokenizeRequest", request);
    let piece = object(
        &["token", "text", "bytes", "special"],
        json!({
            "token": integer("its id"), "text": string("its text"), "bytes": array(integer("a byte")),
            "special": boolean("not shown in answers"),
        }),
    );
    let answer = object(
        &["model", "count", "context_length", "tokens"],
        json!({
            "model": string("whose vocabulary"), "count": integer("tokens"),
            "context_length": integer("tokens"), "tokens": array(integer("a token")), "pieces": array(piece),
        }),
    );
    api.schema("Tokenized", answer);
    let request = closed(
        &["tokens"],
        json!({
            "model": string("a name of /v1/models"), "tokens": array(integer("a token")),
            "skip_special": boolean("leave control tokens out"),
        }),
    );
    api.schema("DetokenizeRequest", request);
    let answer = object(
        &["model", "text", "lossy"],
        json!({
            "model": string("whose vocabulary"), "text": string("of the tokens"),
            "lossy": boolean("something was not UTF-8"), "bytes": array(integer("a byte")),
        }),
    );
    api.schema("Detokenized", answer);
    let tokenize = Operation::new("native", "tokenize", "Text or messages to tokens")
        .body("TokenizeRequest")
        .json(200, "Tokenized")
        .errors(OF_MODELS);
    let detokenize = Operation::new("native", "detokenize", "Tokens to text")
        .body("DetokenizeRequest")
        .json(200, "Detokenized")
        .errors(OF_MODELS);
    api.operation("POST", "/v1/native/tokenize", &tokenize);
    api.operation("POST", "/v1/native/detokenize", &detokenize);
}

fn prefixes(api: &mut Api) {
    let prefix = object(
        &[
            "id",
            "object",
            "model",
            "cached_tokens",
            "loops",
            "cache_window",
            "hits",
        ],
        json!({
            "id": string("32 hexadecimal characters"), "object": constant("prefix"), "model": string("whose"),
            "cached_tokens": integer("kept"), "loops": integer("depth"), "cache_window": integer("tokens"),
            "hits": integer("requests that began with it"), "tokens": integer("given"),
        }),
    );
    api.schema("Prefix", prefix);
    let prefixes = object(
        &["object", "entries", "total_cached_tokens", "hits", "data"],
        json!({
            "object": constant("list"), "entries": integer("prefixes"), "total_cached_tokens": integer("kept"),
            "hits": integer("of all"), "data": array(reference("Prefix")),
        }),
    );
    api.schema("PrefixList", prefixes);
    let request = object(
        &[],
        json!({
            "model": string("a name of /v1/models"), "text": string("a text"),
            "tokens": some_of(integer("a token")), "messages": some_of(reference("Message")),
            "loops": integer_in(1, 4_294_967_295, "depth"), "cache_window": integer("tokens"),
            "cache_salt": string("prompts are reused only under the same"),
        }),
    );
    api.schema("PrefixRequest", request);
    let deleted = object(
        &["id", "object", "deleted"],
        json!({"id": string("which"), "object": constant("prefix"), "deleted": json!({"const": true})}),
    );
    api.schema("PrefixDeleted", deleted);
    let all_deleted = object(
        &["object", "deleted"],
        json!({"object": constant("list"), "deleted": integer("so many")}),
    );
    api.schema("PrefixesDeleted", all_deleted);
    let path = "/v1/native/prefixes";
    let register = Operation::new("native", "registerPrefix", "Keep a beginning computed")
        .body("PrefixRequest")
        .json(200, "Prefix")
        .errors(OF_MODELS);
    api.operation("POST", path, &register);
    let list = Operation::new("native", "listPrefixes", "Your registered prefixes");
    api.operation("GET", path, &list.json(200, "PrefixList"));
    let remove = Operation::new("native", "removePrefixes", "Remove all of yours");
    api.operation("DELETE", path, &remove.json(200, "PrefixesDeleted"));
    let remove = Operation::new("native", "removePrefix", "Remove one of yours")
        .json(200, "PrefixDeleted")
        .errors(&[404]);
    api.operation("DELETE", "/v1/native/prefixes/{id}", &remove);
}

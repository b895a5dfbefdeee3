//! Anthropic's Messages API.

use super::schema::{
    any_of, array, boolean, constant, integer, integer_in, nullable, number_in, object, one_of,
    reference, some_of, string,
};
use super::{Api, OF_MODELS, Operation};
use serde_json::json;

/// This dialect's status for load.
const OVERLOADED: u16 = 529;

pub(super) fn describe(api: &mut Api) {
    request(api);
    answer(api);
    events(api);
    let messages = Operation::new("anthropic", "createMessage", "Answer a conversation")
        .body("MessageRequest")
        .json(200, "AnthropicMessage")
        .events("MessageEvent")
        .errors(OF_MODELS)
        .errors(&[OVERLOADED])
        .error_schema("AnthropicError");
    let count = Operation::new("anthropic", "countTokens", "What a request would cost")
        .body("CountRequest")
        .json(200, "CountedTokens")
        .errors(OF_MODELS)
        .errors(&[OVERLOADED])
        .error_schema("AnthropicError");
    api.operation("POST", "/v1/messages", &messages);
    api.operation("POST", "/v1/messages/count_tokens", &count);
}

fn request(api: &mut Api) {
    let block = object(
        &["type", "text"],
        json!({"type": constant("text"), "text": string("what is said")}),
    );
    let message = object(
        &["role", "content"],
        json!({
            "role": one_of(&["user", "assistant"]),
            "content": any_of(&[string("what is said"), some_of(block.clone())]),
        }),
    );
    let properties = json!({
        "model": string("a name of /v1/models"), "messages": some_of(message),
        "system": any_of(&[string("for the model"), some_of(block)]),
        "max_tokens": integer_in(1, 4_294_967_295, "longest answer"),
        "stop_sequences": array(string("where it ends")), "stream": boolean("answer as server-sent events"),
        "temperature": number_in(0.0, 1.0, "0 = always the likeliest token"),
        "top_p": number_in(0.0, 1.0, "nucleus sampling"), "top_k": integer("0 = all"),
        "tools": array(json!({"type": "object"})), "metadata": json!({"type": "object"}),
    });
    let required = ["messages", "max_tokens"];
    api.schema("MessageRequest", object(&required, properties.clone()));
    api.schema("CountRequest", object(&["messages"], properties));
}

fn answer(api: &mut Api) {
    let block = object(
        &["type"],
        json!({
            "type": one_of(&["text", "thinking", "tool_use"]), "text": string("what is said"),
            "thinking": string("what it thought"), "signature": string("of the thought"),
            "id": string("of the call"), "name": string("which tool"), "input": json!({"type": "object"}),
        }),
    );
    let reasons = ["end_turn", "max_tokens", "stop_sequence", "tool_use"];
    let end = json!({
        "stop_reason": nullable(one_of(&reasons)), "stop_sequence": nullable(string("which")),
    });
    let usage = object(
        &["input_tokens", "output_tokens"],
        json!({
            "input_tokens": integer("without those from the cache"), "output_tokens": integer("generated"),
            "cache_creation_input_tokens": integer("0"), "cache_read_input_tokens": integer("reused"),
        }),
    );
    let mut message = object(
        &[
            "id",
            "type",
            "role",
            "model",
            "content",
            "stop_reason",
            "stop_sequence",
            "usage",
        ],
        json!({
            "id": string("msg_.."), "type": constant("message"), "role": constant("assistant"),
            "model": string("who answers"), "content": array(block.clone()), "usage": usage,
        }),
    );
    for (name, schema) in end.as_object().into_iter().flatten() {
        message["properties"][name] = schema.clone();
    }
    api.schema("AnthropicMessage", message);
    api.schema("AnthropicBlock", block);
    api.schema("AnthropicEnd", object(&["stop_reason"], end));
    api.schema("AnthropicUsage", usage);
    let counted = json!({"input_tokens": integer("tokens")});
    api.schema("CountedTokens", object(&["input_tokens"], counted));
    let error = json!({"type": string("the kind"), "message": string("a sentence for people")});
    let error = json!({"type": constant("error"), "error": object(&["type", "message"], error)});
    api.schema("AnthropicError", object(&["type", "error"], error));
}

fn events(api: &mut Api) {
    let event = |name: &str, required: &[&str], mut properties: serde_json::Value| {
        properties["type"] = constant(name);
        object(&[&["type"], required].concat(), properties)
    };
    let index = || integer("of the block");
    let delta = object(&["type"], json!({"type": string("what is added")}));
    let events = [
        event(
            "message_start",
            &["message"],
            json!({"message": reference("AnthropicMessage")}),
        ),
        event(
            "content_block_start",
            &["index", "content_block"],
            json!({"index": index(), "content_block": reference("AnthropicBlock")}),
        ),
        event(
            "content_block_delta",
            &["index", "delta"],
            json!({"index": index(), "delta": delta}),
        ),
        event("content_block_stop", &["index"], json!({"index": index()})),
        event(
            "message_delta",
            &["delta", "usage"],
            json!({"delta": reference("AnthropicEnd"), "usage": reference("AnthropicUsage")}),
        ),
        event("message_stop", &[], json!({})),
        event("ping", &[], json!({})),
        reference("AnthropicError"),
    ];
    api.schema("MessageEvent", any_of(&events));
}

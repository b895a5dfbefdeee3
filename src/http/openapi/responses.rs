//! The Responses API.

use super::schema::{
    any_of, array, boolean, both, constant, integer, integer_in, list, nullable, number, number_in,
    object, one_of, reference, some_of, string,
};
use super::{Api, OF_MODELS, Operation};
use serde_json::{Value, json};

/// `type`s of the events that carry the response, and of the others.
const OF_RESPONSES: &[&str] = &[
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
    "response.cancelled",
];
const OF_PARTS: &[&str] = &[
    "response.output_item.added",
    "response.output_item.done",
    "response.content_part.added",
    "response.content_part.done",
    "response.output_text.delta",
    "response.output_text.done",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
];

pub(super) fn describe(api: &mut Api) {
    request(api);
    response(api);
    events(api);
    let new = |id, summary| Operation::new("responses", id, summary);
    let create = new("createResponse", "Answer an input")
        .body("ResponseRequest")
        .json(200, "Response")
        .events("ResponseEvent")
        .errors(OF_MODELS);
    api.operation("POST", "/v1/responses", &create);
    let count = new("countResponseTokens", "What a request would cost")
        .body("ResponseRequest")
        .json(200, "InputTokens")
        .errors(OF_MODELS);
    api.operation("POST", "/v1/responses/input_tokens", &count);
    let get = new("getResponse", "A kept response")
        .query("stream", one_of(&["true", "1", "false"]), "not built: 400")
        .json(200, "Response")
        .errors(&[404]);
    api.operation("GET", "/v1/responses/{id}", &get);
    let delete = new("deleteResponse", "Forget a response")
        .json(200, "ResponseDeleted")
        .errors(&[404]);
    api.operation("DELETE", "/v1/responses/{id}", &delete);
    let cancel = new(
        "cancelResponse",
        "Only background responses, of which there are none",
    );
    let cancel = cancel.errors(&[404]);
    api.operation("POST", "/v1/responses/{id}/cancel", &cancel);
    let items = new("listInputItems", "What a response answered")
        .query(
            "limit",
            integer_in(1, 100, "items of a page"),
            "20 unless said",
        )
        .query(
            "order",
            one_of(&["asc", "desc"]),
            "newest first unless said",
        )
        .query("after", string("the last one of the page before"), "an id")
        .json(200, "InputItems")
        .errors(&[404]);
    api.operation("GET", "/v1/responses/{id}/input_items", &items);
}

fn request(api: &mut Api) {
    let part = object(
        &["type", "text"],
        json!({"type": one_of(&["input_text", "output_text"]), "text": string("what is said")}),
    );
    let item = object(
        &["role", "content"],
        json!({
            "type": constant("message"),
            "role": one_of(&["user", "assistant", "system", "developer"]),
            "content": any_of(&[string("what is said"), some_of(part)]),
        }),
    );
    let request = object(
        &["input"],
        json!({
            "model": string("a name of /v1/models; may be left out where there is one"),
            "input": any_of(&[string("a text"), some_of(item)]),
            "instructions": string("for the model"),
            "max_output_tokens": integer_in(1, 4_294_967_295, "longest answer"),
            "stream": boolean("answer as server-sent events"),
            "store": boolean("keep it for a later previous_response_id"),
            "previous_response_id": string("what this goes on from"),
            "temperature": number_in(0.0, 2.0, "0 = always the likeliest token"),
            "top_p": number_in(0.0, 1.0, "nucleus sampling"),
            "top_logprobs": integer_in(0, 20, "so many alternatives"),
            "tools": array(json!({"type": "object"})),
            "text": json!({"type": "object", "description": "the form of the answer"}),
            "reasoning": json!({"type": "object", "description": "effort"}),
            "metadata": json!({"type": "object", "additionalProperties": string("yours")}),
        }),
    );
    api.schema("ResponseRequest", request);
}

const STATUSES: &[&str] = &[
    "in_progress",
    "completed",
    "incomplete",
    "failed",
    "cancelled",
];

fn items(api: &mut Api) {
    let content = object(
        &["type", "text"],
        json!({
            "type": one_of(&["output_text", "reasoning_text"]), "text": string("what is said"),
            "annotations": array(json!({"type": "object"})), "logprobs": array(json!({"type": "object"})),
        }),
    );
    api.schema("ResponsePart", content);
    let item = object(
        &["type", "id", "status"],
        json!({
            "type": one_of(&["message", "function_call", "reasoning"]), "id": string("of the item"),
            "status": one_of(STATUSES), "role": constant("assistant"), "content": array(reference("ResponsePart")),
            "call_id": string("of the call"), "name": string("which function"), "arguments": string("JSON text"),
            "summary": array(json!({"type": "object"})),
        }),
    );
    api.schema("ResponseItem", item);
}

fn response(api: &mut Api) {
    items(api);
    pages(api);
    let usage = object(
        &[
            "input_tokens",
            "input_tokens_details",
            "output_tokens",
            "output_tokens_details",
            "total_tokens",
        ],
        json!({
            "input_tokens": integer("of the prompt"), "output_tokens": integer("generated"),
            "total_tokens": integer("both"),
            "input_tokens_details": object(&["cached_tokens"], json!({"cached_tokens": integer("reused")})),
            "output_tokens_details":
                object(&["reasoning_tokens"], json!({"reasoning_tokens": integer("thought")})),
        }),
    );
    let error = object(
        &["code", "message"],
        json!({"code": string("the closest of the API's"), "message": string("for people")}),
    );
    let response = object(
        &[
            "id",
            "object",
            "created_at",
            "status",
            "model",
            "output",
            "usage",
            "error",
            "incomplete_details",
        ],
        json!({
            "id": string("resp_.."), "object": constant("response"), "created_at": integer("unix seconds"),
            "status": one_of(STATUSES), "model": string("who answers"), "output": array(reference("ResponseItem")),
            "usage": nullable(usage), "error": nullable(error),
            "incomplete_details": nullable(object(&["reason"], json!({"reason": string("what was missing")}))),
            "completed_at": nullable(integer("unix seconds")), "store": boolean("kept"),
            "instructions": nullable(string("as asked")), "temperature": nullable(number("as asked")),
            "top_p": nullable(number("as asked")), "previous_response_id": nullable(string("as asked")),
            "metadata": json!({"type": "object"}), "tools": array(json!({"type": "object"})),
        }),
    );
    api.schema("Response", response);
}

fn pages(api: &mut Api) {
    let deleted =
        json!({"id": string("which"), "object": constant("response"), "deleted": {"const": true}});
    api.schema(
        "ResponseDeleted",
        object(&["id", "object", "deleted"], deleted),
    );
    let counted =
        json!({"object": constant("response.input_tokens"), "input_tokens": integer("tokens")});
    api.schema("InputTokens", object(&["object", "input_tokens"], counted));
    let page = object(
        &["first_id", "last_id", "has_more"],
        json!({
            "first_id": nullable(string("an id")), "last_id": nullable(string("an id")),
            "has_more": boolean("another page"),
        }),
    );
    api.schema("InputItems", both(list(json!({"type": "object"})), page));
}

fn events(api: &mut Api) {
    let number = || integer("counts the events of a stream from 0");
    let event = |names: &[&str], required: &[&str], properties: Value| {
        let mut event = object(
            &[&["type", "sequence_number"], required].concat(),
            properties,
        );
        event["properties"]["type"] = one_of(names);
        event["properties"]["sequence_number"] = number();
        event
    };
    let part = json!({
        "output_index": integer("of the item"), "item_id": string("of the item"),
        "content_index": integer("of the part"), "item": reference("ResponseItem"),
        "part": reference("ResponsePart"), "delta": string("what comes next"), "text": string("all of it"),
        "arguments": string("JSON text"),
    });
    let events = [
        event(
            OF_RESPONSES,
            &["response"],
            json!({"response": reference("Response")}),
        ),
        event(OF_PARTS, &["output_index"], part),
        event(
            &["error"],
            &["message"],
            json!({"message": string("what went wrong")}),
        ),
    ];
    api.schema("ResponseEvent", any_of(&events));
}

//! LM Studio's REST APIs.

use super::schema::{
    any_of, array, boolean, both, constant, integer, integer_in, list, nullable, number, number_in,
    object, one_of, reference, some_of, string,
};
use super::{Api, OF_MODELS, Operation};
use serde_json::json;

pub(super) fn describe(api: &mut Api) {
    older(api);
    lists(api);
    chat(api);
    lifecycle(api);
}

fn older(api: &mut Api) {
    let figures = object(
        &["stats", "model_info", "runtime"],
        json!({
            "stats": object(&["stop_reason"], json!({
                "stop_reason": string("why it ended"), "tokens_per_second": number("of the answer"),
                "time_to_first_token": number("seconds"), "generation_time": number("seconds"),
            })),
            "model_info": json!({"type": "object"}), "runtime": json!({"type": "object"}),
        }),
    );
    for (name, answer) in [("LmChatAnswer", "ChatAnswer"), ("LmCompletionAnswer", "CompletionAnswer")] {
        api.schema(name, both(reference(answer), figures.clone()));
    }
    let new = |id, summary| Operation::new("lmstudio", id, summary).errors(OF_MODELS);
    let chat = new("lmStudioChatCompletion", "OpenAI's chat with figures")
        .body("ChatRequest")
        .json(200, "LmChatAnswer")
        .events("ChatChunk");
    api.operation("POST", "/api/v0/chat/completions", &chat);
    let completion = new("lmStudioCompletion", "OpenAI's completions with figures")
        .body("CompletionRequest")
        .json(200, "LmCompletionAnswer")
        .events("CompletionAnswer");
    api.operation("POST", "/api/v0/completions", &completion);
    let embeddings = new("lmStudioEmbeddings", "OpenAI's embeddings");
    let embeddings = embeddings.body("EmbeddingRequest");
    let embeddings = embeddings.json(200, "EmbeddingList");
    api.operation("POST", "/api/v0/embeddings", &embeddings);
}

fn lists(api: &mut Api) {
    let model = object(
        &["id", "object", "type", "publisher", "arch", "compatibility_type", "quantization", "state", "max_context_length"],
        json!({
            "id": string("its name"), "object": constant("model"), "type": one_of(&["llm", "vlm", "embeddings"]),
            "publisher": string("whose"), "arch": string("of the model"), "compatibility_type": string("of the file"),
            "quantization": string("of the file"), "state": one_of(&["loaded", "not-loaded"]),
            "max_context_length": integer("tokens"), "loaded_context_length": integer("tokens"),
            "capabilities": array(string("a word")),
        }),
    );
    api.schema("LmModel", model);
    api.schema("LmModels", list(reference("LmModel")));
    let model = object(
        &["type", "publisher", "key", "display_name", "size_bytes", "loaded_instances", "max_context_length"],
        json!({
            "type": one_of(&["llm", "embedding"]), "publisher": string("whose"), "key": string("its name"),
            "display_name": string("for people"), "architecture": nullable(string("of the model")),
            "quantization": nullable(json!({"type": "object"})), "size_bytes": integer("of the file"),
            "params_string": nullable(string("7B")), "max_context_length": integer("tokens"),
            "loaded_instances": array(object(&["id"], json!({"id": string("its name")}))),
            "format": nullable(string("of the file")), "capabilities": json!({"type": "object"}),
            "description": nullable(string("for people")),
        }),
    );
    api.schema("LmModelsV1", object(&["models"], json!({"models": array(model)})));
    let new = |id, summary| Operation::new("lmstudio", id, summary);
    let models = new("lmStudioModels", "Every configured model");
    api.operation("GET", "/api/v0/models", &models.json(200, "LmModels"));
    let one = new("lmStudioModel", "One configured model").json(200, "LmModel");
    api.operation("GET", "/api/v0/models/{id}", &one.errors(&[404]));
    let models = new("lmStudioModelsV1", "Every configured model").error_schema("LmError");
    api.operation("GET", "/api/v1/models", &models.json(200, "LmModelsV1"));
}

fn chat(api: &mut Api) {
    api.schema("LmError", reference("Error"));
    let part = object(
        &["type", "content"],
        json!({"type": one_of(&["message", "text"]), "content": string("what is said")}),
    );
    let request = object(
        &["model", "input"],
        json!({
            "model": string("a name of /v1/models"),
            "input": any_of(&[string("what is said"), some_of(part)]),
            "system_prompt": string("for the model"), "stream": boolean("answer as server-sent events"),
            "temperature": number_in(0.0, 1.0, "0 = always the likeliest token"),
            "top_p": number_in(0.0, 1.0, "nucleus sampling"), "top_k": integer("0 = all"),
            "min_p": number_in(0.0, 1.0, "least probability next to the likeliest"),
            "repeat_penalty": number_in(0.01, 10.0, "off at 1"),
            "max_output_tokens": integer_in(1, 4_294_967_295, "longest answer"), "store": boolean("keep it"),
        }),
    );
    api.schema("LmChatRequest", request);
    let item = object(
        &["type"],
        json!({
            "type": one_of(&["message", "reasoning", "tool_call", "invalid_tool_call"]),
            "content": string("what is said"), "tool": string("which"),
        }),
    );
    let stats = object(
        &["input_tokens", "total_output_tokens", "reasoning_output_tokens", "tokens_per_second"],
        json!({
            "input_tokens": integer("of the prompt"), "total_output_tokens": integer("generated"),
            "reasoning_output_tokens": integer("thought"), "tokens_per_second": number("of the answer"),
            "time_to_first_token_seconds": number("seconds"), "model_load_time_seconds": number("seconds"),
        }),
    );
    let answer = object(
        &["model_instance_id", "output", "stats"],
        json!({
            "model_instance_id": string("who answers"), "output": array(item), "stats": stats,
            "response_id": string("to go on from"),
        }),
    );
    api.schema("LmChat", answer);
    let event = object(
        &["type"],
        json!({
            "type": string("the event's name"), "content": string("what comes next"), "progress": number("0 to 1"),
            "result": reference("LmChat"), "model_instance_id": string("who answers"),
        }),
    );
    api.schema("LmEvent", event);
    let chat = Operation::new("lmstudio", "lmStudioChat", "Answer an input")
        .body("LmChatRequest")
        .json(200, "LmChat")
        .events("LmEvent")
        .errors(OF_MODELS)
        .error_schema("LmError");
    api.operation("POST", "/api/v1/chat", &chat);
}

/// For whoever has the management key; 403 otherwise.
fn lifecycle(api: &mut Api) {
    let load = json!({"model": string("which"), "context_length": integer_in(1, 4_294_967_295, "tokens")});
    api.schema("LmLoadRequest", object(&["model"], load));
    let loaded = object(
        &["type", "instance_id", "status", "load_time_seconds"],
        json!({
            "type": string("llm"), "instance_id": string("its name"), "status": constant("loaded"),
            "load_time_seconds": number("seconds"), "load_config": json!({"type": "object"}),
        }),
    );
    api.schema("LmLoaded", loaded);
    let instance = || object(&["instance_id"], json!({"instance_id": string("its name")}));
    api.schema("LmUnloadRequest", instance());
    api.schema("LmUnloaded", instance());
    let download = object(&["model"], json!({"model": string("which")}));
    api.schema("LmDownloadRequest", download);
    let new = |id, summary| {
        let operation = Operation::new("lmstudio", id, summary).error_schema("LmError");
        operation.errors(&[403, 404, 409])
    };
    let load = new("lmStudioLoad", "Load a model").body("LmLoadRequest");
    api.operation("POST", "/api/v1/models/load", &load.json(200, "LmLoaded"));
    let unload = new("lmStudioUnload", "Unload a model").body("LmUnloadRequest");
    api.operation("POST", "/api/v1/models/unload", &unload.json(200, "LmUnloaded"));
    let download = new("lmStudioDownload", "Not built: 501").body("LmDownloadRequest");
    api.operation("POST", "/api/v1/models/download", &download);
    let status = new("lmStudioDownloadStatus", "Not built: 501");
    api.operation("GET", "/api/v1/models/download/status/{job}", &status);
}

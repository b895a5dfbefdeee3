//! The routes of other local servers: llama-server's own, and LM Studio's.

use super::schema::{
    any_of, array, boolean, both, constant, integer, nullable, number, object, one_of, reference,
    string,
};
use super::{Api, OF_MODELS, Operation};
use serde_json::{Value, json};

pub(super) fn describe(api: &mut Api) {
    llama_error(api);
    llama_texts(api);
    llama_completion(api);
    llama_rest(api);
    studio_v0(api);
    studio_v1(api);
    studio_models(api);
}

fn any_object() -> Value {
    json!({"type": "object"})
}

fn llama_error(api: &mut Api) {
    let error = object(
        &["code", "message", "type"],
        json!({
            "code": integer("the status"), "message": string("what was wrong"), "type": string("which kind"),
            "n_prompt_tokens": integer("where the prompt is too long"), "n_ctx": integer("tokens of the context"),
        }),
    );
    api.schema("LlamaError", object(&["error"], json!({"error": error})));
}

fn llama(id: &'static str, summary: &'static str) -> Operation {
    let operation = Operation::new("llama-server", id, summary);
    operation.error_schema("LlamaError").errors(OF_MODELS)
}

fn llama_texts(api: &mut Api) {
    let mixed = any_of(&[
        string("a text"),
        array(any_of(&[string("a text"), integer("a token")])),
    ]);
    let tokenize = object(
        &[],
        json!({
            "model": string("where there are several"), "content": mixed,
            "add_special": boolean("BOS in front"), "parse_special": boolean("read special tokens"),
            "with_pieces": boolean("the text of each token"),
        }),
    );
    api.schema("LlamaTokenize", tokenize);
    let piece = object(
        &["id", "piece"],
        json!({"id": integer("of the token"), "piece": any_of(&[string("its text"), array(integer("a byte"))])}),
    );
    let tokens = array(any_of(&[integer("a token"), piece]));
    api.schema(
        "LlamaTokens",
        object(&["tokens"], json!({"tokens": tokens})),
    );
    let detokenize = json!({"model": string("which"), "tokens": array(integer("a token"))});
    api.schema("LlamaDetokenize", object(&[], detokenize));
    let content = json!({"content": string("the text")});
    api.schema("LlamaText", object(&["content"], content));
    let prompt = json!({"prompt": string("the rendered text")});
    api.schema("LlamaPrompt", object(&["prompt"], prompt));
    let operation = llama("llamaTokenize", "Text to tokens")
        .body("LlamaTokenize")
        .json(200, "LlamaTokens");
    api.operation("POST", "/tokenize", &operation);
    let operation = llama("llamaDetokenize", "Tokens to text")
        .body("LlamaDetokenize")
        .json(200, "LlamaText");
    api.operation("POST", "/detokenize", &operation);
    let operation = llama("llamaApplyTemplate", "Messages to the text of a prompt")
        .body("ChatRequest")
        .json(200, "LlamaPrompt");
    api.operation("POST", "/apply-template", &operation);
}

fn llama_completion(api: &mut Api) {
    let fields = json!({
        "prompt": json!({"description": "a text, tokens, a mix of both, or an array of them"}),
        "n_predict": json!({"type": "integer", "minimum": -2, "description": "longest answer; -1 = no limit"}),
        "n_probs": integer("so many alternatives per token"), "return_tokens": boolean("token ids too"),
        "timings_per_token": boolean("times in each event"),
        "response_fields": array(string("path of a field to show")),
    });
    // Ranges are wider than those of the other routes, so that their fields are not named here.
    api.schema("LlamaCompletionRequest", object(&["prompt"], fields));
    let settings = any_object();
    let said = json!({
        "index": integer("of the choice"), "content": string("what is said"), "tokens": array(integer("a token")),
        "stop": boolean("this is the end"), "tokens_predicted": integer("so far"),
        "tokens_evaluated": integer("of the prompt"), "generation_settings": settings,
        "stop_type": one_of(&["none", "eos", "limit", "word"]), "timings": reference("LlamaTimings"),
        "completion_probabilities": array(any_object()),
    });
    let said = object(&[], said);
    api.schema("LlamaEvent", said.clone());
    let answer = any_of(&[said.clone(), array(said)]);
    api.schema("LlamaCompletion", answer);
    let names = [
        "cache_n",
        "prompt_n",
        "prompt_ms",
        "prompt_per_token_ms",
        "prompt_per_second",
        "predicted_n",
        "predicted_ms",
        "predicted_per_token_ms",
        "predicted_per_second",
    ];
    let numbers: serde_json::Map<String, Value> = names
        .iter()
        .map(|name| ((*name).to_owned(), number("tokens, milliseconds")))
        .collect();
    api.schema("LlamaTimings", object(&names, numbers.into()));
    let operation = llama("llamaCompletion", "Continue texts, in llama-server's words")
        .body("LlamaCompletionRequest")
        .json(200, "LlamaCompletion")
        .events("LlamaEvent");
    api.operation("POST", "/completion", &operation);
}

fn llama_rest(api: &mut Api) {
    api.schema("LlamaProps", any_object());
    let which = || string("a name of /v1/models, where there are several");
    let operation = llama("llamaProps", "What a model is set to")
        .query("model", which(), "which model")
        .json(200, "LlamaProps");
    api.operation("GET", "/props", &operation);
    let slot = object(
        &["id", "n_ctx", "is_processing"],
        json!({"id": integer("of the slot"), "n_ctx": integer("tokens"), "is_processing": boolean("now")}),
    );
    api.schema("LlamaSlots", array(slot));
    let operation = llama("llamaSlots", "What a model works on")
        .query("model", which(), "which model")
        .query("fail_on_no_slot", string("1"), "503 where none is free")
        .json(200, "LlamaSlots");
    api.operation("GET", "/slots", &operation);
    let embedding = object(
        &["index", "embedding"],
        json!({"index": integer("of the input"), "embedding": array(array(number("a coordinate")))}),
    );
    api.schema("LlamaEmbeddings", array(embedding));
    api.schema("AnyObject", any_object());
    let operation = llama(
        "llamaEmbedding",
        "Texts as vectors, in llama-server's words",
    )
    .body("AnyObject")
    .json(200, "LlamaEmbeddings");
    api.operation("POST", "/embedding", &operation);
    api.schema("LlamaAdapters", array(any_object()));
    let operation = llama("llamaAdapters", "There are none").json(200, "LlamaAdapters");
    api.operation("GET", "/lora-adapters", &operation);
    for (id, path) in [
        ("llamaSetAdapters", "/lora-adapters"),
        ("llamaSlotAction", "/slots/{id}"),
        ("llamaInfill", "/infill"),
        ("llamaRerank", "/v1/rerank"),
    ] {
        let operation = llama(id, "Not built: 501").optional_body("AnyObject");
        api.operation("POST", path, &operation);
    }
}

fn studio_v0(api: &mut Api) {
    let figures = object(
        &["stats", "model_info", "runtime"],
        json!({"stats": any_object(), "model_info": any_object(), "runtime": any_object()}),
    );
    for (id, path, request, answer, event) in [
        (
            "studioV0Chat",
            "/api/v0/chat/completions",
            "ChatRequest",
            "ChatAnswer",
            "ChatChunk",
        ),
        (
            "studioV0Completion",
            "/api/v0/completions",
            "CompletionRequest",
            "CompletionAnswer",
            "CompletionAnswer",
        ),
    ] {
        let name = format!("{answer}WithFigures");
        api.schema(&name, both(reference(answer), figures.clone()));
        let operation = Operation::new("lmstudio", id, "OpenAI's answer with figures")
            .body(request)
            .json(200, &name)
            .events(event)
            .errors(OF_MODELS);
        api.operation("POST", path, &operation);
    }
    let operation = Operation::new("lmstudio", "studioV0Embedding", "Texts as vectors")
        .body("EmbeddingRequest")
        .json(200, "EmbeddingList")
        .errors(OF_MODELS);
    api.operation("POST", "/api/v0/embeddings", &operation);
    let model = object(
        &[
            "id",
            "object",
            "type",
            "arch",
            "quantization",
            "state",
            "max_context_length",
        ],
        json!({
            "id": string("what requests name"), "object": constant("model"),
            "type": one_of(&["llm", "embeddings"]), "state": one_of(&["loaded", "not-loaded"]),
        }),
    );
    api.schema("StudioV0Model", model);
    let list = json!({"object": constant("list"), "data": array(reference("StudioV0Model"))});
    api.schema("StudioV0Models", object(&["object", "data"], list));
    let operation =
        Operation::new("lmstudio", "studioV0Models", "All models").json(200, "StudioV0Models");
    api.operation("GET", "/api/v0/models", &operation);
    let operation = Operation::new("lmstudio", "studioV0Model", "One model")
        .json(200, "StudioV0Model")
        .errors(&[404]);
    api.operation("GET", "/api/v0/models/{id}", &operation);
}

fn studio_v1(api: &mut Api) {
    let request = json!({
        "model": string("which"), "input": json!({"description": "a text, or items with texts"}),
        "system_prompt": string("what the model is told first"), "stream": boolean("named events"),
        "max_output_tokens": json!({"type": "integer", "minimum": 1}),
        "reasoning": one_of(&["off", "low", "medium", "high", "on"]),
        "context_length": json!({"type": "integer", "minimum": 1}),
    });
    let request = object(&["input"], request);
    api.schema("StudioChatRequest", both(reference("Generation"), request));
    let answer = object(
        &["model_instance_id", "output", "stats"],
        json!({
            "model_instance_id": string("who answers"), "output": array(any_object()), "stats": any_object(),
        }),
    );
    api.schema("StudioChat", answer);
    let event = json!({"type": string("its name"), "content": string("what comes next")});
    api.schema("StudioEvent", object(&["type"], event));
    let operation = Operation::new("lmstudio", "studioChat", "Answer a message")
        .body("StudioChatRequest")
        .json(200, "StudioChat")
        .events("StudioEvent")
        .errors(OF_MODELS);
    api.operation("POST", "/api/v1/chat", &operation);
}

fn studio_models(api: &mut Api) {
    let model = object(
        &["type", "key", "loaded_instances", "max_context_length"],
        json!({
            "type": one_of(&["llm", "embedding"]), "key": string("what requests name"),
            "loaded_instances": array(any_object()), "format": nullable(string("of its file")),
        }),
    );
    let models = json!({"models": array(model)});
    api.schema("StudioModels", object(&["models"], models));
    let operation =
        Operation::new("lmstudio", "studioModels", "All models").json(200, "StudioModels");
    api.operation("GET", "/api/v1/models", &operation);
    let managed = |id, summary| {
        let operation = Operation::new("lmstudio", id, summary);
        operation.errors(&[403, 404, 409])
    };
    let operation = managed("studioLoad", "Load a model; needs the management key")
        .body("AnyObject")
        .json(200, "AnyObject");
    api.operation("POST", "/api/v1/models/load", &operation);
    let operation = managed("studioUnload", "Unload a model; needs the management key")
        .body("AnyObject")
        .json(200, "AnyObject");
    api.operation("POST", "/api/v1/models/unload", &operation);
    let operation = managed("studioDownload", "Not built: 501").optional_body("AnyObject");
    api.operation("POST", "/api/v1/models/download", &operation);
    let operation = managed("studioDownloadStatus", "Not built: 501");
    api.operation("GET", "/api/v1/models/download/status/{job}", &operation);
}

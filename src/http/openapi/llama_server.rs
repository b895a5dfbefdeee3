//! llama-server's own routes.

use super::schema::{
    any_of, array, boolean, both, integer, integer_in, nullable, number, number_in,
    object, one_of, reference, some_of, string,
};
use super::{Api, OF_MODELS, Operation};
use serde_json::{Value, json};

pub(super) fn describe(api: &mut Api) {
    schemas(api);
    completion(api);
    let new = |id, summary| {
        let operation = Operation::new("llama-server", id, summary);
        operation.errors(OF_MODELS).error_schema("LlamaError")
    };
    let model = || string("a name of /v1/models");
    let props = new("llamaProps", "What a model is set to");
    let props = props.query("model", model(), "where several are served");
    api.operation("GET", "/props", &props.json(200, "LlamaProps"));
    let slots = new("llamaSlots", "What a model's slots do")
        .query("model", model(), "where several are served")
        .query("fail_on_no_slot", one_of(&["1"]), "503 where none is free");
    api.operation("GET", "/slots", &slots.json(200, "LlamaSlots"));
    let tokenize = new("llamaTokenize", "Text to tokens").body("LlamaTokenizeRequest");
    api.operation("POST", "/tokenize", &tokenize.json(200, "LlamaTokens"));
    let detokenize = new("llamaDetokenize", "Tokens to text").body("LlamaDetokenizeRequest");
    api.operation("POST", "/detokenize", &detokenize.json(200, "LlamaText"));
    let template = new("llamaApplyTemplate", "Messages as the model reads them");
    let template = template.body("LlamaMessages").json(200, "LlamaPrompt");
    api.operation("POST", "/apply-template", &template);
    let completion = new("llamaCompletion", "Continue prompts")
        .body("LlamaCompletionRequest")
        .json(200, "LlamaCompletion")
        .events("LlamaEvent");
    api.operation("POST", "/completion", &completion);
    let adapters = new("llamaAdapters", "Adapters, of which there are none");
    api.operation("GET", "/lora-adapters", &adapters.json(200, "LlamaAdapters"));
    for (path, id) in [
        ("/lora-adapters", "llamaSetAdapters"),
        ("/slots/{id}", "llamaSlotAction"),
        ("/infill", "llamaInfill"),
        ("/rerank", "llamaRerank"),
    ] {
        api.operation("POST", path, &new(id, "Not built: 501"));
    }
}

fn schemas(api: &mut Api) {
    let error = json!({
        "code": integer("the status"), "message": string("for people"), "type": string("the kind"),
    });
    let error = object(&["code", "message", "type"], error);
    api.schema("LlamaError", object(&["error"], json!({"error": error})));
    let props = object(
        &["default_generation_settings", "total_slots", "model_alias", "model_path", "build_info"],
        json!({
            "default_generation_settings": json!({"type": "object"}), "total_slots": integer("jobs at once"),
            "model_alias": string("its name"), "model_path": string("its file"),
            "chat_template": string("Jinja"), "build_info": string("tinyloop and its version"),
        }),
    );
    api.schema("LlamaProps", props);
    let slot = object(
        &["id", "n_ctx", "is_processing"],
        json!({"id": integer("of the slot"), "n_ctx": integer("tokens"), "is_processing": boolean("busy")}),
    );
    api.schema("LlamaSlots", array(slot));
    let content = any_of(&[
        string("a text"),
        array(any_of(&[string("a text"), integer("a token")])),
    ]);
    let request = json!({
        "model": string("a name of /v1/models"), "content": content, "add_special": boolean("what the model begins with"),
        "parse_special": boolean("names of control tokens become them"), "with_pieces": boolean("each token's text"),
    });
    api.schema("LlamaTokenizeRequest", object(&[], request));
    let piece = any_of(&[string("a text"), array(integer("a byte"))]);
    let piece = object(&["id", "piece"], json!({"id": integer("a token"), "piece": piece}));
    let tokens = json!({"tokens": array(any_of(&[integer("a token"), piece]))});
    api.schema("LlamaTokens", object(&["tokens"], tokens));
    let request = json!({"model": string("a name of /v1/models"), "tokens": array(integer("a token"))});
    api.schema("LlamaDetokenizeRequest", object(&["tokens"], request));
    api.schema("LlamaText", object(&["content"], json!({"content": string("the text")})));
    let messages = json!({"model": string("a name of /v1/models"), "messages": some_of(reference("Message"))});
    api.schema("LlamaMessages", object(&["messages"], messages));
    api.schema("LlamaPrompt", object(&["prompt"], json!({"prompt": string("the text")})));
    api.schema("LlamaAdapters", array(json!({"type": "object"})));
}

fn completion(api: &mut Api) {
    let prompt = any_of(&[string("a text"), some_of(any_of(&[string("a text"), integer("a token")]))]);
    let request = object(
        &["prompt"],
        json!({
            "model": string("a name of /v1/models"), "prompt": prompt,
            "n_predict": integer_in(-1, 2_147_483_647, "longest answer; -1 = what the context leaves"),
            "stream": boolean("answer as server-sent events"),
            "temperature": number("at most 0 = always the likeliest token"),
            "top_k": integer("0 = all"), "top_p": number_in(0.0, 1.0, "nucleus sampling"),
            "min_p": number_in(0.0, 1.0, "least probability next to the likeliest"),
            "stop": array(json!({"type": "string", "minLength": 1})), "seed": json!({"type": "integer"}),
            "n_probs": integer_in(0, 20, "so many alternatives"), "return_tokens": boolean("token ids too"),
            "ignore_eos": boolean("go on behind the end token"), "cache_prompt": boolean("reuse"),
        }),
    );
    api.schema("LlamaCompletionRequest", request);
    let said = || {
        json!({
            "index": integer("of the prompt"), "content": string("what comes next"),
            "tokens": array(integer("a token")), "id_slot": json!({"type": "integer"}),
            "tokens_predicted": integer("generated"), "tokens_evaluated": integer("of the prompt"),
            "timings": json!({"type": "object"}), "completion_probabilities": array(json!({"type": "object"})),
        })
    };
    let with_stop = |is_last: bool| {
        let mut properties = said();
        properties["stop"] = json!({"const": is_last});
        properties
    };
    let required = ["index", "content", "tokens", "stop", "tokens_predicted", "tokens_evaluated"];
    let more = object(
        &["model", "generation_settings", "prompt", "stop_type", "stopping_word", "truncated"],
        json!({
            "model": string("who answers"), "generation_settings": json!({"type": "object"}),
            "prompt": string("what was continued"), "stop_type": one_of(&["none", "eos", "limit", "word"]),
            "stopping_word": string("which"), "truncated": boolean("the context was full"),
            "has_new_line": boolean("in the answer"), "tokens_cached": nullable(integer("held")),
        }),
    );
    let end: Value = both(object(&required, with_stop(true)), more);
    api.schema("LlamaEnd", end);
    let chosen = json!({"type": "object", "description": "the fields of response_fields only"});
    let whole = [reference("LlamaEnd"), array(reference("LlamaEnd")), chosen];
    api.schema("LlamaCompletion", any_of(&whole));
    let events = [
        object(&required, with_stop(false)),
        reference("LlamaEnd"),
        reference("LlamaError"),
    ];
    api.schema("LlamaEvent", any_of(&events));
}

//! Parameters that are refused because dropping them silently would change the answer.
//!
//! Pure lists and one walk over them. A field of another server that changes nothing here (where a request
//! runs, how text is cut) is no one's harm and is not listed. What is not here: fields that are read
//! (`sampling`, `chat`, `completions`).

use super::fields::Fields;
use crate::http::errors::ApiError;
use serde_json::Value;

/// A parameter that is refused unless its value asks for nothing: (name, value is harmless, why).
pub type Refusal = (&'static str, fn(&Value) -> bool, &'static str);

const REFUSALS: &[Refusal] = &[
    ("functions", is_empty, "use 'tools'"),
    ("function_call", is_no_choice, "use 'tool_choice'"),
    ("modalities", is_text_modality, "only [\"text\"]"),
    ("audio", never, "there is no audio output"),
    ("web_search_options", never, "there is no web search"),
    (
        "adaptive_target",
        is_negative,
        "the adaptive-p sampler is not built",
    ),
    (
        "thinking_budget_tokens",
        is_negative,
        "thoughts are not cut; use 'reasoning_effort', or 'enable_thinking' to have none",
    ),
    ("use_beam_search", is_off, "beam search is not built"),
    ("truncate_prompt_tokens", never, "prompts are never cut"),
    (
        "prompt_logprobs",
        never,
        "use 'echo' with 'logprobs' on /v1/completions, or mode \"score\" of /v1/native/generate",
    ),
    ("return_token_ids", is_off, "token ids are not returned"),
    ("lora", is_empty, "adapters are not built"),
    ("lora_path", is_empty, "adapters are not built"),
    ("lora_request", is_empty, "adapters are not built"),
    (
        "documents",
        is_empty,
        "put their text into a message, or what the template reads into 'chat_template_kwargs'",
    ),
    (
        "no_repeat_ngram_size",
        is_off,
        "use 'dry_multiplier' against repetitions",
    ),
    (
        "logits_processors",
        is_empty,
        "no code of clients runs here",
    ),
    (
        "custom_logit_processor",
        is_empty,
        "no code of clients runs here",
    ),
    ("sampling_seed", is_negative, "use 'seed'"),
    ("tfs_z", is_one, "tail-free sampling is not built"),
    ("top_a", is_off, "use 'min_p'"),
    ("guidance_scale", is_one, "guidance is not built"),
    ("negative_prompt", is_empty, "guidance is not built"),
    (
        "parse_tool_calls",
        is_true,
        "calls are always told apart from the text",
    ),
    (
        "chat_template",
        never,
        "the template comes from the model file",
    ),
    ("t_max_predict_ms", is_off, "use 'max_tokens'"),
    ("n_indent", is_off, "there is no rule about indentation"),
    ("n_probs", is_off, "use 'logprobs' and 'top_logprobs'"),
    (
        "post_sampling_probs",
        is_off,
        "probabilities are those of the model, before sampling",
    ),
    (
        "response_fields",
        is_empty,
        "answers have the fields of this API; /completion takes it",
    ),
    ("detokenize", is_true, "answers are text"),
    ("length_penalty", is_one, "beam search is not built"),
    ("early_stopping", is_off, "beam search is not built"),
    (
        "include_reasoning",
        is_true,
        "thoughts are always shown; 'enable_thinking': false asks for none",
    ),
    (
        "separate_reasoning",
        is_true,
        "use 'reasoning_format': \"none\"",
    ),
    ("min_new_tokens", is_off, "use 'min_tokens'"),
    ("max_new_tokens", never, "use 'max_tokens'"),
    ("ebnf", is_empty, "use 'grammar'"),
    ("stop_regex", is_empty, "use 'stop'"),
    (
        "encoder_repetition_penalty",
        is_one,
        "use 'repetition_penalty'",
    ),
    (
        "smoothing_factor",
        is_off,
        "quadratic sampling is not built",
    ),
    ("penalty_alpha", is_off, "contrastive search is not built"),
    ("image_data", is_empty, "models here take text only"),
    (
        "grammar_lazy",
        is_off,
        "a grammar holds from the first token",
    ),
    (
        "grammar_triggers",
        is_empty,
        "a grammar holds from the first token",
    ),
    (
        "return_tokens_as_token_ids",
        is_off,
        "token ids are not returned",
    ),
    (
        "thinking_token_budget",
        is_negative,
        "thoughts are not cut; use 'reasoning_effort', or 'enable_thinking' to have none",
    ),
    (
        "stream_reasoning",
        is_true,
        "thoughts are told as they come",
    ),
    ("return_hidden_states", is_off, "use /v1/embeddings"),
    ("num_beams", is_one, "beam search is not built"),
    (
        "do_sample",
        is_true,
        "use 'temperature' 0 for the likeliest tokens",
    ),
    ("epsilon_cutoff", is_off, "use 'min_p'"),
    ("eta_cutoff", is_off, "use 'min_p'"),
];

/// What completions have and chats don't.
const REFUSALS_OF_CHAT: &[Refusal] = &[
    ("suffix", is_empty, "a chat has no text behind the answer"),
    ("best_of", is_one, "use 'n', or /v1/completions"),
    ("thinking", is_empty, "use 'enable_thinking'"),
    (
        "reasoning",
        is_empty,
        "use 'reasoning_effort' or 'enable_thinking'",
    ),
];

/// What another server is asked as it stands, where it runs the model.
#[rustfmt::skip]
const FORWARDED: &[&str] = &[
    "response_format", "grammar", "json_schema", "structured_outputs", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "adaptive_target",
];

/// Refuses the first field that is there and asks for something.
///
/// # Errors
/// 400 `unsupported_parameter` with its name and what would serve instead.
pub fn refuse<'a>(
    fields: &Fields<'_>,
    refusals: impl IntoIterator<Item = &'a Refusal>,
) -> Result<(), ApiError> {
    for (name, harmless, why) in refusals {
        if fields.get(name).is_some_and(|value| !harmless(value)) {
            return Err(ApiError::unsupported(*name, why));
        }
    }
    Ok(())
}

/// Of chats and completions. `is_forwarded`: another server runs the model, and understands more.
pub(super) fn refuse_unsupported(fields: &Fields<'_>, is_forwarded: bool) -> Result<(), ApiError> {
    let holds = |(name, ..): &&Refusal| !is_forwarded || !FORWARDED.contains(name);
    refuse(fields, REFUSALS.iter().filter(holds))
}

/// Of chats alone.
pub(super) fn refuse_for_chat(fields: &Fields<'_>) -> Result<(), ApiError> {
    refuse(fields, REFUSALS_OF_CHAT)
}

fn never(_: &Value) -> bool {
    false
}

/// An empty list, object or text.
pub fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

/// False, or a number that is not above 0.
pub fn is_off(value: &Value) -> bool {
    value == &Value::Bool(false) || value.as_f64().is_some_and(|number| number <= 0.0)
}

fn is_true(value: &Value) -> bool {
    value == &Value::Bool(true)
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

fn is_negative(value: &Value) -> bool {
    value.as_f64().is_some_and(|number| number < 0.0)
}

fn is_no_choice(value: &Value) -> bool {
    matches!(value.as_str(), Some("none" | "auto"))
}

fn is_text_modality(value: &Value) -> bool {
    value
        .as_array()
        .is_some_and(|items| items.iter().all(|item| item.as_str() == Some("text")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::openai::chat::ChatRequest;
    use crate::http::openai::completions::CompletionRequest;
    use serde_json::{Map, json};

    /// Fields of llama-server, vLLM, SGLang and others that changed answers there and were dropped here.
    #[test]
    fn what_changes_the_answer_is_refused_by_name_and_what_does_not_is_taken() {
        for (name, harmful, harmless) in [
            ("t_max_predict_ms", json!(100), json!(0)),
            ("n_indent", json!(2), json!(0)),
            ("n_probs", json!(3), json!(0)),
            ("post_sampling_probs", json!(true), json!(false)),
            ("response_fields", json!(["content"]), json!([])),
            ("thinking_budget_tokens", json!(5), json!(-1)),
            ("detokenize", json!(false), json!(true)),
            ("length_penalty", json!(1.5), json!(1.0)),
            ("early_stopping", json!(true), json!(false)),
            ("include_reasoning", json!(false), json!(true)),
            ("separate_reasoning", json!(false), json!(true)),
            ("min_new_tokens", json!(4), json!(0)),
            ("ebnf", json!("root ::= \"a\""), json!("")),
            ("stop_regex", json!("a+"), json!([])),
            ("encoder_repetition_penalty", json!(1.1), json!(1)),
            ("smoothing_factor", json!(0.3), json!(0)),
            ("penalty_alpha", json!(0.6), json!(0)),
            ("epsilon_cutoff", json!(3), json!(0)),
            ("eta_cutoff", json!(3), json!(0)),
            ("image_data", json!([{"id": 1}]), json!([])),
            ("grammar_lazy", json!(true), json!(false)),
            ("grammar_triggers", json!([{"type": 1}]), json!([])),
            ("return_tokens_as_token_ids", json!(true), json!(false)),
            ("thinking_token_budget", json!(100), json!(-1)),
            ("stream_reasoning", json!(false), json!(true)),
            ("return_hidden_states", json!(true), json!(false)),
            ("num_beams", json!(4), json!(1)),
            ("do_sample", json!(false), json!(true)),
            ("thinking", json!({"type": "disabled"}), json!({})),
            ("reasoning", json!({"effort": "low"}), json!({})),
            ("best_of", json!(2), json!(1)),
            ("suffix", json!("x"), json!("")),
            ("use_beam_search", json!(true), json!(false)),
            ("functions", json!([{}]), json!([])),
        ] {
            let chat = |value: &Value| {
                let messages = json!([{"role": "user", "content": "hi"}]);
                let body = json!({"messages": messages, name: value});
                let body: Map<String, Value> = body.as_object().expect("an object").clone();
                [Some(32), None].map(|vocab_size| {
                    let found = ChatRequest::parse(&body, vocab_size).map(|_| ());
                    found.map_err(|error| (error.code.row().2, error.param))
                })
            };
            let refused = Err(("unsupported_parameter", Some(name.to_owned())));
            assert_eq!(chat(&harmful), [refused.clone(), refused.clone()], "{name}");
            assert_eq!(chat(&harmless), [Ok(()), Ok(())], "{name}");
            assert_eq!(chat(&Value::Null), [Ok(()), Ok(())], "{name}");
            if !REFUSALS_OF_CHAT.iter().any(|row| row.0 == name) {
                let body = json!({"prompt": "a", name: harmful});
                let body = body.as_object().expect("an object");
                let found = CompletionRequest::parse(body, Some(32)).map(|_| ());
                let found = found.map_err(|error| (error.code.row().2, error.param));
                assert_eq!(found, refused, "{name}");
            }
        }
    }
}

//! Body fields of generating routes beyond OpenAI's own, as `openapi.json` describes them.
//!
//! Pure data. A test holds them against the list of fields that are forwarded to other servers, so that a
//! field which is read and not described is noticed.

use super::schema::{
    any_of, array, boolean, integer, integer_in, number_in, object, one_of, string,
};
use serde_json::{Map, Value, json};

/// Largest count that is taken.
const COUNT_MAX: i64 = u32::MAX as i64;

/// The properties of several objects as one object.
pub(super) fn joined(parts: impl IntoIterator<Item = Value>) -> Value {
    let mut all = Map::new();
    for part in parts {
        if let Value::Object(properties) = part {
            all.extend(properties);
        }
    }
    Value::Object(all)
}

/// How tokens are chosen, where few requests ask for it.
pub(super) fn steering() -> Value {
    let weight = |most, what| number_in(0.0, most, what);
    json!({
        "repetition_penalty": number_in(0.01, 10.0, "off at 1; vLLM's name of repeat_penalty"),
        "typical_p": weight(1.0, "locally typical sampling; off at 1"),
        "top_n_sigma": number_in(-1.0, 100.0, "logits within so many deviations of the best; off at 0 and below"),
        "min_keep": integer_in(0, COUNT_MAX, "cuts leave at least so many tokens"),
        "xtc_probability": weight(1.0, "how often the likeliest tokens are left out; off at 0"),
        "xtc_threshold": weight(1.0, "tokens above it may be left out"),
        "dynatemp_range": weight(10.0, "the temperature follows the entropy within this range; off at 0"),
        "dynatemp_exponent": weight(100.0, "how it follows"),
        "mirostat": integer_in(0, 2, "version; off at 0"),
        "mirostat_tau": weight(100.0, "surprise aimed at"),
        "mirostat_eta": weight(1.0, "rate of learning"),
        "dry_multiplier": weight(100.0, "penalty on continued repetitions; off at 0"),
        "dry_base": number_in(1.0, 100.0, "growth per token"),
        "dry_allowed_length": integer("repetitions up to this length are free"),
        "dry_penalty_last_n": integer_in(-1, COUNT_MAX, "window; -1 = all"),
        "dry_sequence_breakers": array(json!({"type": "string", "minLength": 1})),
        "samplers": any_of(&[string("letters, in llama-server's form"), array(string("a step"))]),
        "bad_words": array(json!({"type": "string", "minLength": 1})),
        "allowed_token_ids": array(integer("a token that may come")),
        "skip_special_tokens": boolean("leave control tokens out of the text"),
        "include_stop_str_in_output": boolean("keep the stop string that was met"),
        "cache_prompt": boolean("prompts may be reused"),
    })
}

/// Forms of answers other than `response_format`.
pub(super) fn forms() -> Value {
    let schema = || json!({"type": "object", "description": "a JSON schema"});
    json!({
        "grammar": string("GBNF or Lark"),
        "regex": string("the answer matches it as a whole"),
        "choice": array(json!({"type": "string", "minLength": 1})),
        "json_schema": schema(),
        "structured_outputs": json!({"type": "object", "description": "vLLM's: json, regex, choice, grammar or json_object"}),
        "guided_json": schema(),
        "guided_regex": string("regex"),
        "guided_choice": array(json!({"type": "string", "minLength": 1})),
        "guided_grammar": string("grammar"),
    })
}

/// What chats take beside that.
pub(super) fn of_chats() -> Value {
    let named = object(
        &["type", "function"],
        json!({"type": string("function"), "function": object(&["name"], json!({"name": string("of a tool")}))}),
    );
    json!({
        "tool_choice": any_of(&[one_of(&["none", "auto", "required"]), named]),
        "parallel_tool_calls": boolean("more than one call in an answer"),
        "reasoning_effort": string("for the template"),
        "enable_thinking": boolean("for the template"),
        "reasoning_format": one_of(&["auto", "deepseek", "none"]),
        "chat_template_kwargs": json!({"type": "object", "description": "variables of the template"}),
        "add_generation_prompt": boolean("open the answer's turn"),
        "continue_final_message": boolean("go on with the last message"),
        "verbosity": string("taken, without effect here"),
        "user": string("taken, without effect here"),
        "safety_identifier": string("taken, without effect here"),
        "prompt_cache_key": string("taken, without effect here"),
        "metadata": json!({"type": "object", "description": "taken, without effect here"}),
        "timings_per_token": boolean("llama-server's timings in every chunk"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::openai::forward::FORWARDED;

    #[test]
    fn every_field_that_is_forwarded_is_described() {
        let all = joined([
            super::super::openai::common_fields(),
            steering(),
            forms(),
            of_chats(),
        ]);
        // Described with the messages, or refused unless another server runs the model.
        let elsewhere = [
            "logprobs",
            "top_logprobs",
            "tools",
            "adaptive_target",
            "adaptive_decay",
        ];
        let missing: Vec<_> = FORWARDED
            .iter()
            .filter(|name| all.get(**name).is_none() && !elsewhere.contains(name))
            .collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}

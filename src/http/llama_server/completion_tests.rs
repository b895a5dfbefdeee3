//! Tests of the translation: what becomes of llama-server's fields, and what is refused.

use super::*;

fn translated(body: &Value) -> Result<(Map<String, Value>, Special), ApiError> {
    let mut map = body.as_object().expect("the test gives an object").clone();
    let special = translate(&mut map, Some(&Tokenizer::bytes()))?;
    Ok((map, special))
}

#[test]
fn defaults_are_those_of_llama_server() {
    let (body, special) = translated(&json!({"prompt": "x"})).expect("valid");
    assert_eq!(special.temperature, 0.8);
    assert_eq!(body["max_tokens"], -1);
    assert_eq!(body["top_k"], 40.0);
    assert_eq!(body["top_p"], 0.95);
    assert_eq!(body["min_p"], 0.05);
    assert_eq!(body["samplers"], json!(SAMPLERS));
    assert_eq!(body["prompt"], "x");
    assert!(!special.generates_nothing && special.n_probs == 0);
}

#[test]
fn prompts_come_in_all_forms() {
    for (prompt, expected) in [
        (json!("ab"), json!("ab")),
        (json!([97, 98]), json!([97, 98])),
        (json!([1, "a", 2]), json!([1, 97, 2])),
        (json!(["a", "b"]), json!(["a", "b"])),
        (
            json!(["a", [1, "b"], {"prompt_string": "c"}]),
            json!(["a", [1, 98], "c"]),
        ),
        (
            json!({"prompt_string": "c", "multimodal_data": []}),
            json!("c"),
        ),
    ] {
        let (body, _) = translated(&json!({"prompt": prompt})).expect("valid");
        assert_eq!(body["prompt"], expected);
    }
}

#[test]
fn values_beyond_openais_ranges_are_kept() {
    let (body, special) =
        translated(&json!({"prompt": "x", "temperature": 5, "n_predict": 0})).expect("valid");
    assert_eq!(
        (special.temperature, special.generates_nothing),
        (5.0, true)
    );
    assert_eq!(
        (&body["echo"], &body["max_tokens"]),
        (&json!(true), &json!(0))
    );
    let (_, special) = translated(&json!({"prompt": "x", "temperature": -1})).expect("valid");
    assert_eq!(special.temperature, 0.0);
    let biases = |bias: Value| {
        let (body, special) = translated(&json!({"prompt": "x", "logit_bias": bias}))?;
        assert!(!body.contains_key("logit_bias"));
        Ok::<_, ApiError>(special.logit_bias)
    };
    let never = f32::NEG_INFINITY;
    let expected = vec![(5, 1.5), (97, never), (98, never)];
    assert_eq!(biases(json!([[5, 1.5], ["ab", false]])), Ok(expected));
    assert_eq!(biases(json!({"97": -2.0})), Ok(vec![(97, -2.0)]));
    assert!(biases(json!([[5]])).is_err() && biases(json!([[260, 1]])).is_err());
    assert!(biases(json!([[5, true]])).is_err() && biases(json!("x")).is_err());
}

#[test]
fn what_says_nothing_is_dropped() {
    let body = json!({"prompt": "x", "grammar": "", "stop": ["", "y"], "dry_base": 0.5,
        "seed": 4_294_967_295_u32, "top_k": null});
    let (body, _) = translated(&body).expect("valid");
    for name in ["grammar", "dry_base", "seed"] {
        assert!(!body.contains_key(name), "{name}");
    }
    assert_eq!(body["top_k"], 40.0);
    assert_eq!(body["stop"], json!(["y"]));
}

#[test]
fn what_is_not_built_is_named() {
    for (body, param) in [
        (json!({"prompt": "x", "lora": [{"id": 0}]}), "lora"),
        (
            json!({"prompt": "x", "post_sampling_probs": true}),
            "post_sampling_probs",
        ),
        (
            json!({"prompt": "x", "t_max_predict_ms": 5}),
            "t_max_predict_ms",
        ),
        (json!({"prompt": "x", "n_indent": 2}), "n_indent"),
        (json!({"prompt": "x", "grammar_lazy": true}), "grammar_lazy"),
        (json!({}), "prompt"),
        (json!({"prompt": 5}), "prompt"),
        (
            json!({"prompt": {"multimodal_data": ["x"]}}),
            "prompt.multimodal_data",
        ),
        (json!({"prompt": {}}), "prompt"),
        (json!({"prompt": "x", "n_probs": 101}), "n_probs"),
        (json!({"prompt": "x", "n_predict": -3}), "n_predict"),
    ] {
        let error = translated(&body).err().unwrap_or_else(|| panic!("{body}"));
        assert_eq!(error.param.as_deref(), Some(param), "{body}");
    }
}

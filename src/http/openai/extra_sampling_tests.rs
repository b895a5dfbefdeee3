//! Tests of the rarer sampling fields: what arrives, what is refused, and which tokens texts become.

use super::*;
use serde_json::json;

fn parse_with(body: &Value) -> Result<(SamplingParams, SamplingTexts), ApiError> {
    let map = body.as_object().expect("the test gives an object");
    let mut params = SamplingParams {
        repetition_penalty: 1.5,
        ..SamplingParams::default()
    };
    let texts = parse(&Fields::new(map), 260, &mut params)?;
    texts.resolve(&mut params, &Tokenizer::bytes());
    Ok((params, texts))
}

fn extra(body: &Value) -> ExtraSampling {
    let (params, _) = parse_with(body).unwrap_or_else(|error| panic!("{body}: {error}"));
    let extra = params
        .extra
        .unwrap_or_else(|| panic!("{body} asks for nothing"));
    Arc::unwrap_or_clone(extra)
}

#[test]
fn what_is_off_costs_nothing() {
    for body in [
        json!({}),
        json!({"typical_p": 1.0, "top_n_sigma": -1, "xtc_probability": 0, "xtc_threshold": 0.2}),
        json!({"dry_multiplier": 0, "dry_base": 2, "mirostat": 0, "mirostat_tau": 3}),
        json!({"dynatemp_range": 0, "dynatemp_exponent": 2, "min_keep": 0, "bad_words": []}),
        json!({"dry_multiplier": 1, "dry_penalty_last_n": 0}),
    ] {
        let (params, _) = parse_with(&body).expect("valid");
        assert_eq!(params.extra, None, "{body}");
    }
}

#[test]
fn every_field_arrives() {
    let all = extra(&json!({
        "typical_p": 0.5, "top_n_sigma": 1.5, "xtc_probability": 0.25, "xtc_threshold": 0.125,
        "dynatemp_range": 0.5, "dynatemp_exponent": 2, "min_keep": 3, "allowed_token_ids": [7, 9],
        "mirostat": 2, "mirostat_tau": 4, "mirostat_eta": 0.5,
    }));
    let expected = ExtraSampling {
        min_keep: 3,
        typical_p: 0.5,
        top_n_sigma: 1.5,
        xtc: Some(Xtc {
            probability: 0.25,
            threshold: 0.125,
        }),
        dynamic_temperature: Some(DynamicTemperature {
            range: 0.5,
            exponent: 2.0,
        }),
        mirostat: Some(Mirostat {
            version: MirostatVersion::Two,
            tau: 4.0,
            eta: 0.5,
        }),
        allowed: Some(TokenSet::of([7, 9])),
        ..ExtraSampling::default()
    };
    assert_eq!(all, expected);
}

#[test]
fn texts_become_tokens() {
    let dry = extra(&json!({"dry_multiplier": 0.8, "dry_sequence_breakers": ["b", "ac"]})).dry;
    let dry = dry.expect("asked for");
    assert_eq!((dry.base, dry.allowed_length, dry.last_n), (1.75, 2, 64));
    let b = TokenId::from(b'b');
    // The byte itself, and control tokens with it in their name.
    assert!(dry.breakers.contains(b) && dry.breakers.contains(256));
    assert!(!dry.breakers.contains(TokenId::from(b'a')));
    assert_eq!(dry.breaker_sequences, [[97, 99]]);
    let dry = extra(&json!({"dry_multiplier": 0.8, "dry_penalty_last_n": -1})).dry;
    let dry = dry.expect("asked for");
    assert_eq!(dry.last_n, u32::MAX);
    assert!(dry.breakers.contains(TokenId::from(b'\n')) && dry.breaker_sequences.is_empty());
    let bad = extra(&json!({"bad_words": ["ab"]})).bad_words;
    assert_eq!(bad, [vec![32, 97, 98], vec![97, 98]]);
}

#[test]
fn an_order_takes_only_what_it_names() {
    let body = json!({"samplers": ["penalties", "top_k", "temperature"], "dry_multiplier": 1});
    let (params, _) = parse_with(&body).expect("valid");
    assert_eq!(params.repetition_penalty, 1.5);
    let order = &params.extra.as_ref().expect("an order").order;
    assert_eq!(order, &[SamplerStep::TopK, SamplerStep::Temperature]);
    assert_eq!(params.extra.as_ref().expect("an order").dry, None);
    let (params, _) = parse_with(&json!({"samplers": "dkypmxt"})).expect("valid");
    assert_eq!(params.repetition_penalty, 1.0);
    assert_eq!(params.extra.expect("an order").order.len(), 6);
    let (params, _) = parse_with(&json!({"samplers": ["top_k"]})).expect("valid");
    assert_eq!(params.temperature, 1.0);
}

#[test]
fn bad_values_name_their_field() {
    for (body, param) in [
        (json!({"typical_p": 1.5}), "typical_p"),
        (json!({"top_n_sigma": "x"}), "top_n_sigma"),
        (json!({"xtc_probability": -0.1}), "xtc_probability"),
        (json!({"xtc_threshold": 2}), "xtc_threshold"),
        (json!({"dynatemp_range": -1}), "dynatemp_range"),
        (json!({"dry_multiplier": -1}), "dry_multiplier"),
        (json!({"dry_base": 0.5}), "dry_base"),
        (json!({"dry_allowed_length": -1}), "dry_allowed_length"),
        (json!({"dry_penalty_last_n": -2}), "dry_penalty_last_n"),
        (
            json!({"dry_sequence_breakers": "x"}),
            "dry_sequence_breakers",
        ),
        (
            json!({"dry_sequence_breakers": [""]}),
            "dry_sequence_breakers",
        ),
        (json!({"mirostat": 3}), "mirostat"),
        (json!({"mirostat_eta": 2}), "mirostat_eta"),
        (json!({"bad_words": [1]}), "bad_words"),
        (json!({"bad_words": vec!["x"; 257]}), "bad_words"),
        (json!({"allowed_token_ids": []}), "allowed_token_ids"),
        (json!({"allowed_token_ids": [260]}), "allowed_token_ids"),
        (json!({"samplers": 1}), "samplers"),
        (json!({"samplers": [1]}), "samplers"),
        (json!({"samplers": ["infill"]}), "samplers"),
        (json!({"samplers": ["top_k", "dry"]}), "samplers"),
        (json!({"samplers": "k".repeat(33)}), "samplers"),
        (json!({"min_keep": -1}), "min_keep"),
    ] {
        let error = parse_with(&body).expect_err(&body.to_string());
        assert_eq!(error.param.as_deref(), Some(param), "{body}");
    }
}

//! `generation_settings`: what a completion was made with, under llama-server's names.
//!
//! Pure. The keys are those of a running llama-server; samplers that do not exist here are shown as
//! switched off.

use crate::request::{ExtraSampling, GenerationRequest, MirostatVersion, SamplingParams};
use serde_json::{Map, Value, json};

/// The order of samplers unless the request names one.
pub(super) const SAMPLERS: [&str; 9] = [
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
];
/// Where a repetition ends unless the request says otherwise.
const BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

/// The settings of a job; `body` is the request, with its defaults filled in.
pub(super) fn settings(job: &GenerationRequest, body: &Map<String, Value>) -> Value {
    let plain = ExtraSampling::default();
    let extra = job.sampling.extra.as_deref().unwrap_or(&plain);
    let mut settings = of_sampling(&job.sampling, extra);
    of_repetition(&mut settings, &job.sampling, extra);
    of_request(&mut settings, job, body);
    settings
}

/// llama-server writes "all" as -1.
fn or_all(n: u32) -> i64 {
    match n {
        u32::MAX => -1,
        n => i64::from(n),
    }
}

fn of_sampling(sampling: &SamplingParams, extra: &ExtraSampling) -> Value {
    let mirostat = extra.mirostat.as_ref().map_or(0, |it| match it.version {
        MirostatVersion::One => 1,
        MirostatVersion::Two => 2,
    });
    let [dynatemp_range, dynatemp_exponent] = extra
        .dynamic_temperature
        .map_or([0.0, 1.0], |it| [it.range, it.exponent]);
    let [xtc_probability, xtc_threshold] = extra
        .xtc
        .map_or([0.0, 0.1], |it| [it.probability, it.threshold]);
    json!({
        "seed": sampling.seed.unwrap_or(u64::from(u32::MAX)),
        "temperature": sampling.temperature,
        "dynatemp_range": dynatemp_range, "dynatemp_exponent": dynatemp_exponent,
        "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p,
        "top_n_sigma": if extra.top_n_sigma > 0.0 { extra.top_n_sigma } else { -1.0 },
        "xtc_probability": xtc_probability, "xtc_threshold": xtc_threshold,
        "typical_p": extra.typical_p, "mirostat": mirostat,
        "mirostat_tau": extra.mirostat.as_ref().map_or(5.0, |it| it.tau),
        "mirostat_eta": extra.mirostat.as_ref().map_or(0.1, |it| it.eta),
        "adaptive_target": -1.0, "adaptive_decay": 0.9, "min_keep": extra.min_keep,
    })
}

fn of_repetition(settings: &mut Value, sampling: &SamplingParams, extra: &ExtraSampling) {
    settings["repeat_last_n"] = json!(or_all(sampling.repeat_last_n));
    settings["repeat_penalty"] = json!(sampling.repetition_penalty);
    settings["presence_penalty"] = json!(sampling.presence_penalty);
    settings["frequency_penalty"] = json!(sampling.frequency_penalty);
    let dry = extra.dry.as_ref();
    settings["dry_multiplier"] = json!(dry.map_or(0.0, |it| it.multiplier));
    settings["dry_base"] = json!(dry.map_or(1.75, |it| it.base));
    settings["dry_allowed_length"] = json!(dry.map_or(2, |it| it.allowed_length));
    settings["dry_penalty_last_n"] = json!(dry.map_or(64, |it| or_all(it.last_n)));
}

fn of_request(settings: &mut Value, job: &GenerationRequest, body: &Map<String, Value>) {
    let bias = job.sampling.logit_bias.iter().map(|(token, bias)| {
        let bias = match bias.is_finite() {
            true => json!(bias),
            false => json!(false),
        };
        json!({"token": token, "bias": bias})
    });
    settings["logit_bias"] = bias.collect();
    let asked = body.get("n_predict").and_then(Value::as_f64);
    let n_predict = match asked {
        Some(count) if count < 0.0 => -1,
        _ => or_all(job.max_tokens),
    };
    for name in ["n_predict", "max_tokens"] {
        settings[name] = json!(n_predict);
    }
    settings["stop"] = json!(job.stop.strings);
    settings["ignore_eos"] = json!(job.stop.ignore_eos);
    for (name, default) in [
        ("stream", json!(false)),
        ("n_probs", json!(0)),
        ("grammar", json!("")),
        ("samplers", json!(SAMPLERS)),
        ("timings_per_token", json!(false)),
        ("dry_sequence_breakers", json!(BREAKERS)),
    ] {
        settings[name] = body.get(name).cloned().unwrap_or(default);
    }
    for (name, value) in [
        ("n_keep", json!(0)),
        ("n_discard", json!(0)),
        ("grammar_lazy", json!(false)),
        ("grammar_triggers", json!([])),
        ("preserved_tokens", json!([])),
        ("chat_format", json!("Content-only")),
        ("reasoning_format", json!("none")),
        ("reasoning_in_content", json!(false)),
        ("generation_prompt", json!("")),
        ("speculative.types", json!("none")),
        ("post_sampling_probs", json!(false)),
        ("backend_sampling", json!(false)),
        ("lora", json!([])),
    ] {
        settings[name] = value; // what does not exist here
    }
}

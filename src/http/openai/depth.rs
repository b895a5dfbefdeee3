//! Depth of one request: how often a looped model's core runs for it, and how far it looks back.
//!
//! Pure. `loops` asks for a depth (the model name `model@4` does the same), `min_loops` says how far
//! the scheduler may lower it to meet a latency objective. Ordinary models run one loop. `adaptive`
//! lets tokens leave the loop early by a rule of the model. `cache_window` bounds attention, and the
//! KV held, to the last tokens and a registered prefix. What is not here: who lowers the depth
//! (`scheduler/admission`), what a loop is (`model/plan`), the rules (`model/exit`), pages
//! (`engine/kv`).

use super::fields::Fields;
use crate::http::errors::{ApiError, ErrorCode};
use crate::model::ExitRules;
use crate::pool::{LoopRange, ModelMeta, WindowRange};
use crate::request::{AdaptiveExit, ExitRule, GenerationRequest};

/// What a request says about its depth, checked against its model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Depth {
    /// Loops asked; None = the model's default.
    pub loops: Option<u32>,
    /// Fewest that it accepts; None = as many as asked.
    pub min_loops: Option<u32>,
    /// Leave the loop early; None = never.
    pub adaptive: Option<AdaptiveExit>,
    /// Sliding attention window in tokens; 0 = full attention.
    pub cache_window: u32,
}

impl Depth {
    /// Reads `loops`, `min_loops` and `cache_window`. `from_name`: the depth that the model name ends in.
    ///
    /// # Errors
    /// Out of the model's range, two different depths, or a minimum above what is asked.
    pub fn parse(
        fields: &Fields<'_>,
        from_name: Option<u32>,
        model: &ModelMeta,
    ) -> Result<Self, ApiError> {
        let range = model.loops;
        let in_body = loops(fields, "loops", range)?;
        if let Some(named) = from_name {
            in_range("model", named, range)?;
            if in_body.is_some_and(|loops| loops != named) {
                let text = format!("the model name asks for {named} loops, 'loops' for others");
                return Err(ApiError::invalid("loops", text));
            }
        }
        let asked = in_body.or(from_name);
        let min_loops = loops(fields, "min_loops", range)?;
        let most = asked.unwrap_or(range.default);
        if let Some(least) = min_loops.filter(|least| *least > most) {
            let text = format!("'min_loops' is {least}, above the {most} loops of the request");
            return Err(ApiError::invalid("min_loops", text));
        }
        Ok(Self {
            loops: asked,
            min_loops,
            adaptive: adaptive(fields, model.exit_rules)?,
            cache_window: cache_window(fields, model.windows)?,
        })
    }

    /// Puts it into a request.
    pub fn apply(self, request: &mut GenerationRequest) {
        request.loops = self.loops;
        request.min_loops = self.min_loops;
        request.cache_window = self.cache_window;
        request.adaptive = self.adaptive;
    }
}

/// `{"rule": .., "threshold": ..}`, both needed: a threshold means another thing for each rule.
fn adaptive(fields: &Fields<'_>, known: ExitRules) -> Result<Option<AdaptiveExit>, ApiError> {
    const RULE: &str = "adaptive.rule";
    const THRESHOLD: &str = "adaptive.threshold";
    let Some(map) = fields.object("adaptive")? else {
        return Ok(None);
    };
    let inner = Fields::new(map);
    let within = |error: ApiError| ApiError {
        param: error.param.map(|param| format!("adaptive.{param}")),
        ..error
    };
    inner
        .refuse_unknown(&["rule", "threshold"])
        .map_err(within)?;
    let missing = |param: &str, what: &str| {
        let text = format!("'{param}' is missing; it is {what}");
        ApiError::param(ErrorCode::MissingRequiredParameter, param, text)
    };
    let names = ExitRule::ALL.map(ExitRule::name).join(", ");
    let name = inner.string("rule").map_err(within)?;
    let name = name.ok_or_else(|| missing(RULE, &format!("one of {names}")))?;
    let Some(rule) = ExitRule::parse(name) else {
        let shown: String = name.chars().take(100).collect();
        let text = format!("'{RULE}' is '{shown}'; it must be one of {names}");
        return Err(ApiError::invalid(RULE, text));
    };
    let threshold = inner.number("threshold", 0.0..=f64::from(f32::MAX));
    let threshold = threshold.map_err(within)?;
    let threshold = threshold.ok_or_else(|| missing(THRESHOLD, "a number of at least 0"))?;
    let exit = AdaptiveExit { rule, threshold };
    match known.refusal(exit) {
        None => Ok(Some(exit)),
        Some(why) => Err(ApiError::invalid("adaptive", why)),
    }
}

fn cache_window(fields: &Fields<'_>, range: WindowRange) -> Result<u32, ApiError> {
    let window = fields.count("cache_window", 0)?.unwrap_or(range.default);
    if window <= range.max {
        return Ok(window);
    }
    let text = match range.max {
        0 => format!("'cache_window' is {window}; this model has no attention windows"),
        max => format!(
            "'cache_window' is {window}; 0 is full attention, a window has 1 to {max} tokens (the \
             context length)"
        ),
    };
    Err(ApiError::invalid("cache_window", text))
}

fn loops(fields: &Fields<'_>, name: &str, range: LoopRange) -> Result<Option<u32>, ApiError> {
    let Some(loops) = fields.count(name, 0)? else {
        return Ok(None);
    };
    in_range(name, loops, range)?;
    Ok(Some(loops))
}

fn in_range(param: &str, loops: u32, range: LoopRange) -> Result<(), ApiError> {
    if (1..=range.max).contains(&loops) {
        return Ok(());
    }
    let text = match range.max {
        1 => format!("{loops} loops were asked for; this model is not looped, it runs 1"),
        max => format!("{loops} loops were asked for; this model runs 1 to {max}"),
    };
    Err(ApiError::invalid(param, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn depths_and_their_faults() {
        let looped = LoopRange { default: 2, max: 4 };
        let plain = LoopRange::default();
        #[rustfmt::skip]
        let table = [
            // body, from the name, range, (loops, min_loops) or the parameter at fault
            (json!({}), None, looped, Ok((None, None))),
            (json!({"loops": 4, "min_loops": 1}), None, looped, Ok((Some(4), Some(1)))),
            (json!({"min_loops": 2}), None, looped, Ok((None, Some(2)))),
            (json!({"min_loops": 3}), None, looped, Err("min_loops")),
            (json!({"loops": 1, "min_loops": 2}), None, looped, Err("min_loops")),
            (json!({"loops": 5}), None, looped, Err("loops")),
            (json!({"loops": 0}), None, looped, Err("loops")),
            (json!({"loops": "4"}), None, looped, Err("loops")),
            (json!({}), Some(3), looped, Ok((Some(3), None))),
            (json!({"loops": 3}), Some(3), looped, Ok((Some(3), None))),
            (json!({"loops": 2}), Some(3), looped, Err("loops")),
            (json!({}), Some(9), looped, Err("model")),
            (json!({"loops": 1}), None, plain, Ok((Some(1), None))),
            (json!({"loops": 2}), None, plain, Err("loops")),
        ];
        for (body, from_name, range, expected) in table {
            let map = body.as_object().expect("an object");
            let model = ModelMeta {
                loops: range,
                ..ModelMeta::default()
            };
            let found = Depth::parse(&Fields::new(map), from_name, &model);
            let found = found.map(|depth| (depth.loops, depth.min_loops));
            let found = found.map_err(|error| error.param.unwrap_or_default());
            assert_eq!(
                found,
                expected.map_err(str::to_owned),
                "{body} {from_name:?}"
            );
        }
    }

    #[test]
    fn rules_of_early_exit_and_their_faults() {
        let all = ExitRules {
            gate: true,
            kl: true,
            latent: true,
        };
        let no_gate = ExitRules { gate: false, ..all };
        let none = ExitRules::default();
        let exit = |rule, threshold| Ok(Some(AdaptiveExit { rule, threshold }));
        #[rustfmt::skip]
        let table = [
            // adaptive, what the model knows, the rule or (the parameter at fault, words)
            (json!(null), none, Ok(None)),
            (json!({"rule": "gate", "threshold": 0.5}), all, exit(ExitRule::Gate, 0.5)),
            (json!({"rule": "kl", "threshold": 0}), all, exit(ExitRule::Kl, 0.0)),
            (json!({"rule": "latent", "threshold": 7}), no_gate, exit(ExitRule::Latent, 7.0)),
            (json!({"rule": "gate", "threshold": 0.5}), no_gate, Err(("adaptive", "kl, latent"))),
            (json!({"rule": "kl", "threshold": 0.5}), none, Err(("adaptive", "does not loop"))),
            (json!({"rule": "gate", "threshold": 1.5}), all, Err(("adaptive", "0..=1"))),
            (json!({"rule": "kl", "threshold": -1}), all, Err(("adaptive.threshold", "-1"))),
            (json!({"rule": "kl", "threshold": "x"}), all, Err(("adaptive.threshold", "a number"))),
            (json!({"rule": "kl"}), all, Err(("adaptive.threshold", "missing"))),
            (json!({"threshold": 1}), all, Err(("adaptive.rule", "missing"))),
            (json!({"rule": "x", "threshold": 1}), all, Err(("adaptive.rule", "gate, kl, latent"))),
            (json!({"rule": 1, "threshold": 1}), all, Err(("adaptive.rule", "a string"))),
            (json!({}), all, Err(("adaptive.rule", "missing"))),
            (json!("kl"), all, Err(("adaptive", "an object"))),
            (json!({"rule": "kl", "treshold": 1}), all, Err(("adaptive.treshold", "no such field"))),
        ];
        for (adaptive, exit_rules, expected) in table {
            let body = json!({"adaptive": adaptive});
            let map = body.as_object().expect("an object");
            let model = ModelMeta {
                exit_rules,
                ..ModelMeta::default()
            };
            match (Depth::parse(&Fields::new(map), None, &model), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found.adaptive, expected, "{body}"),
                (Err(error), Err((param, words))) => {
                    assert_eq!(error.param.as_deref(), Some(param), "{body}");
                    assert!(error.message.contains(words), "{body}: {}", error.message);
                }
                (found, _) => panic!("{body}: {found:?}"),
            }
        }
    }

    #[test]
    fn windows_have_a_default_and_a_range() {
        let windows = WindowRange {
            default: 50,
            max: 64,
        };
        let meta = |windows| ModelMeta {
            windows,
            ..ModelMeta::default()
        };
        for (body, windows, expected) in [
            (json!({}), windows, Ok(50)),
            (json!({"cache_window": null}), windows, Ok(50)),
            (json!({"cache_window": 0}), windows, Ok(0)),
            (json!({"cache_window": 64}), windows, Ok(64)),
            (json!({"cache_window": 65}), windows, Err("1 to 64 tokens")),
            (json!({"cache_window": -1}), windows, Err("cache_window")),
            (json!({"cache_window": "9"}), windows, Err("cache_window")),
            (json!({"cache_window": 0}), WindowRange::default(), Ok(0)),
            (
                json!({"cache_window": 1}),
                WindowRange::default(),
                Err("no attention windows"),
            ),
        ] {
            let map = body.as_object().expect("an object");
            match (
                Depth::parse(&Fields::new(map), None, &meta(windows)),
                expected,
            ) {
                (Ok(found), Ok(expected)) => assert_eq!(found.cache_window, expected, "{body}"),
                (Err(error), Err(words)) => {
                    assert_eq!(error.param.as_deref(), Some("cache_window"), "{body}");
                    assert!(error.message.contains(words), "{body}: {}", error.message);
                }
                (found, expected) => panic!("{body}: {found:?}, not {expected:?}"),
            }
        }
    }
}

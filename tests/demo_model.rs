//! The demo model against numbers recorded elsewhere: `smollm2_greedy.json` (what llama.cpp
//! generated, and what exact f32 arithmetic says along the same tokens) and the perplexity of
//! `perplexity_text.txt`. Needs the model file (`make model`) and a release build.
//!
//! **Teacher forcing.** llama.cpp's output tokens are fed back whatever we would have chosen; at
//! each step our argmax and the log-probability of its token are compared.
//!
//! **Perplexity** as `llama-perplexity -c 512` counts it: chunks of 512 tokens without BOS or
//! overlap, positions 256..=510 of each predict their successor.

use serde_json::Value;
use std::path::PathBuf;
use tinyloop::backend::Backend;
use tinyloop::backend::cpu::CpuBackend;
use tinyloop::backend::reference::ReferenceBackend;
use tinyloop::format::ModelFile;
use tinyloop::model::Model;
use tinyloop::model::testing::Runner;
use tinyloop::tokenizer::{EncodeOptions, Tokenizer};

const CONTEXT: usize = 512;

fn demo_file() -> ModelFile {
    let default = "target/models/SmolLM2-135M-Instruct.Q4_1.gguf";
    let path = std::env::var_os("TINYLOOP_DEMO_MODEL").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(default),
        PathBuf::from,
    );
    assert!(
        path.exists(),
        "{} is missing: run `make model` first",
        path.display()
    );
    ModelFile::open_gguf(&path).expect("the demo model is a valid file")
}

fn data(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    std::fs::read_to_string(path.join(name)).expect("the reference files are committed")
}

/// One step of one reference case.
struct Step {
    case: String,
    step: usize,
    /// What llama.cpp chose.
    token: u32,
    /// Exact arithmetic's choice.
    f32_argmax: u32,
    /// llama.cpp's log-probability of `token` and its lead over the runner-up, where recorded.
    llama_cpp: Option<(f64, f64)>,
    /// Ours.
    argmax: u32,
    logprob: f64,
    /// (token, exact log-probability, ours), first steps only.
    f32_top: Vec<(u32, f64, f64)>,
}

impl Step {
    fn place(&self) -> String {
        format!("{} step {} (token {})", self.case, self.step, self.token)
    }
}

/// Teacher-forces every case.
fn steps(model: &Model, backend: &mut dyn Backend) -> Vec<Step> {
    let cases: Value = serde_json::from_str(&data("smollm2_greedy.json")).expect("JSON");
    let mut runner = Runner::new(model, backend, CONTEXT, 64).expect("the state fits");
    let mut all = Vec::new();
    for case in cases.as_array().expect("an array of cases") {
        let prompt = ids(&case["prompt_tokens"]);
        let output = ids(&case["output_tokens"]);
        let f32_argmax = ids(&case["f32_check"]["teacher_forced_argmax"]);
        assert_eq!(f32_argmax.len(), output.len());
        let tokens = [&prompt[..], &output[..output.len() - 1]].concat();
        let see = |position: usize, logits: &[f32]| {
            let step = position + 1 - prompt.len();
            let recorded = &case["steps"][step];
            let first = &case["f32_check"]["first_token_top_logprobs"];
            let f32_top = match step {
                0 => first.as_array().expect("five tokens").as_slice(),
                _ => &[],
            };
            all.push(Step {
                case: case["name"].as_str().expect("a name").to_owned(),
                step,
                token: output[step],
                f32_argmax: f32_argmax[step],
                llama_cpp: recorded["logprob"].as_f64().map(|chosen| {
                    let second = recorded["runner_up"]["logprob"].as_f64();
                    (chosen, chosen - second.expect("a runner-up"))
                }),
                argmax: argmax(logits),
                logprob: logprob(logits, output[step]),
                f32_top: f32_top
                    .iter()
                    .map(|top| {
                        let token = top["id"].as_u64().expect("an id") as u32;
                        let exact = top["logprob"].as_f64().expect("a number");
                        (token, exact, logprob(logits, token))
                    })
                    .collect(),
            });
        };
        runner
            .logits(&tokens, 1, |position| position + 1 >= prompt.len(), see)
            .expect("the backend works");
    }
    all
}

fn ids(array: &Value) -> Vec<u32> {
    let array = array.as_array().expect("an array of ids");
    array
        .iter()
        .map(|id| id.as_u64().expect("an id") as u32)
        .collect()
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.expect("a vocabulary").0 as u32
}

/// Natural log of the softmax at `token`, in f64.
fn logprob(logits: &[f32], token: u32) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - largest).exp()).sum();
    f64::from(logits[token as usize] - largest) - sum.ln()
}

/// Mean of `|our log-probability - llama.cpp's|` over the steps where it is recorded.
fn mean_difference(steps: &[Step]) -> f64 {
    let differences: Vec<f64> = steps
        .iter()
        .filter_map(|step| {
            step.llama_cpp
                .map(|(theirs, _)| (step.logprob - theirs).abs())
        })
        .collect();
    assert!(differences.len() > 200);
    differences.iter().sum::<f64>() / differences.len() as f64
}

/// Perplexity over the text; see the module doc.
fn perplexity(file: &ModelFile, model: &Model, backend: &mut dyn Backend) -> f64 {
    let tokenizer = Tokenizer::from_gguf(file).expect("a known vocabulary");
    let options = EncodeOptions {
        add_special: false,
        parse_special: false,
    };
    let tokens = tokenizer.encode(&data("perplexity_text.txt"), options);
    assert_eq!(tokens.len(), 1799);
    let mut runner = Runner::new(model, backend, CONTEXT, 128).expect("the state fits");
    let (mut negative_logs, mut n_scored) = (0.0, 0);
    for chunk in tokens.chunks_exact(CONTEXT) {
        let see = |position: usize, logits: &[f32]| {
            negative_logs -= logprob(logits, chunk[position + 1]);
            n_scored += 1;
        };
        let scored = CONTEXT / 2..CONTEXT - 1;
        runner
            .logits(chunk, 1, |position| scored.contains(&position), see)
            .expect("the backend works");
    }
    assert_eq!(n_scored, 765);
    (negative_logs / f64::from(n_scored)).exp()
}

fn load(file: &ModelFile, backend: &mut dyn Backend) -> Model {
    Model::load(file, backend, &mut |_, _| {}).expect("the demo model is a llama")
}

#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "slow in debug; make test runs it in release"
)]
fn the_reference_backend_matches_exact_arithmetic() {
    let mut backend = ReferenceBackend::new();
    let model = load(&demo_file(), &mut backend);
    let steps = steps(&model, &mut backend);
    assert_eq!(steps.len(), 281);
    for step in &steps {
        let place = step.place();
        assert_eq!(step.argmax, step.f32_argmax, "{place}");
        for (token, exact, ours) in &step.f32_top {
            assert!(
                (exact - ours).abs() < 0.01,
                "{place} token {token}: {exact} {ours}"
            );
        }
    }
    // The recorded means of exact arithmetic's own distance to llama.cpp, per case.
    let cases: Value = serde_json::from_str(&data("smollm2_greedy.json")).expect("JSON");
    for case in cases.as_array().expect("an array of cases") {
        let Some(recorded) = case["f32_check"]["mean_abs_logprob_diff"].as_f64() else {
            continue;
        };
        let differences: Vec<f64> = steps
            .iter()
            .filter(|step| step.case == case["name"])
            .map(|step| (step.logprob - step.llama_cpp.expect("recorded").0).abs())
            .collect();
        let mean = differences.iter().sum::<f64>() / differences.len() as f64;
        assert!(
            (mean - recorded).abs() < 0.001,
            "{}: {mean} {recorded}",
            case["name"]
        );
    }
}

#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "slow in debug; make test runs it in release"
)]
fn the_reference_backend_has_the_exact_perplexity() {
    let file = demo_file();
    let mut backend = ReferenceBackend::new();
    let model = load(&file, &mut backend);
    let found = perplexity(&file, &model, &mut backend);
    eprintln!("reference perplexity {found:.4}");
    assert!((found / 15.6653 - 1.0).abs() < 0.0005, "perplexity {found}");
}

/// How far a backend that quantizes activations is from llama.cpp and from exact arithmetic.
struct Distance {
    /// Steps with another argmax although llama.cpp's choice leads by more than 0.3.
    wrong_where_clear: Vec<String>,
    /// Share of the steps whose argmax is llama.cpp's or exact arithmetic's. The committed file
    /// has 8 of the 12 cases for which the bound of 96 % was set; on them exact arithmetic itself
    /// agrees with llama.cpp at 95.0 % only, so its choice counts as right too.
    right_share: f64,
    /// Mean |log-probability difference| to llama.cpp.
    mean_difference: f64,
    perplexity: f64,
}

fn distance(backend: &mut dyn Backend) -> Distance {
    let file = demo_file();
    let model = load(&file, backend);
    let steps = steps(&model, backend);
    let clear = |step: &&Step| step.llama_cpp.is_some_and(|(_, lead)| lead > 0.3);
    let wrong = steps
        .iter()
        .filter(clear)
        .filter(|step| step.argmax != step.token);
    let wrong: Vec<String> = wrong.map(Step::place).collect();
    let share = |n: usize| n as f64 / steps.len() as f64;
    let with = |agrees: fn(&Step) -> bool| share(steps.iter().filter(|step| agrees(step)).count());
    let with_llama_cpp = with(|step| step.argmax == step.token);
    let with_exact = with(|step| step.argmax == step.f32_argmax);
    let with_either = with(|step| step.argmax == step.token || step.argmax == step.f32_argmax);
    let difference = mean_difference(&steps);
    let perplexity = perplexity(&file, &model, backend);
    eprintln!(
        "{}: argmax as llama.cpp {with_llama_cpp:.3}, as exact f32 {with_exact:.3}, as either \
         {with_either:.3}; mean |log-probability difference| {difference:.4}; \
         perplexity {perplexity:.4}",
        backend.name()
    );
    Distance {
        wrong_where_clear: wrong,
        right_share: with_either,
        mean_difference: difference,
        perplexity,
    }
}

/// What the project asks of its fast paths.
#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "slow in debug; make test runs it in release"
)]
fn the_cpu_backend_is_as_good_as_llama_cpp() {
    let found = distance(&mut CpuBackend::new(None).expect("this machine has a path"));
    let wrong = found.wrong_where_clear;
    assert!(wrong.is_empty(), "another argmax at clear steps: {wrong:?}");
    assert!(found.right_share >= 0.96, "{}", found.right_share);
    assert!(found.mean_difference < 0.06, "{}", found.mean_difference);
    assert!(found.perplexity <= 15.79, "{}", found.perplexity);
}

/// A guard at what is reached: not the goal (above), but a broken kernel would not pass it.
#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "slow in debug; make test runs it in release"
)]
fn the_cpu_backend_is_close_to_exact_arithmetic() {
    let found = distance(&mut CpuBackend::new(None).expect("this machine has a path"));
    let wrong = found.wrong_where_clear;
    assert!(wrong.len() <= 1, "another argmax at clear steps: {wrong:?}");
    assert!(found.right_share >= 0.96, "{}", found.right_share);
    assert!(found.mean_difference < 0.06, "{}", found.mean_difference);
    assert!(found.perplexity < 15.6653 * 1.01, "{}", found.perplexity);
}

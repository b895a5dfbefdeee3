//! What one generation gives, and how it ends.

use crate::support::*;
use tinyloop::engine::EngineParts;
use tinyloop::model::testing;
use tinyloop::request::*;

#[test]
fn greedy_tokens_are_those_of_the_model_run_by_hand() {
    for shape in [None, Some((1, 2, 1)), Some((0, 2, 0))] {
        let request = greedy(prompt(1, 50), 12);
        let outcome = alone(shape, &request);

        let EngineParts {
            mut backend, model, ..
        } = parts(shape, config());
        let mut runner = testing::Runner::new(&model, backend.as_mut(), 96, 96).expect("small");
        let mut tokens = request.prompt.to_vec();
        for _ in 0..12 {
            let last = tokens.len() - 1;
            let mut next = 0;
            let loops = model.plan.default_loops;
            runner
                .logits(
                    &tokens,
                    loops,
                    |p| p == last,
                    |_, logits| {
                        let best =
                            (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
                        next = best.expect("a vocabulary") as TokenId;
                    },
                )
                .expect("small");
            tokens.push(next);
        }
        assert_eq!(outcome.tokens, tokens[50..], "{shape:?}");
        let usage = Usage {
            prompt_tokens: 50,
            cached_tokens: 0,
            completion_tokens: 12,
            loops: model.plan.default_loops,
            ..Usage::default()
        };
        // All but the last token, which was generated and not looked at.
        let loops = (outcome.loops.rows, outcome.loops.iterations);
        assert_eq!(loops, (61, 61 * u64::from(model.plan.default_loops)));
        assert_eq!(outcome.finish, Some((FinishReason::Length, usage)));
    }
}

#[test]
fn a_prompt_is_scored_like_its_tokens_were_generated() {
    let generated = run(&mut engine_of(None, config()), &greedy(prompt(2, 70), 20));
    let mut tokens = prompt(2, 70);
    tokens.extend(&generated.tokens);
    let mut request = greedy(tokens.clone(), 0);
    request.prompt_logprobs = Some(2);
    let mut engine = engine_of(None, config());
    for _ in 0..2 {
        let scored = run(&mut engine, &request);
        let scores = scored.prompt_logprobs.clone().expect("asked for");
        assert_eq!(scores.len(), tokens.len() - 1);
        assert!(
            scores
                .iter()
                .map(|s| s.token)
                .eq(tokens[1..].iter().copied())
        );
        assert_eq!(scores[69..], generated.logprobs);
        let (reason, usage) = scored.finish.expect("it finished");
        assert_eq!(
            (reason, usage.completion_tokens, usage.cached_tokens),
            (FinishReason::Length, 0, 0)
        );
        assert!(scored.tokens.is_empty());
    }
    request.max_tokens = 3;
    let both = run(&mut engine, &request);
    assert_eq!(
        (both.tokens.len(), both.prompt_logprobs.map(|p| p.len())),
        (3, Some(89))
    );
}

#[test]
fn generations_end_by_their_rules() {
    let free = alone(None, &greedy(prompt(1, 10), 12));
    let at =
        |tokens: &[TokenId], i: usize| tokens.iter().position(|t| *t == tokens[i]).expect("it");
    let fifth = at(&free.tokens, 5);
    let ask = |change: &dyn Fn(&mut GenerationRequest)| {
        let mut request = greedy(prompt(1, 10), 12);
        change(&mut request);
        alone(None, &request)
    };
    // A stop token ends the answer, counts, and is not sent.
    let stopped = ask(&|r| r.stop.token_ids = vec![free.tokens[5]]);
    assert_eq!(stopped.tokens, free.tokens[..fifth]);
    let (reason, usage) = stopped.finish.expect("it finished");
    assert_eq!(
        (reason, usage.completion_tokens as usize),
        (FinishReason::Stop, fifth + 1)
    );
    // Not before min_tokens.
    let late = ask(&|r| {
        r.stop.token_ids = vec![free.tokens[5]];
        r.stop.min_tokens = 9;
    });
    assert!(late.tokens.len() >= 9 && !late.tokens[..9].contains(&free.tokens[5]));
    // The end token likewise; with ignore_eos it never comes.
    let end = |r: &mut GenerationRequest| r.sampling.logit_bias = vec![(END, 1000.0)];
    let ended = ask(&end);
    assert_eq!(
        (ended.tokens.len(), ended.finish.expect("it finished").0),
        (0, FinishReason::Stop)
    );
    let ignored = ask(&|r| {
        end(r);
        r.stop.ignore_eos = true;
    });
    assert_eq!(ignored.tokens, free.tokens);
    // The context ends it as well.
    let full = alone(None, &greedy(prompt(1, 155), 100));
    let (reason, usage) = full.finish.expect("it finished");
    assert_eq!((reason, usage.completion_tokens), (FinishReason::Length, 5));
}

#[test]
fn impossible_requests_fail_with_a_reason_and_disturb_nobody() {
    let mut engine = engine_of(None, config());
    let good = submit(&mut engine, &greedy(prompt(1, 20), 5));
    for request in [
        greedy(vec![], 1),
        greedy(vec![VOCAB], 1),
        greedy(prompt(1, 160), 1),
    ] {
        let outcome = submit(&mut engine, &request);
        let failure = outcome.lock().failure.clone();
        assert!(
            matches!(failure, Some(RequestError::Invalid(_))),
            "{failure:?}"
        );
    }
    let mut hopeless = greedy(prompt(1, 5), 1);
    hopeless.sampling.logit_bias = (0..VOCAB).map(|t| (t, f32::NEG_INFINITY)).collect();
    let hopeless = submit(&mut engine, &hopeless);
    drain(&mut engine);
    assert!(hopeless.lock().failure.is_some());
    assert_eq!(good.lock().tokens.len(), 5);
}

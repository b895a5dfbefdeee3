//! Answers that must follow rules: scripted constraints over the tiny models, beside free neighbours.

use crate::support::*;
use std::sync::Arc;
use tinyloop::constraint::{Constraint, ConstraintSource, Next, TokenSet};
use tinyloop::request::*;

/// What a scripted constraint says after `n` tokens (forced ones counted).
#[derive(Clone, Copy, Debug)]
enum Say {
    /// Any even token below the end token.
    Even,
    /// These come in any case, then any even one.
    Forced(&'static [TokenId]),
    /// These come in any case, and then the answer is complete.
    Last(&'static [TokenId]),
    /// The answer is complete.
    End,
    /// Only the end token may come.
    OnlyEnd,
    /// No token may come.
    Nothing,
    Fail,
    Panic,
}

#[derive(Clone, Debug)]
struct Script(Vec<Say>);

struct Reader {
    script: Vec<Say>,
    n_seen: usize,
}

fn set(tokens: impl Iterator<Item = TokenId>) -> TokenSet {
    let mut words = vec![0; VOCAB.div_ceil(32) as usize];
    for token in tokens {
        words[token as usize / 32] |= 1 << (token % 32);
    }
    TokenSet::from_words(words)
}

fn even() -> TokenSet {
    set((0..END).step_by(2))
}

impl ConstraintSource for Script {
    fn begin(&self) -> Box<dyn Constraint> {
        Box::new(Reader {
            script: self.0.clone(),
            n_seen: 0,
        })
    }
}

impl Constraint for Reader {
    fn advance(&mut self, tokens: &[TokenId], wants_forced: bool) -> Result<Next, String> {
        self.n_seen += tokens.len();
        let next = |forced: &[TokenId], allowed| {
            Ok(Next {
                forced: forced.to_vec(),
                allowed,
            })
        };
        let say = self.script.get(self.n_seen).copied().unwrap_or(Say::Even);
        match say {
            Say::Forced(forced) | Say::Last(forced) if !wants_forced => {
                // One after the other, each the only choice.
                self.script[self.n_seen] = Say::Even;
                let at = self.n_seen + 1;
                let rest = &forced[1..];
                let is_last = matches!(say, Say::Last(_));
                match (rest.is_empty(), is_last) {
                    (false, false) => self.script.insert(at, Say::Forced(rest)),
                    (false, true) => self.script.insert(at, Say::Last(rest)),
                    (true, true) => self.script.insert(at, Say::End),
                    (true, false) => {}
                }
                next(&[], Some(set(forced.iter().copied().take(1))))
            }
            Say::Forced(forced) => {
                self.n_seen += forced.len();
                next(forced, Some(even()))
            }
            Say::Last(forced) => next(forced, None),
            Say::Even => next(&[], Some(even())),
            Say::End => next(&[], None),
            Say::OnlyEnd => next(&[], Some(set([END].into_iter()))),
            Say::Nothing => next(&[], Some(set(std::iter::empty()))),
            Say::Fail => Err("too complex".to_owned()),
            Say::Panic => panic!("the script says so"),
        }
    }
}

fn constrained(script: &[Say], n_prompt: usize, max_tokens: u32) -> GenerationRequest {
    let mut request = greedy(prompt(4, n_prompt), max_tokens);
    request.logprobs = None; // else no token is forced
    request.constraint = Some(Arc::new(Script(script.to_vec())));
    request
}

#[test]
fn every_token_is_one_of_those_allowed() {
    for shape in [None, Some((1, 2, 1))] {
        for temperature in [0.0, 1.0] {
            let mut request = constrained(&[], 20, 30);
            request.sampling.temperature = temperature;
            request.sampling.seed = Some(3);
            let outcome = alone(shape, &request);
            assert_eq!(outcome.tokens.len(), 30);
            assert!(
                outcome
                    .tokens
                    .iter()
                    .all(|token| token % 2 == 0 && *token < END)
            );
        }
    }
}

#[test]
fn forced_tokens_come_as_they_are_and_the_rest_as_if_they_had_been_chosen() {
    let script = [Say::Even, Say::Forced(&[11, 13, 15]), Say::Even];
    let outcome = alone(None, &constrained(&script, 20, 9));
    assert_eq!(outcome.tokens.len(), 9);
    assert_eq!(outcome.tokens[1..4], [11, 13, 15]);
    // Whoever wants log-probabilities gets the same text, one token after the other.
    let mut request = constrained(&script, 20, 9);
    request.logprobs = Some(0);
    let with_logprobs = alone(None, &request);
    assert_eq!(with_logprobs.tokens, outcome.tokens);
    assert_eq!(with_logprobs.logprobs.len(), 9);
    // They are computed together: fewer steps.
    let steps = |request: &GenerationRequest| {
        let mut engine = engine_of(None, config());
        run(&mut engine, request);
        engine.stats().snapshot().quanta
    };
    assert!(steps(&constrained(&script, 20, 9)) < steps(&request));
}

/// A grammar that leaves one token asks for it like for any other: a ban is not passed by.
#[test]
fn a_forced_token_that_is_banned_ends_the_request_with_a_reason() {
    let script = [Say::Even, Say::Forced(&[11, 13, 15]), Say::Even];
    let mut request = constrained(&script, 20, 9);
    request.sampling.extra = Some(Arc::new(ExtraSampling {
        bad_words: vec![vec![13]],
        ..ExtraSampling::default()
    }));
    let mut engine = engine_of(None, config());
    let outcome = run(&mut engine, &request);
    assert_eq!(outcome.tokens.len(), 2, "those before the banned one");
    let error = outcome.failure.expect("no token is left").to_string();
    assert!(error.contains("bad_words"), "{error}");
    // Where nothing forced is banned the answer is the one without bans.
    request.sampling.extra = Some(Arc::new(ExtraSampling {
        bad_words: vec![vec![17]],
        ..ExtraSampling::default()
    }));
    let free = alone(None, &request);
    assert_eq!(free.tokens[1..4], [11, 13, 15]);
}

#[test]
fn answers_end_where_the_rules_say_or_where_they_must() {
    let cases: &[(&[Say], u32, &[TokenId], FinishReason)] = &[
        (&[Say::End], 9, &[], FinishReason::Stop),
        (&[Say::OnlyEnd], 9, &[], FinishReason::Stop),
        (&[Say::Last(&[5, 7])], 9, &[5, 7], FinishReason::Stop),
        (&[Say::Last(&[5, 7, 9])], 2, &[5, 7], FinishReason::Length),
        (
            &[Say::Forced(&[5, 7, 9])],
            3,
            &[5, 7, 9],
            FinishReason::Length,
        ),
    ];
    for (script, max_tokens, tokens, reason) in cases {
        let outcome = alone(None, &constrained(script, 20, *max_tokens));
        assert_eq!(outcome.tokens, *tokens, "{script:?}");
        assert_eq!(
            outcome.finish.expect("it ended well").0,
            *reason,
            "{script:?}"
        );
    }
    // The rules say where the end may be, so what else would forbid it does not count.
    let mut request = constrained(&[Say::Even, Say::OnlyEnd], 20, 9);
    request.stop.min_tokens = 5;
    request.stop.ignore_eos = true;
    assert_eq!(alone(None, &request).tokens.len(), 9); // an end token that counts as any other
    request.stop.ignore_eos = false;
    assert_eq!(alone(None, &request).tokens.len(), 1);
}

#[test]
fn case_18_rules_that_break_end_their_request_only() {
    let mut engine = engine_of(None, config());
    let free = greedy(prompt(1, 30), 20);
    let expected = alone(None, &free);
    let neighbour = submit(&mut engine, &free);
    let broken: Vec<_> = [Say::Fail, Say::Nothing, Say::Panic]
        .iter()
        .map(|say| submit(&mut engine, &constrained(&[Say::Even, *say], 10, 9)))
        .collect();
    drain(&mut engine);
    assert_eq!(neighbour.lock().clone(), expected);
    for (outcome, word) in broken
        .iter()
        .zip(["too complex", "no token", "thread failed"])
    {
        let outcome = outcome.lock();
        assert_eq!(outcome.tokens.len(), 1);
        let failure = outcome.failure.clone().expect("it failed").to_string();
        assert!(failure.contains(word), "{failure}");
    }
    // The threads live on.
    assert_eq!(run(&mut engine, &constrained(&[], 10, 5)).tokens.len(), 5);
}

#[test]
fn a_crowd_a_pause_and_a_preemption_change_nothing() {
    let script = [Say::Even, Say::Forced(&[11, 13, 15]), Say::Even, Say::Even];
    let requests: Vec<GenerationRequest> = (0..6)
        .map(|i| match i % 2 {
            0 => constrained(&script, 12 + i, 40),
            _ => greedy(prompt(i as u32, 15), 40),
        })
        .collect();
    let expected: Vec<Outcome> = requests
        .iter()
        .map(|request| alone(None, request))
        .collect();
    let mut small = config();
    small.context_length = Some(64);
    small.kv_tokens = Some(112); // not enough for all
    for pauses in [false, true] {
        let mut engine = engine_of(None, small.clone());
        let outcomes: Vec<_> = requests.iter().map(|r| submit(&mut engine, r)).collect();
        let mut n_steps = 0;
        while !engine.is_idle() {
            step(&mut engine);
            n_steps += 1;
            let id = requests[n_steps % 6].id;
            if pauses {
                engine.park(id);
                step(&mut engine);
                engine.resume(id);
            }
        }
        for (outcome, expected) in outcomes.iter().zip(&expected) {
            assert_eq!(
                outcome.lock().clone().without_cache_count(),
                expected.clone().without_cache_count()
            );
        }
        assert!(pauses || engine.stats().snapshot().preemptions > 0);
    }
}

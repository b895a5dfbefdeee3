//! What a stream and a ticket give: chunks, text, stop strings, one end.

use crate::support::{Bench, request};
use std::sync::Arc;
use std::time::Duration;
use tinyloop::config::ExecutorConfig;
use tinyloop::request::{
    FinishReason, GenerationEvent, GenerationRequest, RequestError, StopRules,
};
use tinyloop::runtime::fake::{self, FakeRuntime, Pace};
use tinyloop::scheduler::{StreamEvent, SubmitOptions};
use tinyloop::tokenizer::Tokenizer;

#[test]
fn a_stream_gives_chunks_then_its_end() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    let mut stream = bench.stream(request(2));
    bench.executor.drive();
    assert_eq!(stream.recv_timeout(Duration::ZERO), StreamEvent::TimedOut);
    let id = stream.id();
    bench.step(id);
    let StreamEvent::Chunk(chunk) = stream.recv_timeout(Duration::ZERO) else {
        panic!("a token is there");
    };
    assert_eq!(chunk.token_id, Some(7));
    assert!(stream.outcome().is_none());
    bench.finish(id);
    let rest: Vec<_> = stream.by_ref().collect();
    assert_eq!(rest.len(), 1);
    assert_eq!(rest[0].as_ref().expect("a chunk").token_id, Some(8));
    let outcome = stream.outcome().cloned().expect("it ended").expect("well");
    assert_eq!(outcome.usage.completion_tokens, 2);
    assert_eq!(stream.recv(), StreamEvent::Finished(outcome)); // again and again
    assert!(stream.next().is_none());
}

#[test]
fn an_error_comes_after_the_last_chunk_and_once() {
    let bench = Bench::stepped(1, ExecutorConfig::default());
    let mut stream = bench.stream(request(5));
    bench.executor.drive();
    bench.step(stream.id());
    bench.runtime().fail(stream.id(), "boom");
    bench.executor.drive();
    let fault = RequestError::Fault("boom".to_owned());
    assert!(stream.next().expect("the chunk").is_ok());
    assert_eq!(stream.next(), Some(Err(fault.clone())));
    assert_eq!(stream.next(), None);
    assert_eq!(stream.recv(), StreamEvent::Failed(fault));
}

/// A stepped runtime whose answers are these bytes, one token each.
fn speaking(text: &'static str) -> FakeRuntime {
    let tokenizer = Some(Arc::new(Tokenizer::bytes()));
    let script = move |request: &GenerationRequest| {
        let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
        fake::answer(request, &tokens, FinishReason::Length)
    };
    FakeRuntime::new(
        fake::capability(1),
        Pace::Stepped,
        tokenizer,
        Box::new(script),
    )
}

#[test]
fn text_is_held_until_it_is_certain_and_logprobs_ride_with_it() {
    let bench = Bench::with(vec![speaking("aé")], ExecutorConfig::default());
    let mut asked = request(9);
    asked.logprobs = Some(1);
    asked.prompt_logprobs = Some(1);
    let mut stream = bench.stream(asked);
    bench.executor.drive();
    bench.finish(stream.id());
    let chunks: Vec<_> = stream
        .by_ref()
        .map(|chunk| chunk.expect("no error"))
        .collect();
    let seen: Vec<_> = chunks
        .iter()
        .map(|c| (c.text.as_str(), c.logprobs.len()))
        .collect();
    assert_eq!(seen, [("a", 1), ("", 0), ("é", 2)]);
    assert_eq!(stream.prompt_logprobs().map(<[_]>::len), Some(2));
}

#[test]
fn a_stop_string_ends_the_answer_as_done_and_takes_the_job_back() {
    for (include_stop_string, expected) in [(false, "so "), (true, "so END")] {
        let bench = Bench::with(vec![speaking("so END of it")], ExecutorConfig::default());
        let mut asked = request(99);
        asked.stop = StopRules {
            strings: vec!["END".to_owned()],
            include_stop_string,
            ..StopRules::default()
        };
        let ticket = bench
            .executor
            .submit(asked, SubmitOptions::default())
            .expect("room");
        bench.executor.drive();
        for _ in 0.."so END o".len() {
            bench.step(ticket.id()); // two tokens beyond the stop are on their way already
        }
        let result = ticket.wait().expect("done");
        assert_eq!(result.text, expected);
        assert_eq!(result.outcome.finish_reason, FinishReason::Stop);
        assert_eq!(result.outcome.stop_idx, Some(0));
        assert_eq!(result.outcome.usage.completion_tokens, 6);
        assert_eq!(bench.counts(), (0, 1)); // until the driver has taken it back
        bench.executor.drive();
        assert_eq!(bench.counts(), (0, 0));
        let outcome = |outcome| {
            bench.metric(&format!(
                "tinyloop_requests_total{{model=\"m\",outcome=\"{outcome}\"}}"
            ))
        };
        assert_eq!((outcome("done"), outcome("cancelled")), (1.0, 0.0));
    }
}

#[test]
fn text_without_tokens_streams_and_stops_too() {
    let script = |_: &GenerationRequest| {
        ["one ST", "OP two", "three"]
            .map(|text| GenerationEvent::Text {
                text: text.to_owned(),
                logprobs: Vec::new(),
            })
            .into()
    };
    let runtime = FakeRuntime::new(fake::capability(1), Pace::Stepped, None, Box::new(script));
    let bench = Bench::with(vec![runtime], ExecutorConfig::default());
    let mut asked = request(9);
    asked.stop.strings = vec!["STOP".to_owned()];
    let mut stream = bench.stream(asked);
    bench.executor.drive();
    bench.finish(stream.id());
    let text: String = stream
        .by_ref()
        .map(|chunk| chunk.expect("no error").text)
        .collect();
    assert_eq!(text, "one ");
}

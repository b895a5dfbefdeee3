//! The parser against what models of each family write, and the same cut everywhere.

use super::*;
use proptest::prelude::*;
use std::sync::Arc;

fn options(family: Option<Family>, thinks: Option<bool>) -> Arc<ParserOptions> {
    let tool = |name: &str| ToolShape {
        name: name.to_owned(),
        text_parameters: vec!["city".to_owned()],
    };
    Arc::new(ParserOptions {
        calls: family.map(|family| CallOptions {
            family,
            tools: vec![tool("weather"), tool("add")],
            must_call: false,
        }),
        reasoning: thinks.map(|is_open| ReasoningOptions {
            marks: THINK_MARKS[0],
            is_open,
        }),
    })
}

/// What an answer comes to: reasoning, text, calls.
#[derive(Debug, Default, PartialEq)]
struct Joined {
    reasoning: String,
    text: String,
    calls: Vec<(String, String)>,
}

fn parse<'a>(options: &Arc<ParserOptions>, pieces: impl Iterator<Item = &'a str>) -> Joined {
    let mut parser = AnswerParser::new(Arc::clone(options));
    let mut parts = Vec::new();
    for piece in pieces {
        parser.push(piece.to_owned(), &mut parts);
    }
    parser.finish(&mut parts);
    assert!(parts.iter().all(|part| !part.is_empty()));
    let mut joined = Joined::default();
    for part in parts {
        match part {
            Part::Text(text) => joined.text.push_str(&text),
            Part::Reasoning(text) => joined.reasoning.push_str(&text),
            Part::CallBegin { index, name } => {
                assert_eq!(index as usize, joined.calls.len());
                joined.calls.push((name, String::new()));
            }
            Part::CallArguments { index, fragment } => {
                assert_eq!(index as usize + 1, joined.calls.len());
                let call = joined.calls.last_mut().expect("a call has begun");
                call.1.push_str(&fragment);
            }
        }
    }
    assert_eq!(parser.has_calls(), !joined.calls.is_empty());
    joined
}

/// Whole, character by character, and cut in two everywhere.
#[track_caller]
fn check(options: &Arc<ParserOptions>, text: &str, expected: (&str, &str, &[(&str, &str)])) {
    let (reasoning, shown, calls) = expected;
    let calls = calls.iter();
    let expected = Joined {
        reasoning: reasoning.to_owned(),
        text: shown.to_owned(),
        calls: calls
            .map(|(name, args)| ((*name).to_owned(), (*args).to_owned()))
            .collect(),
    };
    assert_eq!(parse(options, [text].into_iter()), expected, "{text:?}");
    let single = text.split_inclusive(|_: char| true);
    assert_eq!(parse(options, single), expected, "{text:?} by characters");
    for cut in (0..text.len()).filter(|cut| text.is_char_boundary(*cut)) {
        let halves = [&text[..cut], &text[cut..]];
        assert_eq!(
            parse(options, halves.into_iter()),
            expected,
            "{text:?} at {cut}"
        );
    }
}

const ARGS: &str = r#"{"city": "Graz \"<x>\" }", "days": 2}"#;

#[test]
fn every_family_is_read() {
    let fence = format!(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ARGS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    );
    let plain = format!(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGS}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    );
    #[rustfmt::skip]
    let table = [
        (Family::Hermes, format!("<tool_call>\n{{\"name\": \"weather\", \"arguments\": {ARGS}}}\n</tool_call>\n<tool_call>\n{{\"name\": \"add\", \"arguments\": {{}}}}\n</tool_call>")),
        (Family::Hermes, format!("<tool_call>[{{\"name\": \"weather\", \"arguments\": {ARGS}}}, {{\"name\": \"add\"}}]</tool_call>")),
        (Family::Hermes, format!("<tool_call>{{\"arguments\": {ARGS}, \"name\": \"weather\"}}</tool_call>\n<tool_call>{{\"type\": \"function\", \"function\": {{\"name\": \"add\", \"arguments\": {{}}}}}}</tool_call>\n")),
        (Family::Generic, format!("{{\"name\": \"weather\", \"arguments\": {ARGS}}}\n{{\"name\": \"add\", \"arguments\": null}}")),
        (Family::Llama3, format!("{{\"name\": \"weather\", \"parameters\": {ARGS}}}; {{\"name\": \"add\", \"parameters\": {{}}}}")),
        (Family::Llama3, format!("<|python_tag|>{{\"type\": \"function\", \"name\": \"weather\", \"parameters\": {ARGS}}}; {{\"name\": \"add\", \"parameters\": {{}}}}")),
        (Family::Mistral, format!("[TOOL_CALLS][{{\"name\": \"weather\", \"arguments\": {ARGS}, \"id\": \"abc123def\"}}, {{\"name\": \"add\", \"arguments\": {{}}}}]")),
        (Family::Mistral, format!("[TOOL_CALLS]weather[ARGS]{ARGS}[TOOL_CALLS]add[CALL_ID]x1[ARGS]{{}}")),
        (Family::Mistral, format!("[TOOL_CALLS] weather{ARGS} [TOOL_CALLS]add{{}}")),
        (Family::DeepSeek, format!("<tool_call>{{\"name\": \"weather\", \"arguments\": {ARGS}}}</tool_call><tool_call>{{\"name\": \"add\", \"arguments\": {{}}}}</tool_call>")),
        (Family::DeepSeek, fence),
        (Family::DeepSeek, plain),
        (Family::Command, format!("<|START_ACTION|>[\n {{\"tool_call_id\": \"0\", \"tool_name\": \"weather\", \"parameters\": {ARGS}}},\n {{\"tool_call_id\": \"1\", \"tool_name\": \"add\", \"parameters\": {{}}}}\n]<|END_ACTION|>")),
        (Family::ToolCallToken, format!("<|tool_call|>[{{\"name\": \"weather\", \"arguments\": {ARGS}}}, {{\"name\": \"add\", \"arguments\": {{}}}}]<|/tool_call|>")),
    ];
    for (family, text) in table {
        let compact = ARGS.replace(": ", ":").replace(", ", ",");
        let held = text.contains("{\"arguments\"");
        let arguments = if held { compact.as_str() } else { ARGS };
        let calls = [("weather", arguments), ("add", "{}")];
        check(&options(Some(family), None), &text, ("", "", &calls));
    }
}

#[test]
fn forms_without_json_become_json() {
    let pythonic = options(Some(Family::Pythonic), None);
    let text = r#"[weather(city="Graz", days=2), add(x=[1, None], y={'a': True})]"#;
    let calls = [
        ("weather", r#"{"city":"Graz","days":2}"#),
        ("add", r#"{"x":[1,null],"y":{"a":true}}"#),
    ];
    check(&pythonic, text, ("", "", &calls));
    let marked = format!("<|python_start|>{text}<|python_end|>");
    check(&pythonic, &marked, ("", "", &calls));
    check(&options(Some(Family::Llama3), None), text, ("", "", &calls));
    let xml = "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n2\n</parameter>\n\
               </function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=x>\nif a < b:\n    \"c\"\n</parameter>\n</function>\n</tool_call>";
    let calls = [
        ("weather", r#"{"city":"12","days":2}"#),
        ("add", r#"{"x":"if a < b:\n    \"c\""}"#),
    ];
    let hermes = options(Some(Family::Hermes), None);
    check(&hermes, xml, ("", "", &calls));
    let quoted = r#"<tool_call>{"name": "add", "arguments": "{\"x\": 1}"}</tool_call>"#;
    check(&hermes, quoted, ("", "", &[("add", r#"{"x": 1}"#)]));
}

#[test]
fn text_stands_beside_calls() {
    let hermes = options(Some(Family::Hermes), None);
    let text = "I look.\n\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"x\": 1}}\n</tool_call>\nThen < that.";
    let call = [("add", r#"{"x": 1}"#)];
    check(&hermes, text, ("", "I look.\nThen < that.", &call));
    let command = options(Some(Family::Command), None);
    let text = "<|START_RESPONSE|>Hello<|END_RESPONSE|>";
    check(&command, text, ("", "Hello", &[]));
}

#[test]
fn what_is_no_call_is_text() {
    let hermes = options(Some(Family::Hermes), None);
    for text in [
        "<tool_call>",
        "<tool_call>\n{\"name\": \"add\"",
        "<tool_call>\n{\"name\": \"add\", \"what\": 1}\n</tool_call>",
        "<tool_call>nothing</tool_call>",
        "a <tool_call>\n{\"name\": 3, \"arguments\": {}}</tool_call> b",
        "a <tool_cal and <tool_call>\n[]</tool_call>",
        "{\"name\": \"unknown\", \"arguments\": {}}",
        "{\"name\": \"add\", \"age\": 3}",
        "[1, 2, 3]",
        "[unknown(a=1)]",
        "{",
        " \n ",
        "plain text, nothing else \n",
        "<tool_call><function=add><parameter=x>1</function>",
        "<tool_call>{\"name\": \"a b\", \"arguments\": {}}</tool_call>",
    ] {
        check(&hermes, text, ("", text, &[]));
    }
    for (family, text) in [
        (Family::Mistral, "[TOOL_CALLS]"),
        (Family::Mistral, "[TOOL_CALLS][1]"),
        (Family::Mistral, "[INST]x"),
        (Family::DeepSeek, "<｜tool▁calls▁begin｜>x"),
        (Family::Llama3, "<|python_tag|>print(1)"),
    ] {
        check(&options(Some(family), None), text, ("", text, &[]));
    }
    // Without tools nothing is looked for.
    let text = "<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_call>";
    check(&options(None, None), text, ("", text, &[]));
}

#[test]
fn calls_that_break_off_keep_what_there_is() {
    let hermes = options(Some(Family::Hermes), None);
    #[rustfmt::skip]
    let table = [
        ("<tool_call>{\"name\": \"add\", \"arguments\": {\"x\": \"a", "{\"x\": \"a"),
        ("<tool_call>{\"name\": \"add\", \"arguments\": {\"x\": 1}", "{\"x\": 1}"),
        ("<tool_call>{\"name\": \"add\", \"arguments\": {\"x\": 1}}\n</tool_", "{\"x\": 1}"),
        ("<tool_call>{\"name\": \"add\", \"arguments\": {\"x\": 1}}</tool_call>\n<tool_", "{\"x\": 1}"),
        ("<tool_call>{\"name\": \"add\", \"arguments\": {\"x\": 1}</tool_call>", "{\"x\": 1}"),
        ("<tool_call>{\"name\": \"add\", \"arguments\": {\"x\": [1</tool_call>", "{\"x\": [1"),
    ];
    for (text, arguments) in table {
        check(&hermes, text, ("", "", &[("add", arguments)]));
    }
}

/// The parts of a text, and whether it ends within a call.
fn ends(options: &Arc<ParserOptions>, text: &str) -> (Vec<Part>, bool) {
    let mut parser = AnswerParser::new(Arc::clone(options));
    let mut parts = Vec::new();
    parser.push(text.to_owned(), &mut parts);
    parser.finish(&mut parts);
    (parts, parser.ends_in_call())
}

#[test]
fn a_call_that_was_cut_is_told_from_a_whole_one() {
    let hermes = options(Some(Family::Hermes), None);
    let start = "<tool_call>{\"name\": \"add\", \"arguments\": ";
    #[rustfmt::skip]
    let table = [
        ("{\"x\": \"", true), ("{", true), ("\"{", true), ("nul", true),
        ("{\"x\": 1}", false), ("{\"x\": 1}}", false), ("{}}</tool_call>", false),
        ("{}}</tool_call>\n<tool_call>", false),
    ];
    for (rest, is_cut) in table {
        let text = format!("{start}{rest}");
        assert_eq!(ends(&hermes, &text).1, is_cut, "{text}");
    }
    let second = format!("{start}{{}}}}</tool_call>{start}{{\"x");
    assert!(ends(&hermes, &second).1);
    assert!(!ends(&hermes, "plain").1);
}

#[test]
fn a_forced_call_that_was_cut_before_its_arguments_is_no_text() {
    let mut forced = (*options(Some(Family::Hermes), Some(false))).clone();
    if let Some(calls) = forced.calls.as_mut() {
        calls.must_call = true;
    }
    let forced = Arc::new(forced);
    for text in [
        "<",
        "<tool_call>",
        "<tool_call>\n{\"name\": \"ad",
        "{\"name\": \"add\", ",
    ] {
        assert_eq!(ends(&forced, text), (Vec::new(), true), "{text}");
    }
    let thought = Part::Reasoning("hm".into());
    let found = ends(&forced, "<think>hm</think><tool");
    assert_eq!(found, (vec![thought], true));
    let whole = "<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
    let (parts, is_cut) = ends(&forced, &format!("{whole}\n<tool_call>\n{{\"na"));
    assert_eq!((parts.len(), is_cut), (2, false), "{parts:?}");
}

#[test]
fn a_further_call_that_was_cut_before_its_arguments_is_no_text() {
    let hermes = options(Some(Family::Hermes), None);
    let whole = "<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
    let calls = &[("add", "{}")][..];
    for rest in [
        "\n<tool_call>",
        "\n<tool_call>\n{\"na",
        "\n<tool_call>\n{\"name\": \"add\", \"arg",
    ] {
        check(&hermes, &format!("{whole}{rest}"), ("", "", calls));
    }
    // What cannot become a call is text all the same.
    check(
        &hermes,
        &format!("{whole}\n<tool_call>5"),
        ("", "\n<tool_call>5", calls),
    );
}

#[test]
fn thoughts_are_told_from_the_answer() {
    let call = "<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
    let calls: &[(&str, &str)] = &[("add", "{}")];
    for family in [None, Some(Family::Hermes)] {
        let closed = options(family, Some(false));
        let open = options(family, Some(true));
        let text = "<think>\nhm < </thin k\n</think>\n\nYes  <think>no";
        check(&closed, text, ("hm < </thin k", "Yes  <think>no", &[]));
        check(&open, "\nhm\n</think>\n\nYes", ("hm", "Yes", &[]));
        check(&open, "hm", ("hm", "", &[]));
        check(&closed, "no thoughts", ("", "no thoughts", &[]));
        check(
            &closed,
            "a <think>b</think>",
            ("", "a <think>b</think>", &[]),
        );
        check(&closed, "<thin", ("", "<thin", &[]));
        check(&closed, "<think></think>", ("", "", &[]));
    }
    let hermes = options(Some(Family::Hermes), Some(true));
    let text = format!("hm\n</think>\n\n{call}");
    check(&hermes, &text, ("hm", "", calls));
    let bare = "hm</think>{\"name\": \"add\", \"arguments\": {}}";
    check(&hermes, bare, ("hm", "", calls));
}

#[test]
fn arguments_come_as_they_are_written() {
    let mut parser = AnswerParser::new(options(Some(Family::Hermes), None));
    let mut parts = Vec::new();
    let mut after = |parser: &mut AnswerParser, text: &str| {
        parts.clear();
        parser.push(text.to_owned(), &mut parts);
        parts.clone()
    };
    assert_eq!(after(&mut parser, "Ok <tool"), [Part::Text("Ok".into())]);
    assert_eq!(after(&mut parser, "_call>{\"name\": \"add\", \"argum"), []);
    let begin = Part::CallBegin {
        index: 0,
        name: "add".into(),
    };
    let fragment = |fragment: &str| Part::CallArguments {
        index: 0,
        fragment: fragment.into(),
    };
    let parts = after(&mut parser, "ents\": {\"x\"");
    assert_eq!(parts, [begin, fragment("{\"x\"")]);
    assert_eq!(after(&mut parser, ": 1"), [fragment(": 1")]);
    assert_eq!(after(&mut parser, "}}</tool_call>"), [fragment("}")]);
}

fn some_text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        prop::sample::select(vec![
            "<tool_call>",
            "</tool_call>",
            "<think>",
            "</think>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "add",
            "weather",
            "{\"name\": \"add\", \"arguments\": ",
            "{\"x\": 1}",
            "{\"name\": \"add\", \"arguments\": {}}",
            "}",
            "{",
            "[",
            "]",
            ",",
            ";",
            "\n",
            " ",
            "\"",
            "\\",
            "<",
            "</",
            "<function=add>",
            "<parameter=x>",
            "</parameter>",
            "</function>",
            "add(x=1)",
            "<|python_tag|>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "```",
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            "é",
            "1",
        ])
        .prop_map(str::to_owned),
        "[a-z<{\\[\" ]{0,3}",
    ];
    prop::collection::vec(piece, 0..14).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn any_cuts_give_the_same_parts(
        text in some_text(),
        family in prop::sample::select(Family::ALL.to_vec()),
        thinks in prop::sample::select(vec![None, Some(false), Some(true)]),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
    ) {
        let options = options(Some(family), thinks);
        let whole = parse(&options, [text.as_str()].into_iter());
        let single = parse(&options, text.split_inclusive(|_: char| true));
        prop_assert_eq!(&whole, &single);
        let mut places: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        places.retain(|place| text.is_char_boundary(*place));
        places.sort_unstable();
        let starts = std::iter::once(0).chain(places.iter().copied());
        let ends = places.iter().copied().chain([text.len()]);
        let pieces: Vec<&str> = starts.zip(ends).map(|(start, end)| &text[start..end]).collect();
        prop_assert_eq!(&whole, &parse(&options, pieces.into_iter()));
        // Nothing is lost where no call was found: all but white space is there.
        if whole.calls.is_empty() && family != Family::Command && thinks.is_none() {
            prop_assert_eq!(whole.text, text);
        }
    }
}

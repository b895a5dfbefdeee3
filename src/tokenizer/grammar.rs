//! From a JSON schema, a grammar, an expression or a list of texts to rules over a vocabulary's tokens.
//!
//! The work is done by the `llguidance` crate (an Earley parser over bytes, a lexer of derivatives, a
//! prefix tree of the vocabulary). A compiler is made once per vocabulary, at the first constraint that
//! is wanted; a compiled grammar is kept for a while, since clients send the same schema with every
//! request. The caller waits for the thread `grammar`, which compiles, never the engine's: a long chain of
//! references needs a large stack, and a stack that is too small would end the process. Size and work are
//! bounded before (`grammar_bounds`); a panic inside is an error of that request. What is not here: when the
//! sets of tokens are computed (`engine/masks`), which fields of which API ask for it (`http`).

use super::grammar_bounds::{
    CHOICE_BYTES_MAX, REGEX_BYTES_MAX, check_bytes, check_lark, check_schema,
};
use super::{EncodeOptions, Tokenizer, gbnf};
use crate::constraint::{Constraint, ConstraintSource, Next, TokenSet};
use crate::request::TokenId;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// Compiled grammars kept per vocabulary.
const N_KEPT: usize = 32;
/// Longest text of a grammar or schema in bytes; those of tools with many functions reach 100 KB.
const GRAMMAR_BYTES_MAX: usize = 512 << 10;
/// Most texts of a choice: beyond it the parser's bounds are met anyway, after long work.
const CHOICES_MAX: usize = 1000;
/// Stack of the thread that compiles: ten kilobytes for each of the rules or references that can stand in a
/// chain within the bounds, several times over. Only what is used of it is ever there.
const STACK_BYTES: usize = 256 << 20;
/// Most items of one row of the parser: twice what `grammar_bounds` lets an object need, since a row may hold
/// what follows the object as well.
const ROW_ITEMS_MAX: usize = 4000;
/// Space between the parts of a JSON text: at most one line break with its indentation. Without an end
/// a small model can go on with spaces for ever.
const JSON_SPACE: &str = r"[ ]?|\n[ ]{0,16}";

/// What an answer must look like.
#[derive(Clone, Debug, PartialEq)]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema admits.
    JsonSchema(Value),
    /// A context-free grammar: GBNF from `root`, or the crate's dialect of Lark from `start`.
    ContextFree(String),
    /// The crate's dialect of Lark from `start`, written here and not by a client.
    Lark(String),
    /// The whole answer matches.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
}

/// Why a grammar cannot be used: what is wrong with it, in words for its author.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GrammarError(pub String);

/// Compiles grammars for one vocabulary.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    factory: OnceLock<Result<ParserFactory, String>>,
    /// The latest used last.
    kept: Mutex<VecDeque<(String, Arc<Compiled>)>>,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars")
            .field("kept", &self.kept.lock().len())
            .finish_non_exhaustive()
    }
}

impl Grammars {
    /// For this vocabulary. Costs nothing until something is compiled.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self {
            tokenizer,
            factory: OnceLock::new(),
            kept: Mutex::default(),
        }
    }

    /// Rules over the vocabulary's tokens.
    ///
    /// # Errors
    /// When the grammar is broken, cannot be satisfied, uses what is not supported, or is too large.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Arc<dyn ConstraintSource>, GrammarError> {
        let key = format!("{spec:?}");
        if key.len() > GRAMMAR_BYTES_MAX {
            return Err(GrammarError(format!(
                "the grammar has {} bytes; at most {GRAMMAR_BYTES_MAX} are compiled",
                key.len()
            )));
        }
        if let Some(compiled) = self.take_kept(&key) {
            return Ok(compiled);
        }
        let factory = self.factory.get_or_init(|| factory(&self.tokenizer));
        let factory = factory.as_ref().map_err(|why| {
            GrammarError(format!(
                "the model's vocabulary cannot follow grammars: {why}"
            ))
        })?;
        let compiled = Arc::new(compile(factory, spec)?);
        let mut kept = self.kept.lock();
        if kept.len() == N_KEPT {
            kept.pop_front();
        }
        kept.push_back((key, Arc::clone(&compiled)));
        drop(kept);
        Ok(compiled)
    }

    fn take_kept(&self, key: &str) -> Option<Arc<Compiled>> {
        let mut kept = self.kept.lock();
        let place = kept.iter().position(|(known, _)| known == key)?;
        let entry = kept.remove(place)?;
        let compiled = Arc::clone(&entry.1);
        kept.push_back(entry);
        Some(compiled)
    }
}

/// A compiled grammar before its first token.
struct Compiled {
    /// Behind a lock because the parser fills caches even when it is only copied.
    beginning: Mutex<Matcher>,
}

impl fmt::Debug for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Compiled")
    }
}

impl ConstraintSource for Compiled {
    fn begin(&self) -> Box<dyn Constraint> {
        // A deep copy shares no lexer with others, so that one request cannot use up another's bounds.
        Box::new(Within(self.beginning.lock().deep_clone()))
    }
}

/// A parser somewhere within an answer.
struct Within(Matcher);

impl Constraint for Within {
    fn advance(&mut self, tokens: &[TokenId], wants_forced: bool) -> Result<Next, String> {
        let matcher = &mut self.0;
        let failed = |error: &dyn fmt::Display| in_words(&error.to_string());
        matcher.consume_tokens(tokens).map_err(|e| failed(&e))?;
        let forced = match wants_forced && !matcher.is_stopped() {
            true => matcher.consume_ff_tokens(),
            false => Vec::new(),
        };
        if let Some(error) = matcher.get_error() {
            return Err(in_words(&error));
        }
        let allowed = match matcher.is_stopped() {
            true if !matcher.stop_reason().is_ok() => {
                return Err(in_words(&matcher.stop_reason().to_string()));
            }
            true => None,
            false => {
                let mask = matcher.compute_mask().map_err(|e| failed(&e))?;
                Some(TokenSet::from_words(mask.as_slice().to_vec()))
            }
        };
        // Computing the mask may find that nothing can follow.
        let allowed = allowed.filter(|_| !matcher.is_stopped());
        Ok(Next { forced, allowed })
    }
}

/// The crate's error for people: without its marks, and its bare word for a dead end explained.
fn in_words(error: &str) -> String {
    let error = error.replace("<non-verbose/>", "");
    match error.trim() {
        "NoExtensionBias" | "NoExtension" => "no text satisfies it".to_owned(),
        other => other.to_owned(),
    }
}

/// The vocabulary as the parser sees it.
struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let plain = EncodeOptions {
            add_special: false,
            parse_special: false,
        };
        let encode = |text: &str| self.tokenizer.encode(text, plain);
        self.trie.tokenize_with_greedy_fallback(bytes, encode)
    }

    fn tokenize_is_canonical(&self) -> bool {
        // A SentencePiece encoder puts a space before a text, which is not what comes next.
        !self.tokenizer.adds_space_prefix()
    }
}

fn factory(tokenizer: &Arc<Tokenizer>) -> Result<ParserFactory, String> {
    let end_tokens = tokenizer.end_tokens();
    let Some(&eos) = tokenizer.eos().as_ref().or(end_tokens.first()) else {
        return Err("it has no end-of-generation token".to_owned());
    };
    let word = |token: TokenId| {
        let bytes = tokenizer.token_bytes(token);
        match tokenizer.is_control(token) {
            // Never part of a text.
            true => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
            false => bytes.to_vec(),
        }
    };
    let n_tokens = tokenizer.vocab_size() as TokenId;
    let words: Vec<Vec<u8>> = (0..n_tokens).map(word).collect();
    let info = TokRxInfo::new(n_tokens, eos);
    let mut ends = vec![eos];
    ends.extend(end_tokens.iter().filter(|token| **token != eos));
    let vocabulary = Vocabulary {
        tokenizer: Arc::clone(tokenizer),
        trie: TokTrie::from(&info, &words).with_eos_tokens(&ends),
    };
    let environment: TokEnv = Arc::new(vocabulary);
    let capabilities = InferenceCapabilities {
        ff_tokens: true,
        ..InferenceCapabilities::default()
    };
    let slices = SlicedBiasComputer::general_slices();
    let mut factory = ParserFactory::new(&environment, capabilities, &slices)
        .map_err(|error| error.to_string())?;
    factory.quiet();
    *factory.limits_mut() = ParserLimits {
        max_items_in_row: ROW_ITEMS_MAX,
        verbose_errors: false, // else the text so far would stand in errors
        ..ParserLimits::default()
    };
    Ok(factory)
}

/// On a thread of its own, for its stack.
fn compile(factory: &ParserFactory, spec: &GrammarSpec) -> Result<Compiled, GrammarError> {
    let grammar = top_level(spec)?;
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("grammar".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, || compile_here(factory, grammar))
            .map_err(|error| GrammarError(format!("no thread to compile the grammar: {error}")))?;
        let compiled = thread.join();
        compiled.unwrap_or_else(|_| Err(GrammarError("the grammar cannot be compiled".to_owned())))
    })
}

fn compile_here(
    factory: &ParserFactory,
    grammar: TopLevelGrammar,
) -> Result<Compiled, GrammarError> {
    let matcher = Matcher::new(factory.create_parser(grammar));
    if let Some(error) = matcher.get_error() {
        return Err(GrammarError(in_words(&error)));
    }
    // A grammar that nothing satisfies, or whose first step is too much work, shows here, not within
    // somebody's answer.
    for wants_forced in [true, false] {
        let mut trial = Within(matcher.deep_clone());
        trial.advance(&[], wants_forced).map_err(GrammarError)?;
    }
    Ok(Compiled {
        beginning: Mutex::new(matcher),
    })
}

/// A schema as a value within a Lark grammar.
#[must_use]
pub fn schema_in_lark(schema: &Value) -> String {
    let mut schema = schema.clone();
    if let Value::Object(fields) = &mut schema {
        // The crate's own key: it never comes from a client.
        let options = json!({"whitespace_flexible": true, "whitespace_pattern": JSON_SPACE});
        fields.insert("x-guidance".to_owned(), options);
    }
    format!("%json {schema}")
}

impl GrammarSpec {
    /// The same as a value within a Lark grammar.
    ///
    /// # Errors
    /// When it is no sound grammar.
    pub fn in_lark(&self) -> Result<String, GrammarError> {
        Ok(match self {
            Self::JsonObject => schema_in_lark(&json!({"type": "object"})),
            Self::JsonSchema(schema @ Value::Object(_)) => schema_in_lark(schema),
            Self::JsonSchema(_) => schema_in_lark(&json!({})),
            Self::ContextFree(text) if gbnf::is_gbnf(text) => {
                let lark = gbnf::to_lark(text).map_err(GrammarError)?;
                format!("%lark {{\n{lark}\n}}")
            }
            Self::ContextFree(text) | Self::Lark(text) => format!("%lark {{\n{text}\n}}"),
            Self::Regex(text) => format!("/{}/", text.replace('/', "\\/")),
            Self::Choice(texts) => {
                let quoted = texts.iter().map(|text| json!(text).to_string());
                format!("({})", quoted.collect::<Vec<_>>().join(" | "))
            }
        })
    }
}

fn top_level(spec: &GrammarSpec) -> Result<TopLevelGrammar, GrammarError> {
    let json = |mut schema: Value| {
        if let Value::Object(fields) = &mut schema {
            // The crate's own key: it never comes from a client.
            let options = json!({"whitespace_flexible": true, "whitespace_pattern": JSON_SPACE});
            fields.insert("x-guidance".to_owned(), options);
        }
        TopLevelGrammar::from_json_schema(schema)
    };
    let lark = |text: String| match check_lark(&text) {
        Ok(()) => Ok(TopLevelGrammar::from_lark(text)),
        Err(why) => Err(GrammarError(why)),
    };
    Ok(match spec {
        GrammarSpec::JsonObject => json(json!({"type": "object"})),
        GrammarSpec::JsonSchema(schema @ (Value::Object(_) | Value::Bool(true))) => {
            check_schema(schema).map_err(GrammarError)?;
            json(schema.clone())
        }
        GrammarSpec::JsonSchema(_) => {
            return Err(GrammarError("a JSON schema is an object".to_owned()));
        }
        GrammarSpec::ContextFree(text) if gbnf::is_gbnf(text) => {
            lark(gbnf::to_lark(text).map_err(GrammarError)?)?
        }
        GrammarSpec::ContextFree(text) => lark(text.clone())?,
        GrammarSpec::Regex(text) => {
            check_bytes("the expression", text.len(), REGEX_BYTES_MAX).map_err(GrammarError)?;
            TopLevelGrammar::from_regex(text)
        }
        GrammarSpec::Lark(text) => lark(text.clone())?,
        GrammarSpec::Choice(texts) => {
            if texts.is_empty() || texts.iter().any(String::is_empty) {
                let wrong = "a choice is among at least one text, none of them empty";
                return Err(GrammarError(wrong.to_owned()));
            }
            if texts.len() > CHOICES_MAX {
                let n_texts = texts.len();
                return Err(GrammarError(format!(
                    "a choice is among at most {CHOICES_MAX} texts, not {n_texts}"
                )));
            }
            let n_bytes = texts.iter().map(String::len).sum();
            check_bytes("the choice", n_bytes, CHOICE_BYTES_MAX).map_err(GrammarError)?;
            let quoted = texts.iter().map(|text| json!(text).to_string());
            let alternatives: Vec<String> = quoted.collect();
            TopLevelGrammar::from_lark(format!("start: {}", alternatives.join(" | ")))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grammars() -> Grammars {
        Grammars::new(Arc::new(Tokenizer::bytes()))
    }

    fn schema(text: &str) -> GrammarSpec {
        GrammarSpec::JsonSchema(serde_json::from_str(text).expect("the test's schema is JSON"))
    }

    /// An answer of at most `n_max` tokens whose choices follow a counter; None = it did not end.
    fn walk(source: &dyn ConstraintSource, seed: u64, wants_forced: bool) -> Option<String> {
        let mut constraint = source.begin();
        let mut text = Vec::new();
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut accepted = Vec::new();
        for _ in 0..400 {
            let next = constraint
                .advance(&accepted, wants_forced)
                .expect("it goes on");
            assert!(wants_forced || next.forced.is_empty());
            text.extend(next.forced.iter().map(|token| *token as u8));
            let Some(allowed) = next.allowed else {
                return Some(String::from_utf8(text).expect("whole characters"));
            };
            let choices: Vec<TokenId> = (0..260).filter(|t| allowed.contains(*t)).collect();
            assert!(!choices.is_empty(), "an answer cannot be stuck");
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // The end as soon as it is allowed, and no long strings: walks shall be short.
            let closing = [257, u32::from(b'"'), u32::from(b'}'), u32::from(b']')];
            let closing = closing.into_iter().find(|t| choices.contains(t));
            let any = choices[(state % choices.len() as u64) as usize];
            let token = closing.filter(|_| !state.is_multiple_of(3)).unwrap_or(any);
            if token == 257 || token == 259 {
                return Some(String::from_utf8(text).expect("whole characters"));
            }
            text.push(token as u8);
            accepted = vec![token];
        }
        None
    }

    fn answers(spec: &GrammarSpec, wants_forced: bool) -> Vec<String> {
        let source = grammars().compile(spec).expect("a sound grammar");
        (1..40)
            .filter_map(|seed| walk(&*source, seed, wants_forced))
            .collect()
    }

    #[test]
    fn answers_are_what_the_schema_admits() {
        let spec = schema(
            r#"{"type": "object", "additionalProperties": false, "required": ["name", "age"],
                "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"},
                               "tags": {"type": "array", "items": {"enum": ["a", "b"]}}}}"#,
        );
        for wants_forced in [false, true] {
            let answers = answers(&spec, wants_forced);
            assert!(answers.len() > 20, "{answers:?}");
            for answer in answers {
                let value: Value = serde_json::from_str(&answer).expect("JSON");
                assert!(value["name"].as_str().expect("a name").chars().count() <= 5);
                assert!(value["age"].is_i64() || value["age"].is_u64() || value["age"].is_f64());
                for tag in value["tags"].as_array().into_iter().flatten() {
                    assert!(tag == "a" || tag == "b");
                }
                let fields = value.as_object().expect("an object");
                assert!(
                    fields
                        .keys()
                        .all(|key| ["name", "age", "tags"].contains(&key.as_str()))
                );
            }
        }
    }

    #[test]
    fn references_inside_a_schema_are_followed() {
        let spec = schema(
            r##"{"$defs": {"node": {"type": "object", "required": ["v"], "additionalProperties": false,
                 "properties": {"v": {"enum": [1, 2]}, "next": {"$ref": "#/$defs/node"}}}},
                "$ref": "#/$defs/node"}"##,
        );
        let answers = answers(&spec, false);
        assert!(!answers.is_empty());
        for answer in answers {
            let value: Value = serde_json::from_str(&answer).expect("JSON");
            assert!(value["v"] == 1 || value["v"] == 2, "{answer}");
        }
    }

    #[test]
    fn objects_expressions_choices_and_grammars() {
        for answer in answers(&GrammarSpec::JsonObject, false) {
            assert!(
                serde_json::from_str::<Value>(&answer)
                    .expect("JSON")
                    .is_object()
            );
        }
        let word = GrammarSpec::Regex("[ab]{2,4}-[0-9]+".to_owned());
        for answer in answers(&word, false) {
            let (letters, digits) = answer.split_once('-').expect("a dash");
            assert!((2..=4).contains(&letters.len()), "{answer}");
            assert!(digits.bytes().all(|b| b.is_ascii_digit()) && !digits.is_empty());
        }
        let texts = ["yes", "no, \"never\"", "n\u{e4}"].map(str::to_owned);
        let found = answers(&GrammarSpec::Choice(texts.to_vec()), false);
        assert!(
            found.iter().all(|answer| texts.contains(answer)),
            "{found:?}"
        );
        let lark =
            GrammarSpec::ContextFree("start: \"(\" inner \")\"\ninner: \"x\" | start".to_owned());
        for answer in answers(&lark, false) {
            let depth = answer.find('x').expect("an x");
            assert_eq!(
                answer,
                format!("{}x{}", "(".repeat(depth), ")".repeat(depth))
            );
        }
    }

    #[test]
    fn what_must_come_is_forced_and_ends_by_itself() {
        let spec = schema(r#"{"const": {"status": "accepted"}}"#);
        let source = grammars().compile(&spec).expect("sound");
        let next = source.begin().advance(&[], true).expect("it begins");
        let text: Vec<u8> = next.forced.iter().map(|token| *token as u8).collect();
        assert!(text.starts_with(b"{"), "{next:?}");
        let answers = answers(&spec, true);
        for answer in answers {
            let value: Value = serde_json::from_str(&answer).expect("JSON");
            assert_eq!(value, json!({"status": "accepted"}));
        }
    }

    #[test]
    fn spaces_have_an_end() {
        let source = grammars().compile(&GrammarSpec::JsonObject).expect("sound");
        let mut constraint = source.begin();
        let mut accepted = vec![TokenId::from(b'{')];
        for n_spaces in 0..40 {
            let next = constraint.advance(&accepted, false).expect("it goes on");
            let allowed = next.allowed.expect("an object has an end");
            let space = [b' ', b'\n', b'\t', b'\r'].map(TokenId::from);
            match space.into_iter().find(|token| allowed.contains(*token)) {
                Some(token) => accepted = vec![token],
                None => {
                    assert!(n_spaces > 0, "pretty printing is allowed");
                    return;
                }
            }
        }
        panic!("spaces without end");
    }

    #[test]
    fn what_cannot_be_compiled_is_an_error_that_says_why() {
        let cases = [
            schema(r#"{"type": "nonsense"}"#),
            schema(r#"{"type": "string", "minLength": 5, "maxLength": 2}"#),
            schema(r##"{"$ref": "#/$defs/absent"}"##),
            schema("[]"),
            schema("false"),
            GrammarSpec::Regex("(".to_owned()),
            GrammarSpec::ContextFree("start: nothing".to_owned()),
            GrammarSpec::ContextFree(String::new()),
            GrammarSpec::Choice(Vec::new()),
            GrammarSpec::Choice(vec![String::new()]),
            GrammarSpec::Regex("x".repeat(GRAMMAR_BYTES_MAX)),
            GrammarSpec::Regex("[^\\s\\S]".to_owned()),
            GrammarSpec::Choice((0..=CHOICES_MAX).map(|i| i.to_string()).collect()),
        ];
        let grammars = grammars();
        for spec in cases {
            let error = grammars.compile(&spec);
            let error = error.expect_err(&format!("{:.80}", format!("{spec:?}")));
            assert!(!error.0.is_empty() && error.0.len() < 2000, "{error}");
        }
        assert!(grammars.compile(&GrammarSpec::JsonObject).is_ok());
    }

    #[test]
    fn what_is_huge_is_refused_or_bounded() {
        let nested = format!("{}x{}", "(".repeat(50_000), ")".repeat(50_000));
        let items =
            |depth: usize| format!("{}{{}}{}", r#"{"items":"#.repeat(depth), "}".repeat(depth));
        for spec in [
            GrammarSpec::Regex("((a{1,1000}){1,1000}){1,1000}".to_owned()),
            GrammarSpec::Regex(nested),
            GrammarSpec::Regex("(.*a){30}".to_owned()),
            schema(&items(100)),
        ] {
            // Either answer will do; what matters is that there is one.
            if let Ok(source) = grammars().compile(&spec) {
                let mut constraint = source.begin();
                for _ in 0..10 {
                    let Ok(next) = constraint.advance(&[], false) else {
                        break;
                    };
                    assert!(next.allowed.is_none_or(|allowed| !allowed.is_empty()));
                }
            }
        }
    }

    /// Each of these ended the process, or took a worker's thread for many seconds.
    #[test]
    fn long_chains_and_large_schemas_end_nobody() {
        let last = |i: usize, n: usize, end: Value, next: &dyn Fn(usize) -> Value| {
            if i + 1 == n { end } else { next(i + 1) }
        };
        let chain = |n: usize| {
            let link = |i: usize| {
                let next = |i: usize| {
                    let next = json!({"$ref": format!("#/$defs/d{i}")});
                    json!({"type": "object", "required": ["a"], "properties": {"a": next}})
                };
                (
                    format!("d{i}"),
                    last(i, n, json!({"type": "string"}), &next),
                )
            };
            let defs: serde_json::Map<String, Value> = (0..n).map(link).collect();
            GrammarSpec::JsonSchema(json!({"$defs": defs, "$ref": "#/$defs/d0"}))
        };
        let rules = |n: usize| {
            let rule = |i: usize| match i + 1 == n {
                true => format!("r{i}: \"x\"\n"),
                false => format!("r{i}: \"a\" r{}\n", i + 1),
            };
            let rules: String = (0..n).map(rule).collect();
            GrammarSpec::ContextFree(format!("start: r0\n{rules}"))
        };
        let grammars = grammars();
        assert!(grammars.compile(&chain(400)).is_ok());
        assert!(grammars.compile(&rules(900)).is_ok());
        let properties: serde_json::Map<String, Value> = (0..2000)
            .map(|i| (format!("p{i}"), json!({"type": "string"})))
            .collect();
        let wide = json!({"type": "object", "properties": properties});
        for spec in [chain(20_000), rules(5000), GrammarSpec::JsonSchema(wide)] {
            let error = grammars.compile(&spec).expect_err("too large");
            assert!(error.0.contains("compiled"), "{error}");
        }
    }

    /// At 600 an answer broke after its first brace, when it had been accepted.
    #[test]
    fn as_many_optional_properties_as_are_taken_can_be_answered() {
        let object = |n: usize| {
            let one = |i: usize| (format!("p{i}"), json!({"type": "string"}));
            let properties: serde_json::Map<String, Value> = (0..n).map(one).collect();
            GrammarSpec::JsonSchema(json!({"type": "object", "properties": properties,
                "additionalProperties": false}))
        };
        let grammars = grammars();
        let error = grammars.compile(&object(501)).expect_err("too many");
        assert!(error.0.contains("501 optional properties"), "{error}");
        let source = grammars.compile(&object(500)).expect("as many as may be");
        let mut constraint = source.begin();
        for byte in r#"{"p0":"x","p7":"y","p499":"z""#.bytes() {
            let next = constraint.advance(&[], false).expect("it goes on");
            let token = TokenId::from(byte);
            assert!(next.allowed.expect("not at its end").contains(token));
            constraint.advance(&[token], false).expect("it goes on");
        }
    }

    #[test]
    fn the_same_grammar_is_compiled_once() {
        let grammars = grammars();
        for _ in 0..3 {
            assert!(grammars.compile(&GrammarSpec::JsonObject).is_ok());
        }
        assert_eq!(grammars.kept.lock().len(), 1);
        for index in 0..N_KEPT + 5 {
            let spec = GrammarSpec::Choice(vec![format!("text {index}")]);
            assert!(grammars.compile(&spec).is_ok());
        }
        let kept = grammars.kept.lock();
        assert_eq!(kept.len(), N_KEPT);
        assert!(kept.back().expect("full").0.contains("text 36"));
    }
}

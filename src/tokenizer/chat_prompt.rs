//! Chat messages to tokens, such that a message cannot write control tokens: a user who sends
//! `<|im_end|>` gets these ten characters, not the end of the turn.
//!
//! The template only sees text, and its output mixes its own control tokens with the clients'
//! words. So each name of a control token in a message, a tool or an extra variable is replaced by
//! one character that occurs nowhere else (of the private-use planes) before rendering, and put
//! back afterwards with a note of where it stands; the encoder reads these places as plain text.
//! Input without such names, nearly all of it, is rendered exactly as it is.
//!
//! Pure, no thread. What it cannot see: a name that a template puts together itself from pieces of
//! several messages.

use super::chat_template::{ChatTemplate, TemplateError, TemplateInput};
use super::{EncodeOptions, Tokenizer};
use crate::request::TokenId;
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// A rendered prompt that knows which parts of it are no control tokens, whatever they look like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatPrompt {
    text: String,
    /// Byte ranges of names of control tokens that came from the input: ascending.
    plain: Vec<Range<usize>>,
}

impl ChatPrompt {
    /// The whole text.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Keeps the first `n_bytes`, which must end at a character boundary (`String::truncate`).
    pub fn truncate(&mut self, n_bytes: usize) {
        self.text.truncate(n_bytes);
        self.plain.retain_mut(|range| {
            range.end = range.end.min(n_bytes);
            range.start < range.end
        });
    }
}

impl Tokenizer {
    /// Messages to tokens: `render_chat`, then `encode_prompt`.
    pub fn encode_chat(
        &self,
        template: &ChatTemplate,
        input: &TemplateInput,
    ) -> Result<Vec<TokenId>, TemplateError> {
        Ok(self.encode_prompt(&self.render_chat(template, input)?))
    }

    /// Renders the prompt and notes where the input's own names of control tokens stand in it.
    pub fn render_chat(
        &self,
        template: &ChatTemplate,
        input: &TemplateInput,
    ) -> Result<ChatPrompt, TemplateError> {
        let adapted = template.adapted(input);
        let input = adapted.as_ref().unwrap_or(input);
        let stand_ins = StandIns::choose(self, template, input)?;
        if stand_ins.by_name.is_empty() {
            let text = template.render(input)?;
            let plain = Vec::new();
            return Ok(ChatPrompt { text, plain });
        }
        let replaced = map_input(input, &|text| stand_ins.replace(self, text));
        match template.render(&replaced) {
            Ok(rendered) => Ok(stand_ins.restore(&rendered)),
            Err(TemplateError(message)) => Err(TemplateError(stand_ins.restore(&message).text)),
        }
    }

    /// Tokens of a rendered prompt, with BOS where the model's rules ask for it.
    #[must_use]
    pub fn encode_prompt(&self, prompt: &ChatPrompt) -> Vec<TokenId> {
        let options = EncodeOptions {
            add_special: true,
            parse_special: true,
        };
        self.encode_around(&prompt.text, options, &prompt.plain)
    }
}

/// The characters that stand for names of control tokens.
#[derive(Default)]
struct StandIns {
    by_name: HashMap<String, char>,
    by_char: HashMap<char, String>,
}

impl StandIns {
    /// A character for each name in the input, which neither the input nor the template contains.
    fn choose(
        tokenizer: &Tokenizer,
        template: &ChatTemplate,
        input: &TemplateInput,
    ) -> Result<Self, TemplateError> {
        let mut names = HashSet::new();
        visit_input(input, &mut |text| {
            let found = tokenizer.special.control_names(text).into_iter();
            names.extend(found.map(|range| text[range].to_owned()));
        });
        if names.is_empty() {
            return Ok(Self::default());
        }
        let mut taken: HashSet<char> = template.source().chars().collect();
        visit_input(input, &mut |text| taken.extend(text.chars()));
        let private = ('\u{f0000}'..='\u{ffffd}').chain('\u{100000}'..='\u{10fffd}');
        let mut free = private.filter(|character| !taken.contains(character));
        let mut stand_ins = Self::default();
        for name in names {
            let Some(character) = free.next() else {
                let why = "the messages use every private-use character and control tokens too";
                return Err(TemplateError(why.to_owned()));
            };
            stand_ins.by_char.insert(character, name.clone());
            stand_ins.by_name.insert(name, character);
        }
        Ok(stand_ins)
    }

    fn replace(&self, tokenizer: &Tokenizer, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut done = 0;
        for range in tokenizer.special.control_names(text) {
            out.push_str(&text[done..range.start]);
            done = range.end;
            // Every name of the input has got a character.
            out.extend(self.by_name.get(&text[range]));
        }
        out.push_str(&text[done..]);
        out
    }

    fn restore(&self, rendered: &str) -> ChatPrompt {
        let mut text = String::with_capacity(rendered.len());
        let mut plain: Vec<Range<usize>> = Vec::new();
        for character in rendered.chars() {
            let start = text.len();
            match self.by_char.get(&character) {
                None => text.push(character),
                Some(name) => {
                    text.push_str(name);
                    plain.push(start..text.len());
                }
            }
        }
        ChatPrompt { text, plain }
    }
}

/// Every text of the input: values and keys. The nesting is bounded by the JSON reader.
fn visit_input(input: &TemplateInput, seen: &mut impl FnMut(&str)) {
    let lists = input.messages.iter().chain(&input.tools);
    lists.for_each(|value| visit(value, seen));
    visit_fields(&input.extra, seen);
}

fn visit(value: &Value, seen: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => seen(text),
        Value::Array(items) => items.iter().for_each(|item| visit(item, seen)),
        Value::Object(fields) => visit_fields(fields, seen),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn visit_fields(fields: &Map<String, Value>, seen: &mut impl FnMut(&str)) {
    for (name, value) in fields {
        seen(name);
        visit(value, seen);
    }
}

fn map_input(input: &TemplateInput, change: &impl Fn(&str) -> String) -> TemplateInput {
    let list = |items: &[Value]| items.iter().map(|item| map(item, change)).collect();
    TemplateInput {
        messages: list(&input.messages),
        tools: list(&input.tools),
        add_generation_prompt: input.add_generation_prompt,
        extra: map_fields(&input.extra, change),
    }
}

fn map(value: &Value, change: &impl Fn(&str) -> String) -> Value {
    match value {
        Value::String(text) => Value::String(change(text)),
        Value::Array(items) => items.iter().map(|item| map(item, change)).collect(),
        Value::Object(fields) => Value::Object(map_fields(fields, change)),
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
    }
}

fn map_fields(fields: &Map<String, Value>, change: &impl Fn(&str) -> String) -> Map<String, Value> {
    let changed = fields.iter();
    let changed = changed.map(|(name, value)| (change(name), map(value, change)));
    changed.collect()
}

//! The state machine that splits one choice's text into parts as it comes.
//!
//! Pure, owned by whoever makes the answer. Text that may still become something else is held; every
//! decision looks only at what cannot change any more, so the joined parts do not depend on the cuts.
//! What turns out to be no call is text, as the model wrote it.
//!
//! ```text
//!          thoughts begin            thoughts end
//!   Begin ───────────────▶ Thinking ─────────────▶ Begin (once)
//!     │ anything else
//!     ├──────────────▶ Text ◀──────────────────────────┐ no call, or no further one
//!     │                 │ a mark                       │
//!     └─ `{` or `[` ──▶ Item ──▶ Value ──▶ Tail ──▶ Between
//!                        ▲                             │ another one
//!                        └─────────────────────────────┘
//! ```
//!
//! A call's name is passed on when it and the place of its arguments are certain; its arguments are
//! passed on as they come, so they may turn out to be no JSON: the client reads them to the end, as
//! OpenAI's documentation asks of it. Calls in pythonic form, in XML, and those that name the tool
//! behind the arguments are held until they are whole.

use super::Part;
use super::family::{DEEPSEEK_CALL, DEEPSEEK_END, Family, Form, Mark, ThinkMarks};
use super::item::{Item, ToolShape, Wanted, arguments_text, item};
use super::json::{Reader, Scan, Stop};
use std::sync::Arc;

/// What is looked for in a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParserOptions {
    /// Calls of tools; None = what looks like one is text.
    pub calls: Option<CallOptions>,
    /// Thoughts; None = what looks like them is text.
    pub reasoning: Option<ReasoningOptions>,
}

/// See [`ParserOptions`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallOptions {
    /// The form of the calls.
    pub family: Family,
    /// The tools that were offered.
    pub tools: Vec<ToolShape>,
    /// The answer is held to calls, so that what is left at its end is no text but half a call.
    pub must_call: bool,
}

/// See [`ParserOptions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReasoningOptions {
    /// Around the thoughts.
    pub marks: ThinkMarks,
    /// The prompt has opened them already.
    pub is_open: bool,
}

/// Splits one choice's text into parts. The default one takes everything for text.
#[derive(Clone, Debug)]
pub struct AnswerParser {
    options: Option<Arc<ParserOptions>>,
    state: State,
    /// What is not decided yet.
    held: String,
    /// What was taken out of `held` and is text unless a call follows.
    unproven: String,
    n_calls: u32,
    /// A call that had to come was cut before its arguments, and dropped.
    has_lost_call: bool,
}

/// Calls that follow each other.
#[derive(Clone, Copy, Debug)]
struct Region {
    /// None: the answer begins with them.
    mark: Option<&'static Mark>,
    in_list: bool,
    /// Nothing of it was read yet: a list may begin.
    is_first: bool,
}

impl Region {
    fn form(&self) -> Form {
        self.mark.map_or(Form::General, |mark| mark.form)
    }
}

#[derive(Clone, Copy, Debug)]
enum State {
    Begin {
        has_thought: bool,
    },
    Thinking {
        is_fresh: bool,
    },
    Text,
    Item(Region),
    /// Arguments, of which something was passed on already.
    Value {
        region: Region,
        n_open: u32,
        scan: Option<Scan>,
    },
    /// What closes a call behind its arguments.
    Tail {
        region: Region,
        n_open: u32,
    },
    Between(Region),
}

impl Default for AnswerParser {
    fn default() -> Self {
        Self {
            options: None,
            state: State::Text,
            held: String::new(),
            unproven: String::new(),
            n_calls: 0,
            has_lost_call: false,
        }
    }
}

impl AnswerParser {
    /// For one choice of an answer.
    #[must_use]
    pub fn new(options: Arc<ParserOptions>) -> Self {
        let state = match options.reasoning {
            Some(reasoning) if reasoning.is_open => State::Thinking { is_fresh: true },
            Some(_) => State::Begin { has_thought: false },
            None => State::Begin { has_thought: true },
        };
        Self {
            options: Some(options),
            state,
            ..Self::default()
        }
    }

    /// Whether calls were found.
    #[must_use]
    pub fn has_calls(&self) -> bool {
        self.n_calls > 0
    }

    /// Whether the text so far ends within a call: in its arguments, or before them where a call had
    /// to come. At the end of an answer: the call was cut.
    #[must_use]
    pub fn ends_in_call(&self) -> bool {
        self.has_lost_call || matches!(self.state, State::Value { .. })
    }

    /// Whether what comes next belongs to thoughts.
    #[must_use]
    pub fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thinking { .. })
    }

    /// Text that is certain; appends the parts that are certain now.
    pub fn push(&mut self, text: String, parts: &mut Vec<Part>) {
        if text.is_empty() {
            return;
        }
        let is_plain = matches!(self.state, State::Text) && self.calls().is_none();
        if is_plain && self.held.is_empty() {
            return parts.push(Part::Text(text));
        }
        match self.held.is_empty() {
            true => self.held = text,
            false => self.held.push_str(&text),
        }
        while self.step(false, parts) {}
    }

    /// The answer has ended; appends what was held back.
    pub fn finish(&mut self, parts: &mut Vec<Part>) {
        let n_before = parts.len();
        while self.step(true, parts) {}
        let left = std::mem::take(&mut self.unproven) + &std::mem::take(&mut self.held);
        push_text(parts, &left);
        if self.calls().is_some_and(|calls| calls.must_call) {
            let mut last = parts.split_off(n_before);
            let n_told = last.len();
            last.retain(|part| !matches!(part, Part::Text(_)));
            self.has_lost_call |= last.len() < n_told && self.n_calls == 0;
            parts.append(&mut last);
        }
    }

    fn calls(&self) -> Option<&CallOptions> {
        self.options.as_ref()?.calls.as_ref()
    }

    /// Goes on by one decision; false when more text must come first.
    fn step(&mut self, is_final: bool, parts: &mut Vec<Part>) -> bool {
        match self.state {
            State::Begin { has_thought } => self.begin(has_thought, is_final),
            State::Thinking { is_fresh } => self.think(is_fresh, is_final, parts),
            State::Text => self.text(is_final, parts),
            State::Item(region) => self.item(region, is_final, parts),
            State::Value {
                region,
                n_open,
                scan,
            } => self.value(region, n_open, scan, is_final, parts),
            State::Tail { region, n_open } => self.tail(region, n_open, is_final),
            State::Between(region) => self.between(region, is_final),
        }
    }

    fn begin(&mut self, has_thought: bool, is_final: bool) -> bool {
        let options = self.options.clone().unwrap_or_default();
        let after_thoughts = has_thought && options.reasoning.is_some();
        if after_thoughts {
            drop_space(&mut self.held);
        }
        let body = self.held.trim_start();
        if body.is_empty() {
            return false;
        }
        let marks = options.reasoning.filter(|_| !has_thought);
        let think = marks.map(|reasoning| reasoning.marks.open);
        let calls = options.calls.iter().flat_map(|c| c.family.marks());
        let mut openers = calls.map(|mark| mark.open).chain(think);
        if let Some(open) = think
            && let Some(thoughts) = body.strip_prefix(open)
        {
            self.held = thoughts.to_owned();
            self.state = State::Thinking { is_fresh: true };
            return true;
        }
        if !is_final && openers.any(|open| open.len() > body.len() && open.starts_with(body)) {
            return false;
        }
        let calls = options.calls.iter().flat_map(|c| c.family.marks());
        let is_marked = calls.into_iter().any(|mark| body.starts_with(mark.open));
        let may_be_bare = options.calls.is_some() && body.starts_with(['{', '[']) && !is_marked;
        self.state = match may_be_bare {
            true => State::Item(Region {
                mark: None,
                in_list: false,
                is_first: true,
            }),
            false => State::Text,
        };
        true
    }

    fn think(&mut self, is_fresh: bool, is_final: bool, parts: &mut Vec<Part>) -> bool {
        if is_fresh {
            drop_space(&mut self.held);
            if self.held.is_empty() {
                return false;
            }
            self.state = State::Thinking { is_fresh: false };
        }
        let close = self.options.as_ref().and_then(|o| o.reasoning);
        let close = close.map_or("", |reasoning| reasoning.marks.close);
        let mut say = |text: &str| {
            if !text.is_empty() {
                parts.push(Part::Reasoning(text.to_owned()));
            }
        };
        if let Some(end) = self.held.find(close) {
            say(self.held[..end].trim_end());
            self.held.drain(..end + close.len());
            self.state = State::Begin { has_thought: true };
            return true;
        }
        let n_certain = match is_final {
            true => self.held.len(),
            false => certain_bytes(&self.held, [close].into_iter()),
        };
        say(&self.held[..n_certain]);
        self.held.drain(..n_certain);
        false
    }

    fn text(&mut self, is_final: bool, parts: &mut Vec<Part>) -> bool {
        let Some(calls) = self.calls() else {
            push_text(parts, &std::mem::take(&mut self.held));
            return false;
        };
        let family = calls.family;
        let marks = family.marks().iter().map(|mark| (mark.open, Some(mark)));
        let dropped = family.dropped().iter().map(|open| (*open, None));
        let openers = marks.chain(dropped);
        let found = openers.clone().filter_map(|(open, mark)| {
            let start = self.held.find(open)?;
            Some((start, open, mark))
        });
        let Some((start, open, mark)) = found.min_by_key(|(start, ..)| *start) else {
            let n_sure = certain_bytes(&self.held, openers.map(|(open, _)| open));
            let n_certain = match is_final {
                // Half a mark behind calls: the next one was cut off before it began.
                true if self.n_calls > 0 && n_sure == 0 => 0,
                true if self.n_calls > 0 => self.held.trim_end().len(),
                true => self.held.len(),
                false => n_sure,
            };
            push_text(parts, &self.held[..n_certain]);
            let n_gone = if is_final { self.held.len() } else { n_certain };
            self.held.drain(..n_gone);
            return false;
        };
        let before = &self.held[..start];
        let n_shown = match mark {
            Some(_) => before.trim_end().len(), // nobody wants the line break before a call
            None => before.len(),
        };
        push_text(parts, &before[..n_shown]);
        let end = start + open.len();
        if let Some(mark) = mark {
            self.unproven = self.held[n_shown..end].to_owned();
            self.state = State::Item(Region {
                mark: Some(mark),
                in_list: false,
                is_first: true,
            });
        }
        self.held.drain(..end);
        true
    }

    fn item(&mut self, region: Region, is_final: bool, parts: &mut Vec<Part>) -> bool {
        let body = self.held.trim_start();
        let may_be_list = region.is_first && region.form() != Form::DeepSeek;
        if may_be_list && body.starts_with('[') {
            let n_bytes = self.held.len() - body.len() + 1;
            self.prove_later(n_bytes);
            self.state = State::Item(Region {
                in_list: true,
                is_first: false,
                ..region
            });
            return true;
        }
        let wanted = Wanted {
            form: region.form(),
            in_list: region.in_list,
            tools: self.calls().map_or(&[][..], |calls| &calls.tools),
        };
        let region = Region {
            is_first: false,
            ..region
        };
        match item(&self.held, wanted) {
            Ok(Item::Head { name, at, n_open }) => {
                self.held.drain(..at);
                self.begin_call(name, parts);
                self.state = State::Value {
                    region,
                    n_open,
                    scan: None,
                };
            }
            Ok(Item::Whole {
                name,
                arguments,
                n_bytes,
            }) => {
                self.held.drain(..n_bytes);
                self.begin_call(name, parts);
                self.argue(arguments, parts);
                self.state = State::Between(region);
            }
            Err(Stop::More) if !is_final => return false,
            Err(Stop::More) if self.n_calls > 0 => {
                // Cut before its name was certain. Behind a call it is one, and nobody reads half of it.
                self.unproven.clear();
                self.held.clear();
                self.state = State::Text;
            }
            Err(Stop::More | Stop::Bad) => {
                push_text(parts, &std::mem::take(&mut self.unproven));
                self.state = State::Text;
            }
        }
        true
    }

    fn value(
        &mut self,
        region: Region,
        n_open: u32,
        scan: Option<Scan>,
        is_final: bool,
        parts: &mut Vec<Part>,
    ) -> bool {
        if scan.is_some() || self.held.starts_with('{') {
            let mut scan = scan.unwrap_or_default();
            let n_bytes = scan.feed(&self.held);
            let rest = self.held.split_off(n_bytes);
            let fragment = std::mem::replace(&mut self.held, rest);
            self.argue(fragment, parts);
            self.state = match scan.end() {
                Some(_) => State::Tail { region, n_open },
                None => State::Value {
                    region,
                    n_open,
                    scan: Some(scan),
                },
            };
            return scan.end().is_some();
        }
        let mut reader = Reader::new(&self.held);
        let arguments = match reader.value() {
            Ok(raw) => arguments_text(raw),
            Err(Stop::More) if !is_final => return false,
            Err(Stop::More) => {
                // Cut: what is missing is not made up.
                let left = std::mem::take(&mut self.held);
                self.argue(left, parts);
                return false;
            }
            Err(Stop::Bad) => "{}".to_owned(),
        };
        let n_bytes = reader.at();
        self.held.drain(..n_bytes);
        self.argue(arguments, parts);
        self.state = State::Tail { region, n_open };
        true
    }

    /// Goes past the braces that close a call, and past keys behind its arguments.
    fn tail(&mut self, region: Region, n_open: u32, is_final: bool) -> bool {
        let mut reader = Reader::new(&self.held);
        let mut n_open = n_open;
        let mut n_done = 0;
        while n_open > 0 {
            match closing(&mut reader) {
                Ok(closes) => n_open -= u32::from(closes),
                Err(Stop::More) if !is_final => return false,
                Err(Stop::More) => {
                    n_done = self.held.len();
                    break;
                }
                Err(Stop::Bad) => break,
            }
            n_done = reader.at();
        }
        self.held.drain(..n_done);
        self.state = State::Between(region);
        true
    }

    /// What stands behind a call: another one, or the end of the region.
    fn between(&mut self, region: Region, is_final: bool) -> bool {
        let (next, n_bytes) = match next_of(&self.held, region) {
            Ok(next) => next,
            Err(Stop::More) if !is_final => return false,
            Err(Stop::More) => (Next::Closed, self.held.len()),
            Err(Stop::Bad) => (Next::Closed, 0),
        };
        match next {
            Next::Call => {
                self.prove_later(n_bytes);
                self.state = State::Item(region);
            }
            Next::ListEnd => {
                self.held.drain(..n_bytes);
                let in_list = false;
                self.state = State::Between(Region { in_list, ..region });
            }
            Next::Closed => {
                self.held.drain(..n_bytes);
                self.state = State::Text;
            }
        }
        true
    }

    /// Takes bytes out that are text unless a call follows.
    fn prove_later(&mut self, n_bytes: usize) {
        let taken = self.held.drain(..n_bytes);
        self.unproven.extend(taken);
    }

    fn begin_call(&mut self, name: String, parts: &mut Vec<Part>) {
        self.unproven.clear();
        let index = self.n_calls;
        self.n_calls += 1;
        parts.push(Part::CallBegin { index, name });
    }

    fn argue(&mut self, fragment: String, parts: &mut Vec<Part>) {
        if !fragment.is_empty() {
            let index = self.n_calls.saturating_sub(1);
            parts.push(Part::CallArguments { index, fragment });
        }
    }
}

/// What follows a call.
enum Next {
    Call,
    ListEnd,
    Closed,
}

/// One closing brace (true), or one further key with its value (false).
fn closing(reader: &mut Reader<'_>) -> Result<bool, Stop> {
    reader.space();
    if reader.peek()? == b'}' {
        reader.literal("}")?;
        return Ok(true);
    }
    reader.literal(",")?;
    reader.space();
    reader.string()?;
    reader.space();
    reader.literal(":")?;
    reader.space();
    reader.value()?;
    Ok(false)
}

/// What follows a call in `text`, and how many bytes stand before what comes then.
fn next_of(text: &str, region: Region) -> Result<(Next, usize), Stop> {
    let mut reader = Reader::new(text);
    reader.space();
    if region.in_list {
        return match reader.peek()? {
            b',' => reader.literal(",").map(|()| (Next::Call, reader.at())),
            b']' => reader.literal("]").map(|()| (Next::ListEnd, reader.at())),
            _ => Err(Stop::Bad),
        };
    }
    if region.form() == Form::DeepSeek {
        if reader.peek()? == b'`' {
            reader.literal("```")?;
            reader.space();
        }
        match reader.literal(DEEPSEEK_END) {
            Ok(()) => reader.space(),
            Err(Stop::More) => return Err(Stop::More),
            Err(Stop::Bad) => {}
        }
        let before = reader.at();
        match reader.literal(DEEPSEEK_CALL) {
            Ok(()) => return Ok((Next::Call, before)),
            Err(Stop::More) => return Err(Stop::More),
            Err(Stop::Bad) => {}
        }
    }
    let close = region.mark.map_or("", |mark| mark.close);
    if !close.is_empty() {
        match reader.literal(close) {
            Ok(()) => return Ok((Next::Closed, reader.at())),
            Err(Stop::More) => return Err(Stop::More),
            Err(Stop::Bad) => {}
        }
    }
    let at = reader.at();
    match (region.form(), reader.peek()?) {
        (Form::General, b'{') => Ok((Next::Call, at)),
        (Form::General, b'<') => reader.literal("<function=").map(|()| (Next::Call, at)),
        (Form::General, b';' | b',') => Ok((Next::Call, at + 1)),
        _ => Err(Stop::Bad),
    }
}

fn push_text(parts: &mut Vec<Part>, text: &str) {
    if !text.is_empty() {
        parts.push(Part::Text(text.to_owned()));
    }
}

fn drop_space(text: &mut String) {
    let n_bytes = text.len() - text.trim_start().len();
    text.drain(..n_bytes);
}

/// Bytes of `text` that no opener, nor white space before one, can begin in.
fn certain_bytes<'a>(text: &str, openers: impl Iterator<Item = &'a str>) -> usize {
    let possible = |open: &str| {
        let lengths = 1..open.len().min(text.len() + 1);
        let is_open = |n: &usize| open.is_char_boundary(*n) && text.ends_with(&open[..*n]);
        lengths.rev().find(is_open).unwrap_or(0)
    };
    let n_held = openers.map(possible).max().unwrap_or(0);
    text[..text.len() - n_held].trim_end().len()
}

//! Grammars of answers: thoughts first, then text or calls in the form of a family.
//!
//! Pure; writes Lark as `llguidance` reads it. Marks that are control tokens of the vocabulary stand in
//! it as tokens, others as text. What is not here: compiling (`tokenizer::grammar`), who wants calls to
//! be enforced (`http`). Pythonic families are made to write JSON, which their parser reads as well:
//! there is no grammar of Python arguments for a schema.

use super::family::{DEEPSEEK_CALL, DEEPSEEK_END, DEEPSEEK_SEP, Family, MISTRAL_ARGS, ThinkMarks};
use serde_json::json;

/// Thoughts that come before everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thoughts {
    /// Around them.
    pub marks: ThinkMarks,
    /// The prompt has opened them: they must be closed. Else they may be left out.
    pub is_open: bool,
}

/// A tool whose calls are constrained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallSchema {
    /// Of the tool.
    pub name: String,
    /// Its arguments as a value of the grammar.
    pub arguments: String,
}

/// Which calls an answer may hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallGrammar {
    /// Their form.
    pub family: Family,
    /// The tools, at least one.
    pub tools: Vec<CallSchema>,
    /// What may stand in their place; None = they must come.
    pub instead: Option<Instead>,
    /// More than one call.
    pub are_many: bool,
}

/// See [`CallGrammar`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Instead {
    /// Any text, also before calls.
    Text,
    /// A value of the grammar.
    Value(String),
}

/// What an answer must look like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerGrammar {
    /// Before the rest.
    pub thoughts: Option<Thoughts>,
    /// The rest.
    pub body: AnswerBody,
}

/// See [`AnswerGrammar`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerBody {
    /// A value of the grammar.
    Value(String),
    /// Calls of tools.
    Calls(CallGrammar),
}

impl AnswerGrammar {
    /// Lark from `start`. `control_token`: the token of a mark, where it is a control token.
    #[must_use]
    pub fn lark(&self, control_token: &dyn Fn(&str) -> Option<u32>) -> String {
        let mark = |text: &str| match control_token(text) {
            Some(token) => format!("<[{token}]>"),
            None => literal(text),
        };
        let (thoughts, mut rules) = match self.thoughts {
            None => ("", String::new()),
            Some(thoughts) => {
                let rules = thought_rules(thoughts, control_token);
                (
                    if thoughts.is_open {
                        "thoughts "
                    } else {
                        "thoughts? "
                    },
                    rules,
                )
            }
        };
        let body = match &self.body {
            AnswerBody::Value(value) => {
                rules.push_str(&format!("body: {value}\n"));
                "body".to_owned()
            }
            AnswerBody::Calls(calls) => calls.rules(&mark, control_token, &mut rules),
        };
        format!("start: {thoughts}{body}\n{rules}")
    }
}

fn literal(text: &str) -> String {
    json!(text).to_string()
}

fn thought_rules(thoughts: Thoughts, control_token: &dyn Fn(&str) -> Option<u32>) -> String {
    let marks = thoughts.marks;
    let open = match (thoughts.is_open, control_token(marks.open)) {
        (true, _) => String::new(),
        (false, Some(token)) => format!("<[{token}]> "),
        (false, None) => format!("{} ", literal(marks.open)),
    };
    match control_token(marks.close) {
        Some(token) => format!(
            "thoughts: {open}THOUGHT <[{token}]> SPACE\nTHOUGHT: /(?s:.*)/\nSPACE: /\\n{{0,2}}/\n"
        ),
        None => format!(
            "thoughts: {open}thought SPACE\nthought[lazy]: /(?s:.*){}/\nSPACE: /\\n{{0,2}}/\n",
            escaped(marks.close)
        ),
    }
}

/// Text as part of an expression between slashes.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for character in text.chars() {
        if !character.is_alphanumeric()
            && character.is_ascii()
            && character != '<'
            && character != '>'
        {
            out.push('\\');
        }
        out.push(character);
    }
    out
}

impl CallGrammar {
    /// Adds the rules of calls; what `start` says of them.
    fn rules(
        &self,
        mark: &dyn Fn(&str) -> String,
        control_token: &dyn Fn(&str) -> Option<u32>,
        rules: &mut String,
    ) -> String {
        let form = Surface::of(self.family, control_token(MISTRAL_ARGS).is_some());
        let mut names = Vec::new();
        for (index, tool) in self.tools.iter().enumerate() {
            let (name, arguments) = (&tool.name, &tool.arguments);
            let call = form.call(name, mark);
            let call = call.replace("ARGUMENTS", &format!("arguments_{index}"));
            rules.push_str(&format!(
                "call_{index}: {call}\narguments_{index}: {arguments}\n"
            ));
            names.push(format!("call_{index}"));
        }
        rules.push_str(&format!("call: {}\n", names.join(" | ")));
        let open = form.open.map(mark).unwrap_or_default();
        let [begin, between, end] = form.around.map(|text| match text {
            "" => String::new(),
            text => literal(text),
        });
        let close = form.close.map(mark).unwrap_or_default();
        let next = match form.is_list {
            true => between.clone(),
            // Each further call has its own marks.
            false => format!("{end} {close} {between} {open} {begin}"),
        };
        let more = if self.are_many {
            format!(" ({next} call)*")
        } else {
            String::new()
        };
        let behind_open = format!("{begin} call{more} {end} {close}");
        match &self.instead {
            None => {
                rules.push_str(&format!("calls: {open} {behind_open}\n"));
                return "calls".to_owned();
            }
            Some(Instead::Value(value)) => {
                rules.push_str(&format!("calls: {open} {behind_open}\nbody: {value}\n"));
                return "(calls | body)".to_owned();
            }
            Some(Instead::Text) => {}
        }
        match form.open {
            // No text can hold a control token.
            Some(text) if control_token(text).is_some() => {
                rules.push_str(&format!("calls: {open} {behind_open}\nTEXT: /(?s:.*)/\n"));
                "TEXT calls?".to_owned()
            }
            Some(text) => {
                let text = escaped(text);
                rules.push_str(&format!(
                    "before[lazy]: /(?s:.*){text}/\ncalls: {behind_open}\nTEXT: /(?s:.*)/ & ~/(?s:.*){text}(?s:.*)/\n"
                ));
                "(TEXT | before calls)".to_owned()
            }
            None => {
                rules.push_str(&format!(
                    "calls: {behind_open}\nTEXT: /([^{{\\[ \\n](?s:.*))?/\n"
                ));
                "(TEXT | calls)".to_owned()
            }
        }
    }
}

/// How a family's calls look.
struct Surface {
    open: Option<&'static str>,
    close: Option<&'static str>,
    /// Before the first call, between two, behind the last.
    around: [&'static str; 3],
    /// All calls stand between one pair of marks.
    is_list: bool,
    style: Style,
}

#[derive(Clone, Copy)]
enum Style {
    /// `{"name": .., KEY: ..}`
    Object(&'static str),
    /// `{"tool_call_id": .., "tool_name": .., "parameters": ..}`
    Command,
    /// `name[ARGS]{..}`
    Named,
    DeepSeek,
}

impl Surface {
    fn of(family: Family, has_args_mark: bool) -> Self {
        let marks = family.marks().first();
        let open = marks.map(|mark| mark.open);
        let close = marks
            .map(|mark| mark.close)
            .filter(|close| !close.is_empty());
        let surface = |around, is_list, style| Self {
            open,
            close,
            around,
            is_list,
            style,
        };
        let list = ["[", ", ", "]"];
        match family {
            Family::Hermes | Family::Generic => {
                surface(["\n", "\n", "\n"], false, Style::Object("arguments"))
            }
            Family::Llama3 => Self {
                open: None,
                close: None,
                ..surface(["", "; ", ""], true, Style::Object("parameters"))
            },
            Family::Pythonic => Self {
                open: None,
                close: None,
                ..surface(list, true, Style::Object("parameters"))
            },
            Family::Mistral if has_args_mark => surface(["", "", ""], false, Style::Named),
            Family::Mistral => surface(list, true, Style::Object("arguments")),
            Family::DeepSeek => surface(["", "\n", ""], true, Style::DeepSeek),
            Family::Command => surface(["[\n", ",\n", "\n]"], true, Style::Command),
            Family::ToolCallToken => Self {
                close: None,
                ..surface(list, true, Style::Object("arguments"))
            },
        }
    }

    /// One call; `ARGUMENTS` stands for its arguments.
    fn call(&self, name: &str, mark: &dyn Fn(&str) -> String) -> String {
        match self.style {
            Style::Object(key) => format!(
                "{} ARGUMENTS \"}}\"",
                literal(&format!("{{\"name\": \"{name}\", \"{key}\": "))
            ),
            Style::Command => format!(
                "{} /[0-9]/ {} ARGUMENTS \"}}\"",
                literal("    {\"tool_call_id\": \""),
                literal(&format!("\", \"tool_name\": \"{name}\", \"parameters\": "))
            ),
            Style::Named => format!("{} {} ARGUMENTS", literal(name), mark(MISTRAL_ARGS)),
            Style::DeepSeek => format!(
                "{} \"function\" {} {} ARGUMENTS {} {}",
                mark(DEEPSEEK_CALL),
                mark(DEEPSEEK_SEP),
                literal(&format!("{name}\n```json\n")),
                literal("\n```"),
                mark(DEEPSEEK_END)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_has_a_grammar() {
        for family in Family::ALL {
            let calls = CallGrammar {
                family,
                tools: vec![CallSchema {
                    name: "f".to_owned(),
                    arguments: "%json {}".to_owned(),
                }],
                instead: None,
                are_many: true,
            };
            let grammar = AnswerGrammar {
                thoughts: None,
                body: AnswerBody::Calls(calls),
            };
            let lark = grammar.lark(&|_| None);
            assert!(lark.starts_with("start: calls\n"), "{lark}");
            assert!(lark.contains("arguments_0: %json {}"), "{lark}");
            let as_tokens = grammar.lark(&|mark| mark.starts_with('[').then_some(7));
            assert_eq!(as_tokens.contains("<[7]>"), family == Family::Mistral);
        }
    }
}

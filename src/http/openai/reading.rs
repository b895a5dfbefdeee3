//! How the answer of a chat is read, and what it is held to: reasoning, calls of tools, a form.
//!
//! On the HTTP worker that prepares the answer, before anything is queued. The family of calls comes
//! from the model's chat template unless the configuration names one.
//!
//! What is enforced by a grammar, over the tokens of the answer:
//! 1. `tool_choice` required or a named tool: calls and nothing else, arguments by their schemas.
//! 2. "auto" with a `strict` tool, with `parallel_tool_calls: false`, or with a form for the text
//!    (`response_format` and its like): text (in that form) or calls.
//! 3. A form without tools: the text.
//!
//! Reasoning comes before all of that and is free: a model that must begin with JSON can't think. It is
//! not told apart, and the form holds from the first token on, where `reasoning_format` is "none" and
//! where the prompt has closed the thoughts already. A schema that is not enforced is not compiled.

use super::chat::Conversation;
use super::structure::Structure;
use super::tools::{Tool, ToolChoice, Tools};
use crate::chat::{
    AnswerBody, AnswerGrammar, AnswerParser, CallGrammar, CallOptions, CallSchema, Family, Instead,
    ParserOptions, ReasoningOptions, ThinkMarks, Thoughts,
};
use crate::constraint::ConstraintSource;
use crate::http::errors::{ApiError, ErrorCode};
use crate::http::generation::growing::ChoicePlan;
use crate::pool::LoadedModel;
use crate::request::TokenId;
use crate::runtime::Feature;
use crate::tokenizer::{GrammarSpec, Grammars, Tokenizer, schema_in_lark};
use serde_json::Value;
use std::sync::Arc;

/// See the module.
pub struct Reading<'a> {
    model: &'a LoadedModel,
    tokenizer: &'a Tokenizer,
    tools: &'a Tools,
    /// The source of the chat template; empty where there is none.
    template: &'a str,
    reasoning: Option<ReasoningOptions>,
    /// The answer may begin with thoughts.
    may_think: bool,
}

impl<'a> Reading<'a> {
    /// The answer to a conversation whose prompt ends like `prompt`.
    #[must_use]
    pub fn new(
        model: &'a LoadedModel,
        tokenizer: &'a Tokenizer,
        conversation: &'a Conversation,
        prompt: &str,
    ) -> Self {
        let template = model
            .chat_template
            .as_ref()
            .map(|template| template.source());
        let template = template.unwrap_or_default();
        let marks = ThinkMarks::of_template(template).filter(|_| conversation.tells_thoughts);
        let reasoning = marks.map(|marks| ReasoningOptions {
            marks,
            is_open: marks.is_open_at_end(prompt),
        });
        let is_answer = conversation.continued.is_none();
        let is_closed = marks.is_some_and(|marks| marks.is_closed_at_end(prompt));
        Self {
            model,
            tokenizer,
            tools: &conversation.tools,
            template,
            may_think: reasoning.is_some_and(|r| r.is_open || (is_answer && !is_closed)),
            reasoning,
        }
    }

    /// The configured family, or that of the template; looked for where tools are offered only.
    fn family(&self) -> Family {
        let configured = self.model.meta.tool_family;
        configured.unwrap_or_else(|| Family::of_template(self.template))
    }

    /// A choice whose text is read so.
    #[must_use]
    pub fn plan(&self) -> ChoicePlan {
        let calls = self.tools.are_offered().then(|| CallOptions {
            family: self.family(),
            tools: self.tools.shapes(),
            must_call: self.tools.must_call(),
        });
        let options = ParserOptions {
            calls,
            reasoning: self.reasoning.filter(|_| self.may_think),
        };
        ChoicePlan {
            parser: match options == ParserOptions::default() {
                true => AnswerParser::default(),
                false => AnswerParser::new(Arc::new(options)),
            },
            calls_are_stop: self.tools.choice == ToolChoice::Named,
            ..ChoicePlan::default()
        }
    }

    /// Control tokens that the parser must see.
    #[must_use]
    pub fn shown_tokens(&self) -> Arc<[TokenId]> {
        let mut marks = Vec::new();
        if self.tools.are_offered() {
            marks.extend(self.family().visible_marks());
        }
        if let Some(reasoning) = self.reasoning.filter(|_| self.may_think) {
            marks.extend([reasoning.marks.open, reasoning.marks.close]);
        }
        let tokens = marks.into_iter();
        tokens
            .filter_map(|mark| self.tokenizer.control_token(mark))
            .collect()
    }

    /// What all choices must look like; compiled here. None = anything.
    ///
    /// # Errors
    /// `invalid_json_schema` with its place, also that of a tool; a missing capability.
    pub fn constraint(
        &self,
        structure: Option<&Structure>,
    ) -> Result<Option<Arc<dyn ConstraintSource>>, ApiError> {
        let calls = self.constrained_calls(structure)?;
        let is_plain = calls.is_none() && !self.may_think;
        let Some(structure) = structure.filter(|_| calls.is_none()) else {
            let Some(calls) = calls else { return Ok(None) };
            return self.compile_calls(calls).map(Some);
        };
        let alone = structure.constrain(self.model)?; // names what is wrong with it by itself
        if is_plain {
            return Ok(Some(alone));
        }
        let value = structure.in_lark()?;
        let lark = self.lark(AnswerBody::Value(value));
        structure
            .constrain_as(GrammarSpec::Lark(lark), self.model)
            .map(Some)
    }

    /// The family whose form is enforced: what the model was told of, where its template shows no tools.
    fn enforced_family(&self) -> Family {
        let template = self.model.chat_template.as_ref();
        let shows = template.is_ok_and(|template| template.traits().renders_tools);
        match shows || self.model.meta.tool_family.is_some() {
            true => self.family(),
            false => Family::Generic,
        }
    }

    /// Which calls a grammar must describe; None where the answer is free of them or they are free.
    fn constrained_calls(
        &self,
        structure: Option<&Structure>,
    ) -> Result<Option<CallGrammar>, ApiError> {
        let tools = self.tools;
        let any_strict = tools.items.iter().any(|tool| tool.strict);
        let instead = match tools.choice {
            ToolChoice::None => return Ok(None),
            ToolChoice::Required | ToolChoice::Named => None,
            ToolChoice::Auto => match structure {
                Some(structure) => {
                    structure.constrain(self.model)?;
                    Some(Instead::Value(structure.in_lark()?))
                }
                None if any_strict || !tools.parallel => Some(Instead::Text),
                None => return Ok(None),
            },
        };
        let must_call = instead.is_none();
        let schema = |tool: &Tool| CallSchema {
            name: tool.name.clone(),
            arguments: schema_in_lark(&match must_call || tool.strict {
                true => enforced(&tool.parameters),
                false => serde_json::json!({"type": "object"}),
            }),
        };
        Ok(Some(CallGrammar {
            family: self.enforced_family(),
            tools: tools.items.iter().map(schema).collect(),
            instead,
            are_many: tools.parallel && tools.choice != ToolChoice::Named,
        }))
    }

    fn compile_calls(&self, calls: CallGrammar) -> Result<Arc<dyn ConstraintSource>, ApiError> {
        let must_call = calls.instead.is_none();
        let can = self
            .model
            .executor
            .features()
            .has(Feature::StructuredOutput);
        let Some(grammars) = self.model.grammars.as_ref().filter(|_| can) else {
            let feature = Feature::StructuredOutput;
            return Err(ApiError::missing(feature, "tool_choice", &self.model.name));
        };
        let lark = self.lark(AnswerBody::Calls(calls));
        let compiled = grammars.compile(&GrammarSpec::Lark(lark));
        compiled.map_err(|error| {
            let enforced = self
                .tools
                .items
                .iter()
                .filter(|tool| must_call || tool.strict);
            let place = enforced.into_iter().find_map(|tool| faulty(tool, grammars));
            let (param, why) = place.unwrap_or_else(|| ("tools".to_owned(), error.to_string()));
            let message = format!("'{param}': the JSON schema cannot be enforced: {why}");
            ApiError {
                is_hopeless: true,
                ..ApiError::param(ErrorCode::InvalidJsonSchema, param, message)
            }
        })
    }

    fn lark(&self, body: AnswerBody) -> String {
        let thoughts = self.reasoning.filter(|_| self.may_think);
        let grammar = AnswerGrammar {
            thoughts: thoughts.map(|reasoning| Thoughts {
                marks: reasoning.marks,
                is_open: reasoning.is_open,
            }),
            body,
        };
        grammar.lark(&|mark| self.tokenizer.control_token(mark))
    }
}

/// A schema as it is enforced: arguments are an object, and only the properties that are named, unless
/// the schema speaks of others.
fn enforced(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Some(fields) = schema.as_object_mut() {
        fields
            .entry("type")
            .or_insert_with(|| Value::from("object"));
        let is_plain = fields.contains_key("properties")
            && ![
                "additionalProperties",
                "patternProperties",
                "anyOf",
                "oneOf",
                "allOf",
                "$ref",
            ]
            .iter()
            .any(|key| fields.contains_key(*key));
        if is_plain {
            fields.insert("additionalProperties".to_owned(), Value::Bool(false));
        }
    }
    schema
}

/// The place of a tool's schema, and what is wrong with it.
fn faulty(tool: &Tool, grammars: &Grammars) -> Option<(String, String)> {
    let schema = GrammarSpec::JsonSchema(enforced(&tool.parameters));
    let error = grammars.compile(&schema).err()?;
    Some((tool.param.clone(), error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::{Part, THINK_MARKS};
    use serde_json::json;

    /// Whether a grammar takes all of a text, and lets the answer end there.
    fn takes(lark: &str, text: &str) -> Result<(), String> {
        let grammars = Grammars::new(Arc::new(Tokenizer::bytes()));
        let compiled = grammars.compile(&GrammarSpec::Lark(lark.to_owned()));
        let compiled = compiled.map_err(|error| format!("{error}\n{lark}"))?;
        let mut constraint = compiled.begin();
        let mut allowed = constraint.advance(&[], false)?.allowed;
        for (index, byte) in text.bytes().enumerate() {
            let byte = TokenId::from(byte);
            if !allowed.is_some_and(|allowed| allowed.contains(byte)) {
                return Err(format!(
                    "{:?} is refused\n{lark}",
                    &text.as_bytes()[..=index]
                ));
            }
            allowed = constraint.advance(&[byte], false)?.allowed;
        }
        // 257 and 259 end an answer.
        match allowed.is_none_or(|allowed| allowed.contains(257) || allowed.contains(259)) {
            true => Ok(()),
            false => Err(format!("{text:?} may not end\n{lark}")),
        }
    }

    fn grammar(family: Family, instead: Option<Instead>, thoughts: Option<bool>) -> String {
        let schema = json!({"type": "object", "properties": {"x": {"type": "integer"}}});
        let call = |name: &str| CallSchema {
            name: name.to_owned(),
            arguments: schema_in_lark(&enforced(&schema)),
        };
        let grammar = AnswerGrammar {
            thoughts: thoughts.map(|is_open| Thoughts {
                marks: THINK_MARKS[0],
                is_open,
            }),
            body: AnswerBody::Calls(CallGrammar {
                family,
                tools: vec![call("f"), call("g")],
                instead,
                are_many: true,
            }),
        };
        grammar.lark(&|_| None)
    }

    /// Two calls as the grammar of each family wants them.
    fn sample(family: Family) -> String {
        let (f, g) = ("{\"x\": 1}", "{}");
        match family {
            Family::Hermes | Family::Generic => format!(
                "<tool_call>\n{{\"name\": \"f\", \"arguments\": {f}}}\n</tool_call>\n\
                 <tool_call>\n{{\"name\": \"g\", \"arguments\": {g}}}\n</tool_call>"
            ),
            Family::Llama3 => format!(
                "{{\"name\": \"f\", \"parameters\": {f}}}; {{\"name\": \"g\", \"parameters\": {g}}}"
            ),
            Family::Pythonic => format!(
                "[{{\"name\": \"f\", \"parameters\": {f}}}, {{\"name\": \"g\", \"parameters\": {g}}}]"
            ),
            Family::Mistral => format!(
                "[TOOL_CALLS][{{\"name\": \"f\", \"arguments\": {f}}}, {{\"name\": \"g\", \"arguments\": {g}}}]"
            ),
            Family::DeepSeek => format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{f}\n```<｜tool▁call▁end｜>\n\
                 <｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{g}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
            Family::Command => format!(
                "<|START_ACTION|>[\n    {{\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {f}}},\n    \
                 {{\"tool_call_id\": \"1\", \"tool_name\": \"g\", \"parameters\": {g}}}\n]<|END_ACTION|>"
            ),
            Family::ToolCallToken => format!(
                "<|tool_call|>[{{\"name\": \"f\", \"arguments\": {f}}}, {{\"name\": \"g\", \"arguments\": {g}}}]"
            ),
        }
    }

    #[test]
    fn what_the_grammars_want_the_parser_reads() {
        for family in Family::ALL {
            let sample = sample(family);
            takes(&grammar(family, None, None), &sample).expect("calls");
            takes(&grammar(family, None, None), "Hello.").expect_err("no text");
            let thinking = format!("<think>\nhm < </th\n</think>\n\n{sample}");
            takes(&grammar(family, None, Some(false)), &thinking).expect("thoughts, calls");
            takes(&grammar(family, None, Some(false)), &sample).expect("calls without thoughts");
            let open = format!("hm\n</think>\n\n{sample}");
            takes(&grammar(family, None, Some(true)), &open).expect("thoughts, calls");
            let text = Some(Instead::Text);
            takes(&grammar(family, text.clone(), None), "Hello < there.").expect("text");
            takes(&grammar(family, text.clone(), None), &sample).expect("calls");
            let value = Some(Instead::Value("/[0-9]+/".to_owned()));
            takes(&grammar(family, value.clone(), None), "123").expect("the value");
            takes(&grammar(family, value, Some(true)), &open).expect("calls in its place");
            let is_bare = matches!(family, Family::Llama3 | Family::Pythonic);
            if !is_bare {
                let both = format!("I look.\n{sample}");
                takes(&grammar(family, text, None), &both).expect("text, calls");
            }
            let options = ParserOptions {
                calls: Some(CallOptions {
                    family,
                    tools: ["f", "g"]
                        .map(|name| crate::chat::ToolShape {
                            name: name.to_owned(),
                            ..Default::default()
                        })
                        .to_vec(),
                    must_call: false,
                }),
                reasoning: None,
            };
            let mut parser = AnswerParser::new(Arc::new(options));
            let mut parts = Vec::new();
            parser.push(sample.clone(), &mut parts);
            parser.finish(&mut parts);
            let names = parts.iter().filter_map(|part| match part {
                Part::CallBegin { name, .. } => Some(name.as_str()),
                Part::Text(_) | Part::Reasoning(_) | Part::CallArguments { .. } => None,
            });
            assert_eq!(names.collect::<Vec<_>>(), ["f", "g"], "{family:?}");
            assert!(
                !parts.iter().any(|part| matches!(part, Part::Text(_))),
                "{parts:?}"
            );
        }
    }

    #[test]
    fn forms_hold_behind_thoughts() {
        let forms = [
            (GrammarSpec::JsonObject, "{\"a\": 1}"),
            (GrammarSpec::JsonSchema(json!({"enum": ["a/b"]})), "\"a/b\""),
            (GrammarSpec::Regex("[0-9]+/[a-z]".to_owned()), "12/a"),
            (
                GrammarSpec::Choice(vec!["yes".to_owned(), "no".to_owned()]),
                "no",
            ),
            (
                GrammarSpec::ContextFree("root ::= \"<\" [ab]+ \">\"".to_owned()),
                "<ab>",
            ),
            (
                GrammarSpec::ContextFree("start: \"<\" /[ab]+/ \">\"".to_owned()),
                "<ab>",
            ),
        ];
        for (spec, text) in forms {
            let grammar = AnswerGrammar {
                thoughts: Some(Thoughts {
                    marks: THINK_MARKS[0],
                    is_open: true,
                }),
                body: AnswerBody::Value(spec.in_lark().expect("sound")),
            };
            let lark = grammar.lark(&|_| None);
            takes(&lark, &format!("well.\n</think>\n{text}")).expect("thoughts and the form");
            takes(&lark, text).expect_err("the thoughts were not closed");
        }
    }
}

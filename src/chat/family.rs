//! The forms in which families of models write reasoning and calls of tools, and which of them a model
//! has.
//!
//! Pure data and one decision. A family is told from the model's own chat template, which shows how
//! past calls are written; the configuration may name another. What is not here: reading the forms
//! (`item`, `parser`), writing grammars of them (`http`).

/// How a model writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// `<tool_call>{"name": .., "arguments": ..}</tool_call>` (Hermes, Qwen 2 to 3, SmolLM3), also with
    /// Qwen3-Coder's `<function=name><parameter=x>..` inside.
    Hermes,
    /// The whole answer is `{"name": .., "parameters": ..}`, or `[name(x=1)]` (Llama 3).
    Llama3,
    /// `[name(x=1), ..]` (Llama 4 and others).
    Pythonic,
    /// `[TOOL_CALLS][{"name": .., "arguments": ..}]`, newer `[TOOL_CALLS]name[ARGS]{..}`.
    Mistral,
    /// DeepSeek V3, R1 and V3.1: marks around the name and around JSON in a fence.
    DeepSeek,
    /// Command R7B: `<|START_ACTION|>[{"tool_name": .., "parameters": ..}]<|END_ACTION|>`.
    Command,
    /// `<|tool_call|>[{"name": .., "arguments": ..}]` (Phi-4-mini, Granite 3).
    ToolCallToken,
    /// A model that was not trained for it: told to write Hermes' form, read like all of the above
    /// that needs no mark of its own.
    Generic,
}

/// What stands between the marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// JSON objects, a list of them, a pythonic list, or `<function=..>`.
    General,
    /// `[{..}]`, or `name[ARGS]{..}`.
    Mistral,
    /// `<｜tool▁call▁begin｜>..`.
    DeepSeek,
}

/// Marks around calls.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) open: &'static str,
    /// Empty where nothing closes it.
    pub(super) close: &'static str,
    pub(super) form: Form,
}

const fn mark(open: &'static str, close: &'static str, form: Form) -> Mark {
    Mark { open, close, form }
}

/// Begins one call of DeepSeek's.
pub(super) const DEEPSEEK_CALL: &str = "<｜tool▁call▁begin｜>";
/// Between the kind and the name (V3, R1), or the name and its arguments (V3.1).
pub(super) const DEEPSEEK_SEP: &str = "<｜tool▁sep｜>";
/// Ends one call of DeepSeek's.
pub(super) const DEEPSEEK_END: &str = "<｜tool▁call▁end｜>";
/// Between a name and its arguments in Mistral's newer form.
pub(super) const MISTRAL_ARGS: &str = "[ARGS]";
/// Between a name and the id of a call in some of Mistral's models.
pub(super) const MISTRAL_ID: &str = "[CALL_ID]";

/// The marks around what a model thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ThinkMarks {
    /// Before it.
    pub open: &'static str,
    /// Behind it.
    pub close: &'static str,
}

/// Those in use, the commonest first.
pub const THINK_MARKS: [ThinkMarks; 4] = [
    ThinkMarks {
        open: "<think>",
        close: "</think>",
    },
    ThinkMarks {
        open: "[THINK]",
        close: "[/THINK]",
    },
    ThinkMarks {
        open: "<|START_THINKING|>",
        close: "<|END_THINKING|>",
    },
    ThinkMarks {
        open: "<seed:think>",
        close: "</seed:think>",
    },
];

impl ThinkMarks {
    /// Those that a template knows; None where the model does not think aloud.
    #[must_use]
    pub fn of_template(template: &str) -> Option<Self> {
        let knows = |marks: &&Self| template.contains(marks.close) || template.contains(marks.open);
        THINK_MARKS.iter().find(knows).copied()
    }

    /// Whether a prompt ends inside of them, so that the answer begins with thoughts.
    #[must_use]
    pub fn is_open_at_end(self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.open)
    }

    /// Whether a prompt ends right behind them, so that the answer begins without thoughts.
    #[must_use]
    pub fn is_closed_at_end(self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.close)
    }
}

impl Family {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Hermes,
        Self::Llama3,
        Self::Pythonic,
        Self::Mistral,
        Self::DeepSeek,
        Self::Command,
        Self::ToolCallToken,
        Self::Generic,
    ];

    /// Its name in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Llama3 => "llama3",
            Self::Pythonic => "pythonic",
            Self::Mistral => "mistral",
            Self::DeepSeek => "deepseek",
            Self::Command => "command",
            Self::ToolCallToken => "tool_call_token",
            Self::Generic => "generic",
        }
    }

    /// The family of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.name() == name)
    }

    /// The family of a model with this chat template.
    #[must_use]
    pub fn of_template(template: &str) -> Self {
        let has = |text: &str| template.contains(text);
        // The first line that fits; marks of one family occur in the templates of others only where
        // they stand further down here.
        let table = [
            (has("<|tool_call|>"), Self::ToolCallToken),
            (has("<tool_call>") || has("<function="), Self::Hermes),
            (has("<|START_ACTION|>"), Self::Command),
            (has("[TOOL_CALLS]"), Self::Mistral),
            (has("<｜tool▁calls▁begin｜>"), Self::DeepSeek),
            (has("<|python_start|>"), Self::Pythonic),
            (has("<|header_start|>"), Self::Pythonic),
            (has("<|python_tag|>"), Self::Llama3),
            (has("<|start_header_id|>") && has("ipython"), Self::Llama3),
        ];
        let fitting = table.into_iter().find(|(fits, _)| *fits);
        fitting.map_or(Self::Generic, |(_, family)| family)
    }

    /// Marks that begin calls in the middle of a text.
    pub(super) fn marks(self) -> &'static [Mark] {
        const HERMES: &[Mark] = &[mark("<tool_call>", "</tool_call>", Form::General)];
        const LLAMA: &[Mark] = &[mark("<|python_tag|>", "", Form::General)];
        const PYTHONIC: &[Mark] = &[mark("<|python_start|>", "<|python_end|>", Form::General)];
        const MISTRAL: &[Mark] = &[mark("[TOOL_CALLS]", "", Form::Mistral)];
        // Some of its templates show no tools; then the model is told of them in Hermes' form.
        const DEEPSEEK: &[Mark] = &[
            mark(
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                Form::DeepSeek,
            ),
            mark("<tool_call>", "</tool_call>", Form::General),
        ];
        const COMMAND: &[Mark] = &[mark("<|START_ACTION|>", "<|END_ACTION|>", Form::General)];
        const TOKEN: &[Mark] = &[
            mark("<|tool_call|>", "<|/tool_call|>", Form::General),
            mark("<tool_call>", "</tool_call>", Form::General),
        ];
        match self {
            Self::Hermes | Self::Generic => HERMES,
            Self::Llama3 => LLAMA,
            Self::Pythonic => PYTHONIC,
            Self::Mistral => MISTRAL,
            Self::DeepSeek => DEEPSEEK,
            Self::Command => COMMAND,
            Self::ToolCallToken => TOKEN,
        }
    }

    /// Marks around plain answers, which are no part of them.
    pub(super) fn dropped(self) -> &'static [&'static str] {
        match self {
            Self::Command => &["<|START_RESPONSE|>", "<|END_RESPONSE|>"],
            _ => &[],
        }
    }

    /// Every mark that a parser must see: where the vocabulary has control tokens of these names,
    /// they must not be left out of the text.
    #[must_use]
    pub fn visible_marks(self) -> Vec<&'static str> {
        let marks = self.marks().iter();
        let mut visible: Vec<&str> = marks.flat_map(|mark| [mark.open, mark.close]).collect();
        visible.extend(self.dropped());
        match self {
            Self::Mistral => visible.extend([MISTRAL_ARGS, MISTRAL_ID]),
            Self::DeepSeek => visible.extend([DEEPSEEK_CALL, DEEPSEEK_SEP, DEEPSEEK_END]),
            _ => {}
        }
        visible.retain(|mark| !mark.is_empty());
        visible
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_tell_their_family() {
        #[rustfmt::skip]
        let table = [
            ("{% if tools %}<tools></tools> within <tool_call></tool_call>", Family::Hermes),
            ("<tool_call>\n<function=example>\n<parameter=x>", Family::Hermes),
            ("<|start_header_id|>system {% if m.role == 'ipython' %}", Family::Llama3),
            ("<|start_header_id|>system only", Family::Generic),
            ("<|header_start|>assistant<|header_end|>", Family::Pythonic),
            ("[INST] [AVAILABLE_TOOLS] [TOOL_CALLS]", Family::Mistral),
            ("[INST] {{ m }} [/INST]", Family::Generic),
            ("<｜User｜><｜tool▁calls▁begin｜>", Family::DeepSeek),
            ("<|START_OF_TURN_TOKEN|><|START_ACTION|>", Family::Command),
            ("<|tool|><|tool_call|>", Family::ToolCallToken),
            ("<|im_start|>", Family::Generic),
        ];
        for (template, family) in table {
            assert_eq!(Family::of_template(template), family, "{template}");
        }
        let formats = crate::config::TOOL_FORMATS[1..].iter().copied();
        assert!(
            formats.eq(Family::ALL.map(Family::name)),
            "the configuration knows all"
        );
        for family in Family::ALL {
            assert_eq!(Family::parse(family.name()), Some(family));
            let marks = family.visible_marks();
            assert!(!marks.is_empty() && marks.iter().all(|mark| !mark.is_empty()));
        }
    }

    #[test]
    fn thinking_is_told_from_template_and_prompt() {
        let qwen = ThinkMarks::of_template("{% if enable_thinking %}<think>\n\n</think>");
        let marks = qwen.expect("it thinks");
        assert_eq!(marks.open, "<think>");
        assert!(marks.is_open_at_end("<|im_start|>assistant\n<think>\n"));
        assert!(!marks.is_open_at_end("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
        assert!(marks.is_closed_at_end("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
        assert_eq!(ThinkMarks::of_template("<|im_start|>"), None);
    }
}

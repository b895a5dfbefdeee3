//! Chat templates through minijinja. (stub: being written)

/// A compiled template. Shared by all threads, immutable.
pub struct ChatTemplate {}

/// Why a template cannot be compiled or rendered; the text says where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TemplateError(pub String);

/// What a template is rendered with.
#[derive(Clone, Debug, Default)]
pub struct TemplateInput {
    /// OpenAI messages, content already flattened to text where it was text parts.
    pub messages: Vec<serde_json::Value>,
    /// OpenAI tools; empty = none.
    pub tools: Vec<serde_json::Value>,
    /// End with the opening of an assistant turn.
    pub add_generation_prompt: bool,
    /// Extra variables (`chat_template_kwargs`).
    pub extra: serde_json::Map<String, serde_json::Value>,
}

impl ChatTemplate {
    /// Compiles; `bos`/`eos` are the texts of these tokens.
    pub fn compile(_source: &str, _bos: &str, _eos: &str) -> Result<Self, TemplateError> {
        unimplemented!()
    }
    /// Renders the prompt text.
    pub fn render(&self, _input: &TemplateInput) -> Result<String, TemplateError> {
        unimplemented!()
    }
    /// The template's source.
    #[must_use]
    pub fn source(&self) -> &str {
        unimplemented!()
    }
}

//! SentencePiece BPE (`tokenizer.ggml.model = llama`): the two neighbours whose union has the
//! highest score are merged until none is in the vocabulary; what remains unknown becomes byte
//! tokens. Immutable, shared by all threads.
//!
//! Own code rather than the `tokenizers` crate: its BPE wants a list of ranked pairs, while these
//! vocabularies rank the *merged* text by a score and allow every way of splitting it. Listing all
//! pairs would cost several table entries per token and most of the load time; the merger below is
//! shorter than that conversion. Spaces are kept as spaces here: the vocabulary's U+2581 was
//! turned into a space when it was read. User-defined tokens are found first and never merged with
//! their neighbours.

use super::special::SpecialTokens;
use super::vocabulary::{TokenKind, Vocabulary};
use crate::request::TokenId;
use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

/// The character that stands for a space in SentencePiece texts.
pub(crate) const SPACE_MARK: char = '\u{2581}';

/// A score-based BPE model.
pub(crate) struct ScoreBpe {
    /// Bytes of the tokens that text can become.
    tokens: HashMap<Box<[u8]>, TokenId>,
    /// By token, (vocab_size).
    scores: Vec<f32>,
    /// The token of each byte, (256).
    byte_tokens: Vec<Option<TokenId>>,
    unknown: Option<TokenId>,
    user_defined: SpecialTokens,
    /// A space is put before each plain piece, so that its first word looks like one in a sentence.
    add_space_prefix: bool,
}

/// A piece of the text: a node of a doubly linked list over the characters.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    /// Half-open; `start == end` once merged into its left neighbour.
    end: usize,
    previous: Option<usize>,
    next: Option<usize>,
    /// A user-defined token, which is not merged.
    is_fixed: bool,
}

/// A possible merge; the greatest is the next to be done.
struct Candidate {
    score: f32,
    left: usize,
    right: usize,
    /// Length of the union when this was found: differs once either side was merged otherwise.
    n_bytes: usize,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_score = self.score.total_cmp(&other.score);
        by_score.then_with(|| other.left.cmp(&self.left))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

impl ScoreBpe {
    /// `scores`: (vocab_size).
    pub(crate) fn new(
        vocabulary: &Vocabulary,
        scores: Vec<f32>,
        unknown: Option<TokenId>,
        add_space_prefix: bool,
    ) -> Self {
        let mut tokens = HashMap::with_capacity(vocabulary.len());
        let mut byte_tokens = vec![None; 256];
        for (token, kind) in vocabulary.kinds() {
            let bytes = vocabulary.bytes(token);
            match kind {
                TokenKind::Normal | TokenKind::UserDefined => {
                    tokens.entry(bytes.into()).or_insert(token);
                }
                TokenKind::Byte => {
                    if let [byte] = *bytes {
                        byte_tokens[byte as usize] = Some(token);
                    }
                }
                TokenKind::Unknown | TokenKind::Control | TokenKind::Unused => {}
            }
        }
        Self {
            tokens,
            scores,
            byte_tokens,
            unknown,
            user_defined: SpecialTokens::new(vocabulary, |kind| kind == TokenKind::UserDefined),
            add_space_prefix,
        }
    }

    /// Whether the encoder puts a space before a text.
    pub(crate) fn adds_space_prefix(&self) -> bool {
        self.add_space_prefix
    }

    /// Appends the tokens of a plain text.
    pub(crate) fn encode(&self, text: &str, tokens: &mut Vec<TokenId>) {
        let mut spaced = String::with_capacity(text.len() + 1);
        if self.add_space_prefix {
            spaced.push(' ');
        }
        spaced.extend(text.chars().map(|character| match character {
            SPACE_MARK => ' ',
            other => other,
        }));
        let symbols = self.merge(&spaced);
        let mut cursor = (!symbols.is_empty()).then_some(0);
        while let Some(index) = cursor {
            let symbol = symbols[index];
            self.push_symbol(&spaced.as_bytes()[symbol.start..symbol.end], tokens);
            cursor = symbol.next;
        }
    }

    fn push_symbol(&self, bytes: &[u8], tokens: &mut Vec<TokenId>) {
        if let Some(&token) = self.tokens.get(bytes) {
            tokens.push(token);
            return;
        }
        let fallback: Option<Vec<TokenId>> = bytes
            .iter()
            .map(|&byte| self.byte_tokens[byte as usize])
            .collect();
        match fallback {
            Some(byte_tokens) => tokens.extend(byte_tokens),
            None => tokens.extend(self.unknown),
        }
    }

    /// The list of symbols before any merge: characters and user-defined tokens.
    fn symbols(&self, text: &str) -> Vec<Symbol> {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
        let mut push = |n_bytes: usize, is_fixed: bool| {
            let index = symbols.len();
            let start = symbols.last().map_or(0, |last| last.end);
            symbols.push(Symbol {
                start,
                end: start + n_bytes,
                previous: index.checked_sub(1),
                next: Some(index + 1),
                is_fixed,
            });
        };
        let mut done = 0;
        for (_, name) in self.user_defined.user_defined(text) {
            let between = text[done..name.start].chars();
            between.for_each(|character| push(character.len_utf8(), false));
            push(name.len(), true);
            done = name.end;
        }
        let rest = text[done..].chars();
        rest.for_each(|character| push(character.len_utf8(), false));
        if let Some(last) = symbols.last_mut() {
            last.next = None;
        }
        symbols
    }

    /// The list of symbols after all merges; it begins at index 0.
    fn merge(&self, text: &str) -> Vec<Symbol> {
        let mut symbols = self.symbols(text);
        let mut queue = BinaryHeap::new();
        for left in 0..symbols.len() {
            queue.extend(self.candidate(text, &symbols, Some(left)));
        }
        while let Some(Candidate {
            left,
            right,
            n_bytes,
            ..
        }) = queue.pop()
        {
            let (first, second) = (symbols[left], symbols[right]);
            let is_current = first.start != first.end
                && second.start != second.end
                && second.end - first.start == n_bytes;
            if !is_current {
                continue;
            }
            symbols[left].end = second.end;
            symbols[left].next = second.next;
            symbols[right].end = second.start;
            if let Some(next) = second.next {
                symbols[next].previous = Some(left);
            }
            queue.extend(self.candidate(text, &symbols, first.previous));
            queue.extend(self.candidate(text, &symbols, Some(left)));
        }
        symbols
    }

    /// The merge of a symbol with its right neighbour, if their union is a token.
    fn candidate(&self, text: &str, symbols: &[Symbol], left: Option<usize>) -> Option<Candidate> {
        let left = left?;
        let right = symbols[left].next?;
        if symbols[left].is_fixed || symbols[right].is_fixed {
            return None;
        }
        let union = &text.as_bytes()[symbols[left].start..symbols[right].end];
        let &token = self.tokens.get(union)?;
        Some(Candidate {
            score: self.scores.get(token as usize).copied().unwrap_or(0.0),
            left,
            right,
            n_bytes: union.len(),
        })
    }
}

/// Appends the bytes that a token's text stands for.
pub(crate) fn decode(text: &str, kind: TokenKind, bytes: &mut Vec<u8>) {
    match (kind, byte_of(text)) {
        (TokenKind::Byte, Some(byte)) => bytes.push(byte),
        (TokenKind::Normal | TokenKind::UserDefined, _) => {
            let mut parts = text.split(SPACE_MARK);
            bytes.extend_from_slice(parts.next().unwrap_or_default().as_bytes());
            for part in parts {
                bytes.push(b' ');
                bytes.extend_from_slice(part.as_bytes());
            }
        }
        _ => bytes.extend_from_slice(text.as_bytes()),
    }
}

/// Reads `<0x0A>`.
fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok()
}

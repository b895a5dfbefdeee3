//! How byte-level vocabularies cut text into words before merging: one table row per value of
//! `tokenizer.ggml.pre`, each a list of regular expressions.
//!
//! The expressions of a row are applied one after the other, each to the parts that the ones
//! before it left; matches and the text between them both become parts. Pure, no thread.
//! The expressions are facts of the published tokenizers. A family whose rule cannot be said in
//! this way (Falcon splits digits inside encoded characters) has no row: an error that lists the
//! known names is better than wrong tokens.

use tokenizers::utils::SysRegex;

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const EAST_ASIAN: &str = r"[一-龥ࠀ-一가-퟿]+";
const PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|]+";
const THREE_DIGITS: &str = "[0-9][0-9][0-9]";

/// A way to cut text.
struct Row {
    /// Values of `tokenizer.ggml.pre`.
    names: &'static [&'static str],
    patterns: &'static [&'static str],
    /// A whole word that is in the vocabulary is taken without merging.
    ignore_merges: bool,
}

const TABLE: &[Row] = &[
    row(
        &[
            "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion",
        ],
        &[GPT2],
    ),
    // For files that name none; the tests compare all other rows with the published tokenizers.
    row(&["default"], &[PUNCTUATION, GPT2, r"\p{N}+", THREE_DIGITS]),
    Row {
        ignore_merges: true,
        ..row(
            &[
                "llama3",
                "llama-v3",
                "llama-bpe",
                "falcon3",
                "falcon-h1",
                "lfm2",
                "pixtral",
            ],
            &[LLAMA3],
        )
    },
    row(&["smaug-bpe", "dbrx", "chatglm-bpe", "glm4"], &[LLAMA3]),
    row(
        &[
            "qwen2",
            "stablelm2",
            "deepseek-r1-qwen",
            "hunyuan",
            "megrez",
        ],
        &[QWEN2],
    ),
    row(&["qwen35"], &[QWEN35]),
    row(
        &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
        ],
        &[r"\p{N}", GPT2],
    ),
    row(
        &["deepseek-coder"],
        &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", EAST_ASIAN, r"\p{N}"],
    ),
    row(
        &["deepseek-v3", "hunyuan-dense"],
        &[r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3],
    ),
    Row {
        ignore_merges: true,
        ..row(&["tekken"], &[TEKKEN])
    },
    row(&["gpt-4o", "llama4"], &[GPT4O]),
];

const fn row(names: &'static [&'static str], patterns: &'static [&'static str]) -> Row {
    Row {
        names,
        patterns,
        ignore_merges: false,
    }
}

/// The name under which other software knows a list of expressions.
pub(crate) fn name_of(patterns: &[String], ignore_merges: bool) -> Option<&'static str> {
    let same = |row: &&Row| row.ignore_merges == ignore_merges && row.patterns == patterns;
    let row = TABLE.iter().find(same)?;
    row.names.first().copied()
}

/// A compiled row.
pub(crate) struct PreTokenizer {
    patterns: Vec<SysRegex>,
    ignore_merges: bool,
}

impl PreTokenizer {
    /// The row of a name; the error lists the known names.
    pub(crate) fn named(name: &str) -> Result<Self, String> {
        let Some(row) = TABLE.iter().find(|row| row.names.contains(&name)) else {
            let mut known: Vec<&str> = TABLE.iter().flat_map(|row| row.names).copied().collect();
            known.sort_unstable();
            return Err(format!(
                "tokenizer.ggml.pre: unknown pre-tokenizer `{name}`; known are {}",
                known.join(", ")
            ));
        };
        let compile = |pattern: &&str| {
            SysRegex::new(pattern).map_err(|error| format!("pre-tokenizer `{name}`: {error}"))
        };
        Ok(Self {
            patterns: row.patterns.iter().map(compile).collect::<Result<_, _>>()?,
            ignore_merges: row.ignore_merges,
        })
    }

    /// Of expressions that a file spells out.
    pub(crate) fn of_patterns(patterns: &[String], ignore_merges: bool) -> Result<Self, String> {
        let compile = |pattern: &String| {
            SysRegex::new(pattern)
                .map_err(|error| format!("tokenizer.tinyloop.patterns: {pattern:?}: {error}"))
        };
        Ok(Self {
            patterns: patterns.iter().map(compile).collect::<Result<_, _>>()?,
            ignore_merges,
        })
    }

    /// Whether a whole word that is in the vocabulary is taken without merging.
    pub(crate) fn ignore_merges(&self) -> bool {
        self.ignore_merges
    }

    /// Byte ranges of the words of `text`: in order, without gaps, none empty.
    pub(crate) fn words(&self, text: &str) -> Vec<(usize, usize)> {
        let mut parts = vec![(0, text.len())];
        for pattern in &self.patterns {
            let mut finer = Vec::with_capacity(parts.len());
            for (start, end) in parts {
                cut(pattern, text, start, end, &mut finer);
            }
            parts = finer;
        }
        parts
    }
}

/// Appends the matches inside `start..end` and what lies between them.
fn cut(pattern: &SysRegex, text: &str, start: usize, end: usize, parts: &mut Vec<(usize, usize)>) {
    let mut done = start;
    for (match_start, match_end) in pattern.find_iter(&text[start..end]) {
        let (match_start, match_end) = (start + match_start, start + match_end);
        if done < match_start {
            parts.push((done, match_start));
        }
        if match_start < match_end {
            parts.push((match_start, match_end));
        }
        done = match_end;
    }
    if done < end {
        parts.push((done, end));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        let pre = PreTokenizer::named(name).expect("a known name");
        let ranges = pre.words(text).into_iter();
        ranges.map(|(start, end)| &text[start..end]).collect()
    }

    #[test]
    fn every_row_compiles_and_loses_nothing() {
        let text = "I'LL pay  $1234.50 — naïve\r\n\r\n 日本語, 👩‍👩‍👧 `x`\t\n ";
        for name in TABLE.iter().flat_map(|row| row.names) {
            assert_eq!(words(name, text).concat(), text, "{name}");
        }
    }

    #[test]
    fn rows_differ_where_they_should() {
        let text = "It's 1234  ok";
        assert_eq!(words("gpt-2", text), ["It", "'s", " 1234", " ", " ok"]);
        assert_eq!(
            words("llama-bpe", text),
            ["It", "'s", " ", "123", "4", " ", " ok"]
        );
        assert_eq!(
            words("qwen2", text),
            ["It", "'s", " ", "1", "2", "3", "4", " ", " ok"]
        );
        assert_eq!(
            words("smollm", text),
            ["It", "'s", " ", "1", "2", "3", "4", " ", " ok"]
        );
        assert_eq!(
            words("default", text),
            ["It", "'", "s", " ", "123", "4", " ", " ok"]
        );
        assert_eq!(words("gpt-4o", "HelloWorld's"), ["Hello", "World's"]);
        assert_eq!(
            words("tekken", "HelloWorld 12"),
            ["Hello", "World", " ", "1", "2"]
        );
    }

    #[test]
    fn rows_cut_where_the_published_tokenizers_cut() {
        let fixture = include_str!("../../tests/data/tokenizer_words.json");
        let fixture: serde_json::Value = serde_json::from_str(fixture).expect("committed JSON");
        let texts = fixture["texts"].as_array().expect("texts");
        let families = fixture["lengths"].as_object().expect("families");
        assert!(families.len() >= 9 && texts.len() >= 40);
        for (family, lengths) in families {
            for (text, lengths) in texts.iter().zip(lengths.as_array().expect("lists")) {
                let text = text.as_str().expect("a text");
                let parts = words(family, text);
                let found: Vec<usize> = parts.iter().map(|part| part.chars().count()).collect();
                assert_eq!(serde_json::json!(found), *lengths, "{family}: {parts:?}");
            }
        }
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let Err(message) = PreTokenizer::named("nonsense") else {
            panic!("there is no such row");
        };
        assert!(
            message.contains("`nonsense`") && message.contains("llama-bpe"),
            "{message}"
        );
    }
}

//! Reading JSON that is still being written: what is certain of it, and what may still come.
//!
//! Pure. A [`Reader`] looks at the text so far and says "more" where its answer would depend on what
//! follows; so every answer holds for all continuations, however the text was cut. What is not here:
//! which objects are calls (`item`).

/// Why a reader cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The text ends too early; what follows decides.
    More,
    /// It is not what was looked for, whatever follows.
    Bad,
}

/// Deepest nesting that is looked into.
const DEPTH_MAX: u32 = 128;

/// A position in a text that may go on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'t> {
    text: &'t str,
    at: usize,
}

impl<'t> Reader<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        Self { text, at: 0 }
    }

    /// Bytes read so far.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// What comes next.
    pub(super) fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }

    /// Goes past white space.
    pub(super) fn space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    /// The next byte.
    pub(super) fn peek(&self) -> Result<u8, Stop> {
        self.rest().bytes().next().ok_or(Stop::More)
    }

    /// Goes past `literal`.
    pub(super) fn literal(&mut self, literal: &str) -> Result<(), Stop> {
        if self.rest().starts_with(literal) {
            self.at += literal.len();
            return Ok(());
        }
        Err(match literal.starts_with(self.rest()) {
            true => Stop::More,
            false => Stop::Bad,
        })
    }

    /// The text before `end`, and past that.
    pub(super) fn until(&mut self, end: &str) -> Result<&'t str, Stop> {
        let before = self.rest().find(end).ok_or(Stop::More)?;
        let found = &self.rest()[..before];
        self.at += before + end.len();
        Ok(found)
    }

    /// The longest run of characters that `is_in` accepts, once it is certain where it ends.
    pub(super) fn run(&mut self, is_in: impl Fn(char) -> bool) -> Result<&'t str, Stop> {
        let rest = self.rest();
        let n_bytes = rest.find(|c| !is_in(c)).ok_or(Stop::More)?;
        self.at += n_bytes;
        Ok(&rest[..n_bytes])
    }

    /// The raw text between two `quote`s, of which those behind a backslash do not count, and past it.
    pub(super) fn quoted(&mut self, quote: char) -> Result<&'t str, Stop> {
        let mut inside = *self;
        inside.literal(quote.encode_utf8(&mut [0; 4]))?;
        let raw = inside.rest();
        let mut is_escaped = false;
        for (index, character) in raw.char_indices() {
            match character {
                _ if is_escaped => is_escaped = false,
                '\\' => is_escaped = true,
                other if other == quote => {
                    self.at = inside.at + index + quote.len_utf8();
                    return Ok(&raw[..index]);
                }
                _ => {}
            }
        }
        Err(Stop::More)
    }

    /// A JSON string, decoded.
    pub(super) fn string(&mut self) -> Result<String, Stop> {
        if self.peek()? != b'"' {
            return Err(Stop::Bad);
        }
        let raw = self.value()?;
        serde_json::from_str(raw).map_err(|_| Stop::Bad)
    }

    /// Any JSON value, as it is written; not checked beyond its brackets and quotes.
    pub(super) fn value(&mut self) -> Result<&'t str, Stop> {
        let rest = self.rest();
        let n_bytes = match self.peek()? {
            b'"' | b'{' | b'[' => {
                let mut scan = Scan::default();
                let n_bytes = scan.feed(rest);
                match scan.end() {
                    Some(ScanEnd::Complete) => n_bytes,
                    Some(ScanEnd::Broken) => return Err(Stop::Bad),
                    None => return Err(Stop::More),
                }
            }
            _ => rest
                .find(|c: char| c.is_whitespace() || ",}]".contains(c))
                .ok_or(Stop::More)?,
        };
        if n_bytes == 0 {
            return Err(Stop::Bad);
        }
        self.at += n_bytes;
        Ok(&rest[..n_bytes])
    }
}

/// How a scanned value ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScanEnd {
    /// With its last bracket or quote.
    Complete,
    /// A mark begins in the middle of it, or it is nested too deep.
    Broken,
}

/// Finds the end of a JSON object, array or string that comes in pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Scan {
    depth: u32,
    in_string: bool,
    is_escaped: bool,
    end: Option<ScanEnd>,
}

impl Scan {
    /// How it ended; None while it goes on.
    pub(super) fn end(&self) -> Option<ScanEnd> {
        self.end
    }

    /// Bytes of `text` that belong to the value.
    pub(super) fn feed(&mut self, text: &str) -> usize {
        for (index, byte) in text.bytes().enumerate() {
            if self.end.is_some() {
                return index;
            }
            if self.in_string {
                match byte {
                    _ if self.is_escaped => self.is_escaped = false,
                    b'\\' => self.is_escaped = true,
                    b'"' => {
                        self.in_string = false;
                        self.close_if_outside();
                    }
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' if self.depth == DEPTH_MAX => self.end = Some(ScanEnd::Broken),
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    self.close_if_outside();
                }
                // JSON has none outside of strings: a closing mark of the model's own.
                b'<' => self.end = Some(ScanEnd::Broken),
                _ => {}
            }
            if self.end == Some(ScanEnd::Broken) {
                return index;
            }
        }
        text.len()
    }

    fn close_if_outside(&mut self) {
        if self.depth == 0 {
            self.end = Some(ScanEnd::Complete);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_end_where_json_says() {
        #[rustfmt::skip]
        let table: [(&str, Result<&str, Stop>); 10] = [
            (r#"{"a": "}"} x"#, Ok(r#"{"a": "}"}"#)),
            (r#"[1, [2]],"#, Ok("[1, [2]]")),
            (r#""a\"b" "#, Ok(r#""a\"b""#)),
            ("12,", Ok("12")),
            ("12", Err(Stop::More)),
            (r#"{"a": 1"#, Err(Stop::More)),
            (r#"{"a": 1</x>"#, Err(Stop::Bad)),
            (r#"{"a": "</x>"}"#, Ok(r#"{"a": "</x>"}"#)),
            ("}", Err(Stop::Bad)),
            ("", Err(Stop::More)),
        ];
        for (text, expected) in table {
            assert_eq!(Reader::new(text).value(), expected, "{text}");
        }
        let deep = "[".repeat(1000);
        assert_eq!(Reader::new(&deep).value(), Err(Stop::Bad));
    }

    #[test]
    fn a_scan_does_not_depend_on_the_cuts() {
        let text = r#"{"a": "x\\\"}", "b": [{}, "é"]} tail"#;
        let mut whole = Scan::default();
        let n_bytes = whole.feed(text);
        assert_eq!(&text[n_bytes..], " tail");
        for cut in (0..text.len()).filter(|cut| text.is_char_boundary(*cut)) {
            let mut scan = Scan::default();
            let first = scan.feed(&text[..cut]);
            let second = if first == cut {
                scan.feed(&text[cut..])
            } else {
                0
            };
            assert_eq!(first + second, n_bytes);
            assert_eq!(scan, whole);
        }
    }
}

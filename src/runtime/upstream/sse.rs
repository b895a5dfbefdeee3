//! Server-sent events, read as the bytes come: a pure state machine with limits.
//!
//! Fed with pieces of any length, split anywhere, also inside a character. Lines end in LF, CR or
//! CRLF; comments and fields other than `data` are dropped; several `data` lines of one event are
//! joined by a line break. What is not here: the socket, and what an event means.

/// Longest line in bytes; a chunk of a chat answer has some hundreds.
pub const LINE_BYTES_MAX: usize = 1 << 20;
/// Most bytes of data in one event.
pub const EVENT_BYTES_MAX: usize = 4 << 20;

/// Why a stream is not read further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SseError {
    /// No line end for too long.
    #[error("a line of the event stream has more than {LINE_BYTES_MAX} bytes")]
    LineTooLong,
    /// No empty line for too long.
    #[error("an event of the stream has more than {EVENT_BYTES_MAX} bytes")]
    EventTooLong,
    /// Text is UTF-8.
    #[error("an event of the stream is not UTF-8")]
    NotUtf8,
}

/// See the module.
#[derive(Debug, Default)]
pub struct SseParser {
    /// The unfinished line.
    line: Vec<u8>,
    /// Data of the unfinished event; None before its first `data` line.
    data: Option<Vec<u8>>,
    /// The last byte was a CR, so that a LF right behind it is part of the same line end.
    after_cr: bool,
}

impl SseParser {
    /// Takes the next bytes and gives the data of every event that they complete to `event`.
    ///
    /// # Errors
    /// See [`SseError`]; the stream is of no use any more.
    pub fn push(&mut self, bytes: &[u8], mut event: impl FnMut(String)) -> Result<(), SseError> {
        let mut rest = bytes;
        while let Some(first) = rest.first() {
            if std::mem::take(&mut self.after_cr) && *first == b'\n' {
                rest = &rest[1..];
                continue;
            }
            let end = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let n_taken = end.unwrap_or(rest.len());
            if self.line.len() + n_taken > LINE_BYTES_MAX {
                return Err(SseError::LineTooLong);
            }
            self.line.extend_from_slice(&rest[..n_taken]);
            let Some(end) = end else { break };
            self.after_cr = rest[end] == b'\r';
            rest = &rest[end + 1..];
            if let Some(data) = self.end_line()? {
                event(data);
            }
        }
        Ok(())
    }

    /// A line is complete; the data of the event that it ends, if it does.
    fn end_line(&mut self) -> Result<Option<String>, SseError> {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            let data = self.data.take();
            let text = data.map(String::from_utf8).transpose();
            return text.map_err(|_| SseError::NotUtf8);
        }
        let value = match line.strip_prefix(b"data") {
            Some([b':', b' ', value @ ..] | [b':', value @ ..]) => value,
            Some([]) => &[],
            Some(_) | None => return Ok(None), // a comment, or another field
        };
        let held = self.data.as_ref().map_or(0, |data| data.len() + 1);
        if held + value.len() > EVENT_BYTES_MAX {
            return Err(SseError::EventTooLong);
        }
        match &mut self.data {
            Some(data) => {
                data.push(b'\n');
                data.extend_from_slice(value);
            }
            None => self.data = Some(value.to_vec()),
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(pieces: &[&[u8]]) -> Result<Vec<String>, SseError> {
        let mut parser = SseParser::default();
        let mut events = Vec::new();
        for piece in pieces {
            parser.push(piece, |event| events.push(event))?;
        }
        Ok(events)
    }

    #[test]
    fn events_end_with_an_empty_line() {
        #[rustfmt::skip]
        let table: &[(&str, &[&str])] = &[
            ("", &[]),
            ("data: a\n\n", &["a"]),
            ("data:a\r\n\r\n", &["a"]),
            ("data: a\r\rdata: b\r\r", &["a", "b"]),
            ("data: a\ndata: b\n\n", &["a\nb"]),
            (": ping\n\ndata: a\n\n", &["a"]),
            ("event: x\nid: 1\nretry: 5\ndata: a\n\n", &["a"]),
            ("data\n\n", &[""]),
            ("data:  a\n\n", &[" a"]),
            ("database: a\n\n", &[]),
            ("data: never ended\n", &[]),
            ("\n\n\r\n", &[]),
        ];
        for (text, expected) in table {
            assert_eq!(
                parse(&[text.as_bytes()]).expect("sound"),
                *expected,
                "{text:?}"
            );
        }
    }

    #[test]
    fn what_never_ends_is_refused() {
        let long = vec![b'x'; LINE_BYTES_MAX];
        assert_eq!(parse(&[&long]), Ok(Vec::new()));
        assert_eq!(parse(&[&long, b"x"]), Err(SseError::LineTooLong));
        let line = [b"data: ", &long[6..], b"\n"].concat();
        let few = vec![line.as_slice(); EVENT_BYTES_MAX / LINE_BYTES_MAX];
        assert_eq!(parse(&few), Ok(Vec::new()));
        let many = vec![line.as_slice(); EVENT_BYTES_MAX / LINE_BYTES_MAX + 1];
        assert_eq!(parse(&many), Err(SseError::EventTooLong));
        assert_eq!(parse(&[b"data: \xff\n\n"]), Err(SseError::NotUtf8));
    }

    proptest! {
        /// Split anywhere, the same events come out.
        #[test]
        fn splits_change_nothing(
            lines in prop::collection::vec("(data: ?|: |event: )?[a-zé漢😀]{0,6}(\r\n|\n|\r){1,2}", 0..12),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        ) {
            let bytes = lines.concat().into_bytes();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]]).collect();
            prop_assert_eq!(parse(&pieces), parse(&[&bytes]));
            let single: Vec<&[u8]> = bytes.chunks(1).collect();
            prop_assert_eq!(parse(&single), parse(&[&bytes]));
        }

        /// No input panics.
        #[test]
        fn any_bytes_are_read(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..10)) {
            let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            let _ = parse(&pieces);
        }
    }
}

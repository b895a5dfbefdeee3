//! GBNF, the grammar notation of llama.cpp, put into the Lark dialect that grammars are compiled from.
//!
//! Pure: text to text. What is read: rules `name ::= ..` that begin at `root`, literals with escapes,
//! character classes, `.`, groups, `|`, `*`, `+`, `?`, `{m}`, `{m,}`, `{m,n}`, comments. A rule ends at a
//! line break outside parentheses that no `|` follows. What is not here: whether the grammar makes sense
//! (`grammar` compiles it).

use std::fmt::Write;

/// Deepest nesting of parentheses.
const DEPTH_MAX: usize = 64;

/// Whether a text is GBNF rather than Lark.
pub(super) fn is_gbnf(text: &str) -> bool {
    text.contains("::=")
}

/// The same grammar in Lark.
///
/// # Errors
/// What is wrong, and in which line.
pub(super) fn to_lark(text: &str) -> Result<String, String> {
    let mut reader = Reader {
        rest: text,
        n_lines: 1,
    };
    let mut lark = String::from("start: r_root\n");
    let mut has_root = false;
    reader.skip_space(true)?;
    while !reader.rest.is_empty() {
        let name = reader
            .name()
            .ok_or_else(|| reader.fault("a rule's name is expected"))?;
        reader.skip_space(true)?;
        if !reader.eat("::=") {
            return Err(reader.fault(&format!("`::=` is expected after `{name}`")));
        }
        has_root |= name == "root";
        reader.skip_space(true)?;
        let body = reader.alternatives(0)?;
        // Writing to a string cannot fail.
        let _ = writeln!(lark, "{}: {body}", lark_name(name));
        reader.skip_space(true)?;
    }
    match has_root {
        true => Ok(lark),
        false => Err("the grammar has no rule `root`".to_owned()),
    }
}

/// GBNF names may hold dashes, capitals and digits anywhere; Lark's rules are lower case.
fn lark_name(name: &str) -> String {
    let mut lark = String::from("r_");
    for c in name.chars() {
        match c {
            'a'..='z' | '0'..='9' => lark.push(c),
            // Each other character its own way, so that no two names become one.
            _ => {
                let _ = write!(lark, "_{:x}_", u32::from(c));
            }
        }
    }
    lark
}

struct Reader<'t> {
    rest: &'t str,
    n_lines: usize,
}

impl<'t> Reader<'t> {
    fn fault(&self, what: &str) -> String {
        let shown: String = self.rest.chars().take(20).collect();
        format!("line {}: {what}, before {shown:?}", self.n_lines)
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.rest = &self.rest[c.len_utf8()..];
        self.n_lines += usize::from(c == '\n');
        Some(c)
    }

    fn eat(&mut self, text: &str) -> bool {
        match self.rest.strip_prefix(text) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    /// Spaces and comments; line breaks too where they mean nothing.
    fn skip_space(&mut self, breaks: bool) -> Result<(), String> {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' | '\r' => drop(self.next()),
                '\n' if breaks => drop(self.next()),
                '#' => {
                    let end = self.rest.find('\n').unwrap_or(self.rest.len());
                    self.rest = &self.rest[end..];
                }
                _ => break,
            }
        }
        Ok(())
    }

    fn name(&mut self) -> Option<&'t str> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        (!name.is_empty()).then_some(name)
    }

    fn alternatives(&mut self, depth: usize) -> Result<String, String> {
        let is_grouped = depth > 0;
        if depth > DEPTH_MAX {
            return Err(self.fault("parentheses are nested too deep"));
        }
        let mut lark = self.sequence(depth)?;
        loop {
            // An alternative may stand on the next line.
            let before = (self.rest, self.n_lines);
            self.skip_space(true)?;
            if !self.eat("|") {
                if !is_grouped {
                    (self.rest, self.n_lines) = before;
                }
                return Ok(lark);
            }
            self.skip_space(true)?;
            lark.push_str(" | ");
            lark.push_str(&self.sequence(depth)?);
        }
    }

    /// Items up to `|`, `)` or the end of the rule.
    fn sequence(&mut self, depth: usize) -> Result<String, String> {
        let mut items = Vec::new();
        loop {
            self.skip_space(depth > 0)?;
            let mut item = match self.peek() {
                None | Some('\n' | '|' | ')') => break,
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.next();
                    r"/[\s\S]/".to_owned()
                }
                Some('(') => {
                    self.next();
                    self.skip_space(true)?;
                    let inner = self.alternatives(depth + 1)?;
                    if !self.eat(")") {
                        return Err(self.fault("`)` is expected"));
                    }
                    format!("({inner})")
                }
                Some(_) => match self.name() {
                    Some(name) => lark_name(name),
                    None => {
                        return Err(self.fault("a literal, a class, a group or a name is expected"));
                    }
                },
            };
            item.push_str(&self.repetition()?);
            items.push(item);
        }
        Ok(match items.is_empty() {
            true => "\"\"".to_owned(),
            false => items.join(" "),
        })
    }

    fn repetition(&mut self) -> Result<String, String> {
        match self.peek() {
            Some(c @ ('*' | '+' | '?')) => {
                self.next();
                Ok(c.to_string())
            }
            Some('{') => {
                let end = self
                    .rest
                    .find('}')
                    .ok_or_else(|| self.fault("`}` is expected"))?;
                let inner: String = self.rest[1..end].split_whitespace().collect();
                let is_count = inner
                    .split(',')
                    .all(|n| n.bytes().all(|b| b.is_ascii_digit()));
                if !is_count || inner.split(',').count() > 2 || inner.trim_matches(',').is_empty() {
                    return Err(self.fault("a count like {2}, {2,} or {2,5} is expected"));
                }
                self.rest = &self.rest[end + 1..];
                Ok(format!("{{{inner}}}"))
            }
            _ => Ok(String::new()),
        }
    }

    fn literal(&mut self) -> Result<String, String> {
        self.next();
        let mut text = String::new();
        loop {
            match self.next() {
                None | Some('\n') => return Err(self.fault("a literal has no end")),
                Some('"') => break,
                Some('\\') => text.push(self.escape()?),
                Some(c) => text.push(c),
            }
        }
        // Lark's strings are JSON's.
        Ok(serde_json::Value::from(text).to_string())
    }

    /// `[a-z]` as an expression.
    fn class(&mut self) -> Result<String, String> {
        self.next();
        let mut lark = String::from("/[");
        if self.eat("^") {
            lark.push('^');
        }
        loop {
            let c = match self.next() {
                None | Some('\n') => return Err(self.fault("a character class has no end")),
                Some(']') => break,
                Some('-') => {
                    // A range when between two; escaped where it stands for itself.
                    let is_range = !lark.ends_with(['[', '^']) && !self.rest.starts_with(']');
                    lark.push_str(if is_range { "-" } else { r"\-" });
                    continue;
                }
                Some('\\') => self.escape()?,
                Some(c) => c,
            };
            let _ = write!(lark, r"\u{{{:x}}}", u32::from(c));
        }
        lark.push_str("]/");
        Ok(lark)
    }

    /// Behind a backslash.
    fn escape(&mut self) -> Result<char, String> {
        let n_digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(c @ ('"' | '\\' | '[' | ']' | '-' | '^' | '/' | '.')) => return Ok(c),
            _ => return Err(self.fault("an unknown escape")),
        };
        let code = self.rest.get(..n_digits);
        let code = code.and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let c = code.and_then(char::from_u32);
        let c = c.ok_or_else(|| self.fault("an escape of a character that does not exist"))?;
        self.rest = &self.rest[n_digits..];
        Ok(c)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rules_literals_classes_groups_and_counts() {
        let gbnf = "# a list\nroot ::= \"- \" Item-1 (\", \" Item-1)*  # and more\n\n\
                    Item-1 ::= [a-z0-9_-]{2,5} | \"\\\"\" [^\"\\\\\\n]+ \"\\x22\"\n  | .? (\n\"a\"\n| )\n";
        let lark = to_lark(gbnf).expect("sound");
        let rules: Vec<&str> = lark.lines().collect();
        assert_eq!(rules[0], "start: r_root");
        assert_eq!(
            rules[1],
            r#"r_root: "- " r__49_tem_2d_1 (", " r__49_tem_2d_1)*"#
        );
        let class = r"/[\u{61}-\u{7a}\u{30}-\u{39}\u{5f}\-]/{2,5}";
        let rest = r#"| "\"" /[^\u{22}\u{5c}\u{a}]/+ "\"" | /[\s\S]/? ("a" | "")"#;
        assert_eq!(rules[2], format!("r__49_tem_2d_1: {class} {rest}"));
        assert_eq!(rules.len(), 3);
    }

    #[test]
    fn faults_name_their_line() {
        for (gbnf, part) in [
            ("a ::= \"x\"", "no rule `root`"),
            ("root = \"x\"", "line 1: `::=` is expected"),
            ("root ::= \"x\"\n\"y\" ::= z", "line 2: a rule's name"),
            ("root ::= \"x", "a literal has no end"),
            ("root ::= [a-z", "class has no end"),
            ("root ::= (\"x\"", "`)` is expected"),
            ("root ::= \"x\"{a}", "a count like"),
            ("root ::= \"x\"{,}", "a count like"),
            ("root ::= \"\\q\"", "unknown escape"),
            ("root ::= \"\\ud800\"", "does not exist"),
            ("root ::= %", "a literal, a class"),
        ] {
            let error = to_lark(gbnf).expect_err(gbnf);
            assert!(error.contains(part), "{gbnf}: {error}");
        }
        let deep = format!("root ::= {}x{}", "(".repeat(1000), ")".repeat(1000));
        assert!(to_lark(&deep).expect_err("deep").contains("too deep"));
    }

    proptest! {
        #[test]
        fn no_text_breaks_the_reader(text in "(root ::= )?[a-z\"\\[\\](){}|*+?.^\\\\ \n#:=,0-9\u{e4}-]{0,40}") {
            let _ = to_lark(&text);
        }
    }
}

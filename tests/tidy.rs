//! The architecture, checked: layers, lengths, module docs, bans. Fails with one line per fault,
//! so that the rules of `src/lib.rs` cannot rot silently.
//!
//! The checks read the formatted source text (rustfmt's indentation is the grammar); they are
//! plain functions from text to faults, each tested on a bad example below.

use std::fs;
use std::path::{Path, PathBuf};

/// Rank of every top-level module; a file may use only lower ranks (and its own module).
/// `format` stands just above `backend`: it hands out tensors in the backend's terms.
const RANKS: &[(&str, u32)] = &[
    ("request", 1),
    ("constraint", 0),
    ("error", 0),
    ("dtype", 0),
    ("clock", 0),
    ("rate", 0),
    ("heap", 0),
    ("config", 0),
    ("backend", 10),
    ("format", 11),
    ("model", 20),
    ("chat", 20),
    ("tokenizer", 20),
    ("engine", 30),
    ("runtime", 40),
    ("scheduler", 50),
    ("pool", 60),
    ("http", 70),
    ("server", 80),
    ("cli", 81),
    ("main", 82),
    ("lib", 90),
];

/// Longest function outside kernels, in lines.
const FUNCTION_LINES_MAX: usize = 70;
/// Longest kernel.
const KERNEL_LINES_MAX: usize = 150;
/// Files whose functions may be as long as a kernel.
const KERNEL_FILES: &[&str] = &["src/backend/cpu/", "src/backend/reference/"];
/// Longest file, tests not counted.
const FILE_LINES_MAX: usize = 600;
/// Files that may call crossbeam's `unbounded()`; each states its real bound beside the call.
const UNBOUNDED_FILES: &[&str] = &["src/engine/mod.rs", "src/http/wire/mod.rs"];
/// No async runtime may enter the dependency tree.
const BANNED_CRATES: &[&str] = &["tokio", "async-std", "smol", "async-io", "futures-executor"];
/// Field complaints with a test named after them.
const FIELD_CASES: usize = 25;
/// The budget of the dependency tree.
const CRATES_MAX: usize = 200;
/// Crates of other systems stand in the lock file and are never built here.
const FOREIGN_CRATES: &[&str] = &["windows", "winapi", "objc2", "wasi", "wit-bindgen"];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every Rust file below `folder`, as (path from the root with `/`, text).
fn rust_files(folder: &str) -> Vec<(String, String)> {
    fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).expect("a source folder can be listed") {
            let path = entry.expect("a directory entry can be read").path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    let mut paths = Vec::new();
    walk(&root().join(folder), &mut paths);
    paths.sort();
    let named = |path: PathBuf| {
        let name = path
            .strip_prefix(root())
            .expect("found below the root")
            .display()
            .to_string();
        (name, fs::read_to_string(&path).expect("source is UTF-8"))
    };
    paths.into_iter().map(named).collect()
}

/// Unit tests in a file of their own, beside what they test.
fn is_test_file(path: &str) -> bool {
    path.ends_with("_tests.rs") || path.ends_with("/tests.rs")
}

/// The text before the first `#[cfg(test)]` that opens a module.
fn without_tests(text: &str) -> &str {
    match text.find("\n#[cfg(test)]\nmod ") {
        Some(end) => &text[..end],
        None => text,
    }
}

/// Lines without `//` comments (good enough for rustfmt-formatted text: strings that hold `//`
/// lose their tail, which can only hide, never invent, a fault).
fn code_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(index, line)| {
        let code = line.split("//").next().unwrap_or_default();
        (index + 1, code)
    })
}

fn top_module(path: &str) -> &str {
    let below = path.strip_prefix("src/").unwrap_or(path);
    let first = below.split('/').next().unwrap_or(below);
    first.strip_suffix(".rs").unwrap_or(first)
}

fn rank(module: &str) -> Option<u32> {
    RANKS
        .iter()
        .find(|(name, _)| *name == module)
        .map(|(_, rank)| *rank)
}

/// Modules named right after `crate::` in a line; `crate::{a, b::c}` gives both.
fn crate_paths(line: &str) -> Vec<String> {
    let mut found = Vec::new();
    for part in line.split("crate::").skip(1) {
        let names: Vec<&str> = match part.strip_prefix('{') {
            Some(group) => group
                .split('}')
                .next()
                .unwrap_or_default()
                .split(',')
                .collect(),
            None => vec![part],
        };
        for name in names {
            let word: String = name
                .trim()
                .chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect();
            found.push(word);
        }
    }
    found
}

fn layer_faults(path: &str, text: &str) -> Vec<String> {
    let own = top_module(path);
    let Some(own_rank) = rank(own) else {
        return vec![format!(
            "{path}: module `{own}` has no rank in tests/tidy.rs"
        )];
    };
    let mut faults = Vec::new();
    for (number, line) in code_lines(without_tests(text)) {
        for module in crate_paths(line) {
            let Some(used) = rank(&module) else { continue };
            if module != own && used >= own_rank && own != "lib" {
                faults.push(format!(
                    "{path}:{number}: `{own}` may not use `{module}` (same or higher rank)"
                ));
            }
        }
    }
    faults
}

/// (name, first line, number of lines) of every function, by rustfmt's indentation.
fn functions(text: &str) -> Vec<(String, usize, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let trimmed = line.trim_start();
        let indent = line.len() - trimmed.len();
        let mut words = trimmed.split_whitespace();
        let is_prefix = |word: &str| {
            matches!(word, "const" | "unsafe" | "extern" | "\"C\"") || word.starts_with("pub")
        };
        let keyword = words.find(|word| !is_prefix(word));
        if keyword != Some("fn") {
            continue;
        }
        let name = words.next().unwrap_or_default();
        let name: String = name
            .chars()
            .take_while(|c| c.is_alphanumeric() || *c == '_')
            .collect();
        let close = format!("{}}}", " ".repeat(indent));
        let body = &lines[start..];
        let opens = body.iter().position(|l| l.trim_end().ends_with('{'));
        let ends = body
            .iter()
            .position(|l| l.trim_end().ends_with(';') && l.len() > indent);
        let Some(opens) = opens else { continue };
        if ends.is_some_and(|ends| ends < opens) {
            continue; // a declaration without a body
        }
        if let Some(length) = body.iter().skip(opens).position(|l| l.trim_end() == close) {
            found.push((name, start + 1, opens + length + 1));
        }
    }
    found
}

fn length_faults(path: &str, text: &str) -> Vec<String> {
    if is_test_file(path) {
        return Vec::new();
    }
    let text = without_tests(text);
    let is_kernel_file = KERNEL_FILES.iter().any(|prefix| path.starts_with(prefix));
    let max = if is_kernel_file {
        KERNEL_LINES_MAX
    } else {
        FUNCTION_LINES_MAX
    };
    let mut faults: Vec<String> = functions(text)
        .into_iter()
        .filter(|(_, _, length)| *length > max)
        .map(|(name, line, length)| {
            format!("{path}:{line}: fn {name} has {length} lines, at most {max}")
        })
        .collect();
    let n_lines = text.lines().count();
    if n_lines > FILE_LINES_MAX {
        faults.push(format!(
            "{path}: {n_lines} lines without tests, at most {FILE_LINES_MAX}"
        ));
    }
    faults
}

fn ban_faults(path: &str, text: &str) -> Vec<String> {
    let text = without_tests(text);
    let in_any = |prefixes: &[&str]| prefixes.iter().any(|prefix| path.starts_with(prefix));
    let bans: [(&str, bool, &str); 6] = [
        (
            "cudarc",
            in_any(&["src/backend/cuda"]),
            "cudarc belongs to backend/cuda",
        ),
        (
            "unsafe ",
            in_any(&["src/backend/", "src/format/", "src/heap.rs"]),
            "unsafe belongs to backend/, format/ and heap",
        ),
        (
            "thread::spawn(",
            false,
            "a thread needs a name: use thread::Builder",
        ),
        (
            "unbounded(",
            in_any(UNBOUNDED_FILES),
            "unbounded channel outside the short list",
        ),
        ("println!", in_any(&["src/cli"]), "printing belongs to cli"),
        (
            "process::exit",
            in_any(&["src/main.rs", "src/server.rs"]),
            "only main and server may exit",
        ),
    ];
    let mut faults = Vec::new();
    for (number, line) in code_lines(text) {
        let line = line.replace("eprintln!", ""); // stderr is open to all
        for (word, allowed, why) in &bans {
            if line.contains(word) && !allowed {
                faults.push(format!("{path}:{number}: `{word}`: {why}"));
            }
        }
    }
    faults
}

fn doc_faults(path: &str, text: &str) -> Vec<String> {
    if text.starts_with("//!") {
        Vec::new()
    } else {
        vec![format!(
            "{path}: does not open with a `//!` that says what it is and what it is not"
        )]
    }
}

fn assert_none(faults: &[String]) {
    assert!(
        faults.is_empty(),
        "{} faults:\n{}",
        faults.len(),
        faults.join("\n")
    );
}

fn check_sources(folder: &str, check: fn(&str, &str) -> Vec<String>) {
    let faults: Vec<String> = rust_files(folder)
        .iter()
        .flat_map(|(path, text)| check(path, text))
        .collect();
    assert_none(&faults);
}

#[test]
fn files_use_only_lower_ranks() {
    check_sources("src", layer_faults);
}

#[test]
fn functions_and_files_fit() {
    check_sources("src", length_faults);
}

#[test]
fn banned_words_stay_in_their_places() {
    check_sources("src", ban_faults);
}

#[test]
fn every_file_says_what_it_is() {
    check_sources("src", doc_faults);
    check_sources("tests", doc_faults);
}

#[test]
fn no_async_runtime_and_a_small_dependency_tree() {
    let lock = fs::read_to_string(root().join("Cargo.lock")).expect("Cargo.lock is committed");
    let names: Vec<&str> = lock
        .lines()
        .filter_map(|l| l.strip_prefix("name = \""))
        .collect();
    for name in &names {
        let name = name.trim_end_matches('"');
        assert!(!BANNED_CRATES.contains(&name), "Cargo.lock holds {name}");
    }
    let is_foreign = |name: &&str| FOREIGN_CRATES.iter().any(|prefix| name.starts_with(prefix));
    let n_built = names.iter().filter(|name| !is_foreign(name)).count();
    assert!(
        n_built <= CRATES_MAX,
        "{n_built} crates, at most {CRATES_MAX}"
    );
}

/// The repository stands alone: no tracked text names a folder of the machine it was written on.
#[test]
fn no_text_points_outside_the_repository() {
    let machine = ["/wo", "rk/"].concat(); // split so that this file does not name it
    let mut faults = Vec::new();
    let mut texts = [rust_files("src"), rust_files("tests")].concat();
    for name in ["README.md", "Makefile", "Cargo.toml", ".ci/run"] {
        texts.push((
            name.to_string(),
            fs::read_to_string(root().join(name)).unwrap_or_default(),
        ));
    }
    for entry in fs::read_dir(root().join("tests/scripts")).expect("tests/scripts exists") {
        let path = entry.expect("a directory entry can be read").path();
        if path.is_file() {
            let text = fs::read_to_string(&path).expect("scripts are UTF-8");
            texts.push((path.display().to_string(), text));
        }
    }
    for (path, text) in texts {
        for (index, line) in text.lines().enumerate() {
            if line.contains(&machine) || line.contains("../shared") {
                faults.push(format!("{path}:{}: {line}", index + 1));
            }
        }
    }
    // This file names the folder beside the repository once, in the line above.
    faults.retain(|fault| !fault.starts_with("tests/tidy.rs"));
    assert_none(&faults);
}

#[test]
fn the_checks_can_fail() {
    assert_eq!(
        layer_faults("src/model/x.rs", "use crate::engine::Step;").len(),
        1
    );
    assert_eq!(
        layer_faults("src/model/x.rs", "use crate::{dtype, http::Y};").len(),
        1
    );
    assert_eq!(
        layer_faults("src/model/x.rs", "use crate::backend::Pass;").len(),
        0
    );
    let long = format!("fn a() {{\n{}}}\n", "    x();\n".repeat(70));
    assert_eq!(length_faults("src/model/x.rs", &long).len(), 1);
    assert_eq!(
        ban_faults("src/model/x.rs", "let x = unsafe { y };").len(),
        1
    );
    assert_eq!(
        ban_faults("src/model/x.rs", "    std::thread::spawn(|| ());").len(),
        1
    );
    assert_eq!(doc_faults("src/model/x.rs", "use a;").len(), 1);
    assert_eq!(
        functions("impl A {\n    fn b(&self) {\n        c\n    }\n}\n"),
        [("b".into(), 2, 3)]
    );
    assert_eq!(
        functions("trait A {\n    fn b(&self);\n    fn c() {\n    }\n}\n").len(),
        1
    );
}

/// The complaints about other servers that this one is to answer, each with a test of its own.
#[test]
fn every_field_case_has_its_test() {
    let files = rust_files("tests");
    let missing: Vec<String> = (1..=FIELD_CASES)
        .map(|case| format!("fn case_{case:02}_"))
        .filter(|name| !files.iter().any(|(_, text)| text.contains(name.as_str())))
        .collect();
    assert_none(&missing);
}

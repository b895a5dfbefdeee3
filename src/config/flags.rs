//! Flags in `extra_args` that have a key of their own: read, and taken out.
//!
//! Pure. `llama-server` reads `--a_b` like `--a-b` and the last of several; vLLM reads both forms of a value,
//! `--a 1` and `--a=1`. What is not here: which flags there are (`backends`).

/// The value of a flag, in either form; the last one counts.
#[must_use]
pub fn value<'a>(args: &'a [String], names: &[&str]) -> Option<&'a str> {
    let mut found = None;
    for (index, arg) in args.iter().enumerate() {
        match split(arg) {
            (name, _) if !is_one_of(name, names) => {}
            (_, Some(value)) => found = Some(value),
            (_, None) => found = args.get(index + 1).map(String::as_str),
        }
    }
    found
}

/// Whether a flag without a value is there.
#[must_use]
pub fn has(args: &[String], names: &[&str]) -> bool {
    args.iter().any(|arg| is_one_of(split(arg).0, names))
}

/// The arguments without a flag and its values.
#[must_use]
pub fn without(args: &[String], names: &[&str]) -> Vec<String> {
    let mut kept = Vec::with_capacity(args.len());
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match split(arg) {
            (name, _) if !is_one_of(name, names) => kept.push(arg.clone()),
            (_, Some(_)) => {}
            (_, None) => {
                let _its_value = rest.next();
            }
        }
    }
    kept
}

fn split(arg: &str) -> (&str, Option<&str>) {
    match arg.split_once('=') {
        Some((name, value)) if name.starts_with('-') => (name, Some(value)),
        _ => (arg, None),
    }
}

fn is_one_of(name: &str, names: &[&str]) -> bool {
    match name.starts_with("--") && name.contains('_') {
        true => names.contains(&name.replace('_', "-").as_str()),
        false => names.contains(&name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_found_and_taken_out_in_all_their_forms() {
        let args = [
            "-c",
            "10",
            "--x",
            "--ctx_size",
            "20",
            "--ctx-size=30",
            "-cx",
        ];
        let args: Vec<String> = args.iter().map(ToString::to_string).collect();
        let names = ["-c", "--ctx-size"];
        assert_eq!(value(&args, &names), Some("30"));
        assert_eq!(value(&args[..5], &names), Some("20"));
        assert_eq!(value(&args[..1], &names), None, "its value is missing");
        assert_eq!(without(&args, &names), ["--x", "-cx"]);
        assert_eq!(without(&args[..1], &names), Vec::<String>::new());
        assert!(has(&args, &["--x"]) && !has(&args, &["--y"]));
    }
}

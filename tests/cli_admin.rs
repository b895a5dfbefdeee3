//! `tinyloop models`, `load`, `unload` and `top` against a running `tinyloop serve`: the real binary on
//! both sides, stand-in models.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

const CONFIG: &str = "
[models.first.fake]
[models.first]
aliases = ['1st']
[models.second]
enabled = false
replica_max = 4
fake = { tick_s = 0.001 }
[models.gone]
enabled = false
file = 'no-such-file.gguf'
";

/// A server; killed when dropped.
struct Serve {
    child: Child,
    /// Of the management plane.
    url: String,
    data_url: String,
    folder: PathBuf,
}

impl Serve {
    fn start(name: &str, extra: &[&str]) -> Self {
        let folder = format!("tinyloop-cli-admin-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        std::fs::create_dir_all(&folder).expect("the temporary folder takes it");
        let config = folder.join("pool.toml");
        std::fs::write(&config, CONFIG).expect("the folder is there");
        let mut child = tinyloop()
            .args(["serve", "--port", "0", "--management-port", "0", "--config"])
            .arg(&config)
            .args(extra)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary starts");
        let stdout = child.stdout.take().expect("piped");
        let mut lines = BufReader::new(stdout).lines();
        let mut address = |before: &str| {
            let found = lines.find_map(|line| {
                let line = line.expect("text");
                line.strip_prefix(before).map(str::to_owned)
            });
            found.unwrap_or_else(|| panic!("no line begins with {before:?}"))
        };
        let data_url = address("tinyloop listens on ");
        let url = address("management on ");
        address("models: "); // they are loaded
        Self {
            child,
            url,
            data_url,
            folder,
        }
    }

    fn ask(&self, words: &[&str]) -> Output {
        let output = tinyloop().args(words).args(["--admin", &self.url]).output();
        output.expect("the binary starts")
    }

    /// Standard output of a command that must succeed.
    #[track_caller]
    fn says(&self, words: &[&str]) -> String {
        let output = self.ask(words);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "{words:?}: {err}");
        out
    }

    /// Standard error of a command that must fail with this exit code.
    #[track_caller]
    fn fails(&self, code: i32, words: &[&str]) -> String {
        let output = self.ask(words);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {err}");
        assert_eq!(err.lines().count(), 1, "{err}");
        err
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn tinyloop() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tinyloop"));
    command
        .env_remove("TINYLOOP_ADMIN_KEY")
        .env("http_proxy", "http://127.0.0.1:9") // must not be used
        .stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

/// The row of a table as words.
#[track_caller]
fn row<'a>(table: &'a str, name: &str) -> Vec<&'a str> {
    let line = table.lines().find(|line| line.starts_with(name));
    let line = line.unwrap_or_else(|| panic!("no {name} in {table}"));
    line.split_whitespace().collect()
}

#[test]
fn models_come_and_go_and_the_tables_show_it() {
    let serve = Serve::start("cycle", &[]);
    let table = serve.says(&["models"]);
    assert_eq!(row(&table, "first")[1..4], ["loaded", "fake", "1/1"]);
    assert_eq!(row(&table, "second")[1..4], ["unloaded", "fake", "0/1"]);
    let loaded = serve.says(&["load", "second", "--wait", "--replicas", "3"]);
    assert_eq!(loaded, "second: loaded\n");
    assert_eq!(row(&serve.says(&["models"]), "second")[3], "3/3");
    let model = serve.says(&["models", "second"]);
    let model: serde_json::Value = serde_json::from_str(&model).expect("JSON");
    assert_eq!(model["load_override"]["replicas"], 3);
    let list: serde_json::Value =
        serde_json::from_str(&serve.says(&["models", "--json"])).expect("JSON");
    assert_eq!(list.as_array().map(Vec::len), Some(3));
    let unloaded = serve.says(&["unload", "second", "--wait", "--timeout", "30"]);
    assert_eq!(unloaded, "second: unloaded\n");
    // By an alias.
    assert_eq!(serve.says(&["unload", "1st", "--wait"]), "1st: unloaded\n");
    assert_eq!(serve.says(&["load", "1st", "-w"]), "1st: loaded\n");
}

#[test]
fn failures_have_a_sentence_and_an_exit_code() {
    let serve = Serve::start("failures", &[]);
    for (code, words, expected) in [
        (1, &["load", "nobody"][..], "does not exist"),
        (1, &["models", "nobody"], "does not exist"),
        (1, &["load", "gone", "--wait"], "no-such-file.gguf"),
        (2, &["load", "second", "--replicas", "9"], "from 1 to 4"),
        (2, &["load", "second", "--set", "colour=red"], "colour"),
        (2, &["load", "second", "--set", "colour"], "FIELD=VALUE"),
        (
            2,
            &["unload", "first", "--drain-timeout", "1e9"],
            "drain_timeout_s",
        ),
        (2, &["top", "--once", "--interval", "0"], "--interval"),
    ] {
        let err = serve.fails(code, words);
        assert!(err.contains(expected), "{words:?}: {err}");
    }
    assert_eq!(row(&serve.says(&["models"]), "gone")[1], "failed");
    // The other plane's port: its answer says where to go.
    let output = tinyloop()
        .args(["models", "--admin", &serve.data_url])
        .output();
    let output = output.expect("the binary starts");
    assert!(text(&output.stderr).contains("management plane"));
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn nothing_there_says_what_to_do() {
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = port.local_addr().expect("bound").to_string();
    drop(port);
    for command in ["models", "top"] {
        let output = tinyloop().args([command, "--admin", &address]).output();
        let output = output.expect("the binary starts");
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert!(
            err.contains("tinyloop serve") && err.contains("--admin"),
            "{err}"
        );
    }
    let output = tinyloop()
        .args(["models", "--admin", "ftp://x"])
        .output()
        .expect("the binary starts");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn the_key_comes_by_flag_or_environment() {
    let serve = Serve::start("key", &["--admin-key", "secret"]);
    let err = serve.fails(2, &["models"]);
    assert!(err.contains("TINYLOOP_ADMIN_KEY"), "{err}");
    assert!(
        serve
            .says(&["models", "--admin-key", "secret"])
            .contains("first")
    );
    let output = tinyloop()
        .args(["models", "--admin", &serve.url])
        .env("TINYLOOP_ADMIN_KEY", "secret")
        .output();
    assert_eq!(output.expect("the binary starts").status.code(), Some(0));
}

#[test]
fn top_shows_rates_over_an_interval() {
    let serve = Serve::start("top", &[]);
    // Asked for while the interval runs: the tokens of the whole answer fall into it.
    let mut top = tinyloop()
        .args(["top", "--once", "--interval", "2", "--admin", &serve.url])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let address = serve.data_url.trim_start_matches("http://");
    let mut n_answers = 0;
    while top.try_wait().expect("a child of ours").is_none() {
        let mut stream = std::net::TcpStream::connect(address).expect("it listens");
        let body = r#"{"model": "first", "prompt": "abcdef", "max_tokens": 64}"#;
        let request = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).expect("it reads");
        let mut answer = String::new();
        let read = std::io::Read::read_to_string(&mut stream, &mut answer);
        assert!(
            read.is_ok() && answer.starts_with("HTTP/1.1 200"),
            "{answer}"
        );
        n_answers += 1;
    }
    let output = top.wait_with_output().expect("it has ended");
    let frame = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0));
    assert!(
        n_answers > 0 && frame.contains("1 of 3 models loaded"),
        "{frame}"
    );
    assert!(!frame.contains('\x1b'), "no control codes into a pipe");
    let first = row(&frame, "first");
    let tokens_per_second: f64 = first[6].parse().expect("a number");
    assert!(tokens_per_second > 0.0, "{frame}");
    assert!(row(&frame, "cpu:").contains(&"used,"), "{frame}");
}

/// What the management plane says to a reload: the whole answer.
fn reload(serve: &Serve) -> String {
    let address = serve.url.trim_start_matches("http://");
    let mut stream = std::net::TcpStream::connect(address).expect("it listens");
    let request = "POST /v1/admin/reload HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
                   content-type: application/json\r\ncontent-length: 0\r\n\r\n";
    stream.write_all(request.as_bytes()).expect("it reads");
    let mut answer = String::new();
    let read = std::io::Read::read_to_string(&mut stream, &mut answer);
    read.expect("it answers");
    answer
}

/// A file that is lost, emptied or no file at all when it is read again changes nothing, at once.
#[test]
fn a_reload_of_a_lost_configuration_keeps_what_runs() {
    let serve = Serve::start("reload", &[]);
    let config = serve.folder.join("pool.toml");
    let before = serve.says(&["models"]);
    let refused = |why: &str| {
        let answer = reload(&serve);
        assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
        assert!(
            answer.contains("pool.toml") && answer.contains(why),
            "{answer}"
        );
        assert_eq!(serve.says(&["models"]), before);
    };
    std::fs::write(&config, "").expect("it can be written");
    refused("names no models any more");
    std::fs::write(&config, "[server]\nport = 1\n").expect("it can be written");
    refused("names no models any more");
    std::fs::remove_file(&config).expect("it is there");
    refused("No such file");
    let made = Command::new("mkfifo").arg(&config).status();
    assert!(made.expect("there is a mkfifo").success());
    refused("not a regular file");
    std::fs::remove_file(&config).expect("it is there");
    let two = "[models.first.fake]\n[models.first]\naliases = ['1st']\n[models.new]\n\
               enabled = false\nfake = {}\n";
    std::fs::write(&config, two).expect("it can be written");
    let answer = reload(&serve);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(serve.says(&["models"]).contains("new"));
}

/// Where the server listens is settled at its start: a host that is written anew is named.
#[test]
fn a_reload_names_a_changed_host_and_is_refused_without_keys_where_it_listens() {
    let serve = Serve::start("rehost", &[]);
    let config = serve.folder.join("pool.toml");
    let models = std::fs::read_to_string(&config).expect("it is there");
    let with = |server: &str| {
        std::fs::write(&config, format!("{models}\n{server}")).expect("it can be written");
        reload(&serve)
    };
    let answer = with("[server]\nhost = \"127.0.0.2\"\n");
    assert!(answer.contains(r#""needs_restart":["server"]"#), "{answer}");
    // At the next start that would be a fault.
    let answer = with("[server]\nhost = \"0.0.0.0\"\n");
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert!(answer.contains("would listen on 0.0.0.0"), "{answer}");
    let answer = with("");
    assert!(answer.contains(r#""needs_restart":[]"#), "{answer}");
}

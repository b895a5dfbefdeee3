//! What files and defaults become, and what faulty files are told.

use super::tables::edit_distance;
use super::*;

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::from_texts("t.toml", text, None, Path::new("/etc/t"))
}

#[test]
fn an_empty_file_is_the_default() {
    assert_eq!(parse("").expect("empty is fine"), Config::default());
}

/// Every block of configuration in the README is one that a server takes.
#[test]
fn the_configurations_of_the_readme_are_valid() {
    let readme = include_str!("../../README.md");
    let blocks: Vec<String> = readme
        .split("```toml\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap_or_default().to_owned())
        .collect();
    assert!(blocks.len() >= 5, "{} blocks", blocks.len());
    let mut n_models = 0;
    for text in blocks {
        let config = parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        config
            .check()
            .unwrap_or_else(|error| panic!("{error}\n{text}"));
        n_models += config.models.len();
    }
    assert!(n_models >= 10, "{n_models} models");
}

#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    let error = Config::load(Path::new("/dev/null"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("not a regular file"), "{error}");
    let fifo = std::env::temp_dir().join(format!("tinyloop-fifo-{}.toml", std::process::id()));
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    assert!(made.expect("there is a mkfifo").success());
    let error = Config::load(&fifo).unwrap_err().to_string();
    std::fs::remove_file(&fifo).expect("it was made");
    assert!(error.contains("not a regular file"), "{error}");
}

#[test]
fn unknown_keys_name_line_and_nearest_key() {
    let error = parse("[server]\nhost = \"::1\"\nprot = 1\n")
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("t.toml:3: unknown key `prot`; did you mean `port`?"),
        "{error}"
    );
    let error = parse("[sever]\n").unwrap_err().to_string();
    assert!(error.contains("did you mean `server`?"), "{error}");
    let error = parse("[models.a]\nfile=\"x\"\n[models.a.engine]\nmax_seqences=1\n");
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("t.toml:4") && error.contains("`max_sequences`"),
        "{error}"
    );
}

#[test]
fn wrong_kinds_name_the_line() {
    let error = parse("[server]\n\nport = \"x\"\n").unwrap_err().to_string();
    assert!(error.starts_with("t.toml:3:"), "{error}");
    assert!(!error.contains('\n'));
}

#[test]
fn local_values_win_per_key_and_models_inherit_sections() {
    let base = "[server]\nport = 1\nhost = \"::1\"\n[engine]\nmax_rows = 7\nmax_sequences = 3\n\
                [models.m]\nfile = \"m.gguf\"\n[models.m.engine]\nmax_rows = 9\n";
    let local = "[server]\nport = 2\n[models.m.executor]\nqueue_timeout_ms = 1500\n";
    let local = Some(("local.toml".to_owned(), local.to_owned()));
    let config = Config::from_texts("t.toml", base, local, Path::new("/etc/t")).expect("valid");
    assert_eq!(
        (config.server.port, config.server.host.to_string()),
        (2, "::1".into())
    );
    let model = &config.models[0];
    assert_eq!((model.engine.max_rows, model.engine.max_sequences), (9, 3));
    assert_eq!(
        model.executor.queue_timeout,
        Some(Duration::from_millis(1500))
    );
    let file = Path::new("/etc/t/m.gguf").to_owned();
    assert_eq!(model.source, ModelSource::File(file));
    let told = |format: &str| {
        parse(&format!(
            "[models.m.fake]\n[models.m]\ntool_format = \"{format}\"\n"
        ))
    };
    let format = |format: &str| told(format).expect("valid").models[0].tool_format.clone();
    assert_eq!(
        (format("auto"), format("hermes").as_deref()),
        (None, Some("hermes"))
    );
    assert!(
        told("herms")
            .unwrap_err()
            .to_string()
            .contains("models.m.tool_format")
    );
    let builtin = parse("[models.m]\nfile = \"builtin\"\n").expect("valid");
    let source = ModelSource::File(BUILTIN_MODEL.into());
    assert_eq!(builtin.models[0].source, source);
}

#[test]
fn there_is_a_worker_for_each_request_that_may_wait_or_run() {
    let workers = |text: &str| parse(text).expect("parses").http_workers();
    assert_eq!(workers("[models.m]\nfile = \"a\"\n"), 128 + 16 + 16);
    assert_eq!(
        workers("[models.m]\nfile = \"a\"\n[server]\nhttp_workers = 3\n"),
        3
    );
    assert_eq!(
        workers("[executor]\nmax_queue_depth = 4\n[models.m]\nfile = \"a\"\n"),
        64
    );
    assert_eq!(
        workers("[executor]\nmax_queue_depth = 99999\n[models.m.fake]\n"),
        1024
    );
    let alpha = parse("[executor]\nema_alpha = 7.0\n[models.m.fake]\n").expect("parses");
    assert!(alpha.check().unwrap_err().0.contains("ema_alpha"));
}

#[test]
fn clients_have_names_and_limits() {
    let config = parse("[keys.a]\nkey = \"x\"\nmax_priority = 3\n[keys.b]\nkey = \"\"\n");
    let config = config.expect("parses");
    assert_eq!(
        (
            config.keys[0].name.as_str(),
            config.keys[0].limits.max_priority
        ),
        ("a", 3)
    );
    assert_eq!(config.keys[1].limits, KeyLimits::default());
    assert!(config.check().unwrap_err().0.contains("keys.b"));
    let secret = KeyConfig::new("a", "zzz");
    assert!(!format!("{secret:?}").contains("zzz"));
    let all = parse(
        "[keys.a]\nkey_env = \"A\"\nmodels = [\"small-*\"]\nweight = 3\nmax_inflight = 4\n\
         max_queued = 5\nrequests_per_minute = 6\ntokens_per_minute = 7\n",
    );
    let all = all.expect("parses").keys.remove(0);
    assert_eq!(
        (all.fault(), all.models.as_slice()),
        (None, &["small-*".to_owned()][..])
    );
    let expected = KeyLimits {
        weight: 3,
        max_inflight: Some(4),
        max_queued: Some(5),
        requests_per_minute: Some(6),
        tokens_per_minute: Some(7),
        ..KeyLimits::default()
    };
    assert_eq!(all.limits, expected);
}

/// The README shows every field of a key once.
#[test]
fn the_readmes_keys_are_valid_and_complete() {
    let readme = include_str!("../../README.md");
    let (_, section) = readme.split_once("### Keys and logs").expect("the section");
    let (_, block) = section.split_once("```toml\n").expect("an example");
    let (block, _) = block.split_once("```").expect("its end");
    let config = parse(block).expect("the example is valid");
    config.check().expect("it is sound");
    let [alice, bob] = config.keys.as_slice() else {
        panic!("{:?}", config.keys);
    };
    assert!(!alice.models.is_empty() && bob.key_env.is_some());
    let KeyLimits {
        max_priority,
        weight,
        max_inflight,
        max_queued,
        requests_per_minute,
        tokens_per_minute,
    } = alice.limits.clone();
    assert!(max_priority != i32::MAX && weight > 1 && max_inflight.is_some());
    assert!(max_queued.is_some() && requests_per_minute.is_some() && tokens_per_minute.is_some());
}

#[test]
fn faulty_limits_of_keys_are_named() {
    for (lines, fault) in [
        ("key = \"x\"\nkey_env = \"X\"", "not both"),
        ("max_priority = 1", "`key` is empty"),
        ("key = \"x\"\nweight = 0", "weight is 0"),
        ("key = \"x\"\nweight = 1001", "1 to 1000"),
        ("key = \"x\"\nmax_inflight = 0", "max_inflight is 0"),
        (
            "key = \"x\"\ntokens_per_minute = 0",
            "tokens_per_minute is 0",
        ),
    ] {
        let config = parse(&format!("[keys.a]\n{lines}\n")).expect("parses");
        let error = config.check().unwrap_err().0;
        assert!(error.contains("keys.a") && error.contains(fault), "{error}");
    }
    let error = parse("[keys.a]\nkey = \"x\"\nmax_inflght = 1\n")
        .unwrap_err()
        .0;
    assert!(error.contains("did you mean `max_inflight`"), "{error}");
}

#[test]
fn an_address_that_others_reach_wants_a_key_or_a_word() {
    let open = "[server]\nhost = \"0.0.0.0\"\n";
    let error = parse(open).expect("parses").check().unwrap_err().0;
    assert!(
        error.contains("[keys.NAME]") && error.contains("--insecure-no-auth"),
        "{error}"
    );
    for closed in [
        "[server]\nhost = \"127.0.0.2\"\n".to_owned(),
        format!("{open}api_keys = [\"k\"]\n"),
        format!("{open}api_key_file = \"k\"\n"),
        format!("{open}insecure_no_auth = true\n"),
        format!("{open}[keys.a]\nkey = \"k\"\n"),
    ] {
        parse(&closed)
            .expect("parses")
            .check()
            .expect("it is meant so");
    }
}

#[test]
fn a_model_has_exactly_one_source() {
    let config = parse("[models.m.fake]\ntick_s = 0.02\n").expect("valid");
    let fake = FakeConfig {
        max_inflight: 64,
        tick: Duration::from_millis(20),
    };
    assert_eq!(config.models[0].source, ModelSource::Fake(fake));
    for (text, fault) in [
        ("[models.m]\n", "lacks `file`"),
        ("[models.m]\nfile=\"a\"\n[models.m.fake]\n", "both"),
        ("[models.m.fake]\ntick_s = -1.0\n", "t.toml:2"),
    ] {
        let error = parse(text).unwrap_err().0;
        assert!(error.contains(fault), "{text}: {error}");
    }
}

#[test]
fn depth_and_types_are_settings_of_the_engine() {
    let text = "[engine]\nquantize = \"q8_0\"\n[models.m]\nfile = \"m\"\n[models.m.engine]\n\
                loops = { layers = [10, 12], default = 1, max = 4 }\nquantize = \"q4_k\"\n";
    let config = parse(text).expect("valid");
    let engine = &config.models[0].engine;
    let loops = LoopsConfig {
        layers: Some([10, 12]),
        default: Some(1),
        max: Some(4),
    };
    assert_eq!(
        (engine.loops, engine.quantize),
        (loops, Some(QuantizeType::Q4K))
    );
    assert_eq!(config.engine.quantize, Some(QuantizeType::Q8_0));
    let error = parse("[engine]\nquantize = \"q5\"\n")
        .unwrap_err()
        .to_string();
    assert!(error.contains("q5") && error.contains("q8_0"), "{error}");
    let error = parse("[engine]\nloops = { maks = 1 }\n")
        .unwrap_err()
        .to_string();
    assert!(error.contains("did you mean `max`"), "{error}");
}

#[test]
fn check_refuses_an_open_management_plane_and_double_ids() {
    let open = parse("[management]\nhost = \"0.0.0.0\"\n").expect("parses");
    assert!(open.check().unwrap_err().0.contains("admin_key"));
    let double = parse("[models.a]\nfile=\"a\"\naliases=[\"b\"]\n[models.b]\nfile=\"b\"\n");
    assert!(
        double
            .expect("parses")
            .check()
            .unwrap_err()
            .0
            .contains("`b`")
    );
}

#[test]
fn distances() {
    for (a, b, distance) in [
        ("", "abc", 3),
        ("prot", "port", 2),
        ("a", "a", 0),
        ("kitten", "sitting", 3),
    ] {
        assert_eq!(edit_distance(a, b), distance, "{a} {b}");
    }
}

#[test]
fn other_programs_are_sources_with_tables_of_their_own() {
    let text = "[models.r.openai_remote]\nbase_urls = [\"http://a/v1/\", \"https://b/v1\"]\n\
                model = \"big\"\napi_key_env = \"KEY\"\nlimits = { retries = 7 }\n\
                [models.l.llama_server]\nbinary = \"bin/llama-server\"\nfile = \"m.gguf\"\n\
                slots = 3\n[models.v]\nreplicas = 2\n[models.v.vllm_serve]\nmodel = \"org/m\"\n";
    let config = parse(text).expect("valid");
    let [llama, remote, vllm] = &config.models[..] else {
        panic!("three models: {:?}", config.models);
    };
    let ModelSource::OpenaiRemote(source) = &remote.source else {
        panic!("{:?}", remote.source);
    };
    assert_eq!(source.urls(), ["http://a/v1", "https://b/v1"]);
    assert_eq!((source.limits.retries, source.limits.failures_max), (7, 3));
    assert_eq!(source.allow_remote, AllowRemote::Ask);
    assert_eq!((remote.lifecycle.replicas, remote.slots()), (2, 16));
    let ModelSource::LlamaServer(source) = &llama.source else {
        panic!("{:?}", llama.source);
    };
    assert_eq!(source.binary, Path::new("/etc/t/bin/llama-server"));
    assert_eq!(source.file, Path::new("/etc/t/m.gguf"));
    let ModelSource::VllmServe(source) = &vllm.source else {
        panic!("{:?}", vllm.source);
    };
    assert_eq!(source.binary, Path::new("vllm"));
    assert_eq!((vllm.lifecycle.replicas, vllm.slots()), (2, 64));
}

#[test]
fn faulty_backends_are_told_what_is_wrong() {
    for (text, fault) in [
        (
            "[models.m.openai_remote]\nmodel=\"a\"\n",
            "lacks `base_url`",
        ),
        (
            "[models.m.openai_remote]\nbase_url=\"http://a\"\n",
            "missing field `model`",
        ),
        (
            "[models.m.openai_remote]\nmodel=\"a\"\nbase_url=\"ftp://a\"\n",
            "http://",
        ),
        (
            "[models.m.openai_remote]\nmodel=\"a\"\nbase_url=\"http://u:p@a\"\n",
            "api_key_env",
        ),
        (
            "[models.m.openai_remote]\nmodel=\"a\"\napi_key=\"s\"\n",
            "did you mean `api_key_env`",
        ),
        (
            "[models.m.openai_remote.limits]\nretry=1\n",
            "did you mean `retries`",
        ),
        (
            "[models.m.llama_server]\nbinary=\"a\"\n",
            "missing field `file`",
        ),
        (
            "[models.m.llama_server]\nfile=\"a\"\nslots=0\n",
            "slots is 0",
        ),
        (
            "[models.m.vllm_serve]\nmodel=\"a\"\nmax_num_seqs=0\n",
            "max_num_seqs is 0",
        ),
        ("[models.m.vllm_serve]\nmodel=\"--x\"\n", "is no model"),
        (
            "[models.m]\nfile=\"a\"\n[models.m.llama_server]\nfile=\"a\"\n",
            "both `file` and `llama_server`",
        ),
    ] {
        let error = parse(text).unwrap_err().0;
        assert!(error.contains(fault), "{text}: {error}");
    }
}

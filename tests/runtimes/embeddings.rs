//! Embeddings of models that other programs run: forwarded where the model makes some, refused by the
//! capability's name where not.

use crate::client::{Answer, Client};
use crate::support::{PATIENCE, Serve, forwarded, llama, stand_in, submit, vllm, wait_for};
use serde_json::{Value, json};
use tinyloop::request::{GenerationEvent, RequestError, UpstreamFault, UpstreamPrompt};
use tinyloop::runtime::upstream::UpstreamRuntime;
use tinyloop::runtime::{Feature, Runtime, llama_server, vllm_serve};

/// How a job for the embeddings of some texts ended.
fn embed(runtime: &UpstreamRuntime, texts: &[&str]) -> Result<(Vec<Vec<f32>>, u32), RequestError> {
    let texts = texts.iter().map(ToString::to_string).collect();
    let job = submit(runtime, forwarded(UpstreamPrompt::Inputs(texts), json!({})));
    let mut vectors = Vec::new();
    loop {
        match job.next() {
            GenerationEvent::Embedding(vector) => vectors.push(vector),
            GenerationEvent::Finished { usage, .. } => return Ok((vectors, usage.prompt_tokens)),
            GenerationEvent::Failed(error) => return Err(error),
            other => panic!("{other:?}"),
        }
    }
}

/// The same retries, limits and errors as for answers.
#[test]
fn vectors_come_in_order_and_faults_mean_what_they_always_mean() {
    let extra = "embeddings = \"only\"\nlimits = { retries = 1, first_token_timeout_s = 0.3 }\n";
    let runtime = vllm_serve::start("m", &vllm(extra), 0).expect("starts");
    let features = runtime.capabilities();
    assert!(features.has(Feature::Embeddings) && !features.has(Feature::Chat));
    let (vectors, n_tokens) = embed(&runtime, &["a b", "c"]).expect("vectors");
    let expected = [vec![3.0, -1.0, 0.0, 0.0], vec![1.0, -1.0, 0.0, 0.0]];
    assert_eq!((vectors.as_slice(), n_tokens), (&expected[..], 3));
    let invalid = embed(&runtime, &["status 400"]);
    assert!(
        matches!(invalid, Err(RequestError::Invalid(_))),
        "{invalid:?}"
    );
    let full = embed(&runtime, &["status 503"]);
    assert!(
        matches!(full, Err(RequestError::Overloaded { .. })),
        "{full:?}"
    );
    let faults = [
        ("status 500", UpstreamFault::Error),
        ("silent", UpstreamFault::Timeout),
    ];
    for (text, expected) in faults {
        match embed(&runtime, &[text]) {
            Err(RequestError::Upstream { fault, .. }) => assert_eq!(fault, expected, "{text}"),
            other => panic!("{text}: {other:?}"),
        }
    }
    let pid = runtime.child_pid().expect("it runs");
    let path = format!("/proc/{pid}/cmdline");
    let line = std::fs::read_to_string(path).expect("it is there");
    let mut words = line.split('\0').skip_while(|word| *word != "--port");
    let port = words.nth(1).and_then(|port| port.parse::<u16>().ok());
    let address = ([127, 0, 0, 1], port.expect("it was told a port")).into();
    let seen = Client::connect(address).get("/stand-in").json();
    let bodies = seen["bodies"].as_array().expect("a list");
    let n_full = bodies
        .iter()
        .filter(|body| body["input"][0] == "status 503");
    assert_eq!(
        n_full.count(),
        2,
        "what another try may mend is tried once more"
    );
    assert_eq!(bodies[0]["stream"], Value::Null);
    let silent = submit(
        &runtime,
        forwarded(UpstreamPrompt::Inputs(vec!["silent".to_owned()]), json!({})),
    );
    runtime.cancel(silent.id);
    let end = silent.events.recv_timeout(PATIENCE);
    let is_cut = matches!(end, Ok(GenerationEvent::Failed(RequestError::Cancelled)));
    assert!(is_cut, "{end:?}");
    wait_for("no job to be left", || runtime.status().running == 0);
}

/// A llama-server makes embeddings when its own flag says so, beside text unless the configuration knows
/// better.
#[test]
fn a_llama_server_makes_embeddings_where_it_is_told() {
    let flag = "[process]\nextra_args = [\"--embeddings\"]\n";
    let with_flag = llama_server::start("m", &llama(flag), 0).expect("starts");
    let features = with_flag.capabilities();
    assert!(features.has(Feature::Embeddings) && features.has(Feature::Chat));
    let only = llama_server::start("m", &llama("embeddings = \"only\"\n"), 0).expect("starts");
    let made: Vec<_> = only.capabilities().names().collect();
    assert_eq!(made, ["embeddings"]);
    for runtime in [&with_flag, &only] {
        assert_eq!(embed(runtime, &["abc"]).expect("a vector").0[0][0], 3.0);
        let pid = runtime.child_pid().expect("it runs");
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).expect("it is there");
        let told = line.split('\0').filter(|word| *word == "--embeddings");
        assert_eq!(told.count(), 1, "{line}");
    }
    let without = llama_server::start("m", &llama(""), 0).expect("starts");
    assert!(!without.capabilities().has(Feature::Embeddings));
}

fn refused(answer: &Answer, capability: &str) {
    let error = &answer.json()["error"];
    assert_eq!(
        (answer.status, &error["code"]),
        (400, &json!("missing_capability"))
    );
    let message = error["message"].as_str().expect("a text");
    assert!(message.contains(&format!("'{capability}'")), "{message}");
}

#[test]
fn embeddings_are_forwarded_where_the_model_makes_some() {
    let near = Serve::start("embed-near", "[models.there]\nfile = \"builtin\"\n", &[]);
    let binary = stand_in().display().to_string();
    let child = format!("vllm_serve]\nbinary = {binary:?}\nmodel = \"org/m\"\n");
    let remote = format!(
        "openai_remote]\nbase_url = \"http://{}/v1\"\nmodel = \"there\"\n\
         dialect = \"tinyloop\"\nembeddings = \"also\"\n",
        near.address
    );
    let config = format!(
        "[models.vectors.{child}embeddings = \"only\"\n[models.text.{child}[models.far.{remote}"
    );
    let front = Serve::start("embed", &config, &[]);
    let post = |path: &str, body: Value| Client::connect(front.address).post(path, &body);
    let ask = |body: Value| post("/v1/embeddings", body);
    let answer = ask(json!({"model": "vectors", "input": ["", "b c"]}));
    assert_eq!(
        (answer.status, &answer.json()["error"]["param"]),
        (400, &json!("input[0]"))
    );
    let answer = ask(json!({"model": "vectors", "input": ["x x", "b"], "dimensions": 2}));
    let body = answer.json();
    assert_eq!(
        (answer.status, &body["usage"]["prompt_tokens"]),
        (200, &json!(3)),
        "{body}"
    );
    let first = body["data"][0]["embedding"]
        .as_array()
        .expect("numbers")
        .clone();
    let length = first
        .iter()
        .map(|n| n.as_f64().expect("a number").powi(2))
        .sum::<f64>();
    assert!(first.len() == 2 && (length - 1.0).abs() < 1e-6, "{first:?}");
    // More inputs than one call takes: their order holds.
    let many: Vec<String> = (0..150).map(|n| "x".repeat(1 + n)).collect();
    let body = ask(json!({"model": "vectors", "input": many})).json();
    let data = body["data"].as_array().expect("a list");
    for (index, item) in data.iter().enumerate() {
        let ratio = item["embedding"][0].as_f64().expect("a number")
            / -item["embedding"][1].as_f64().expect("a number");
        assert!(
            (ratio - (index + 1) as f64).abs() < 0.01,
            "{index}: {ratio}"
        );
    }
    assert_eq!(data.len(), 150);
    refused(&ask(json!({"model": "text", "input": "a"})), "embeddings");
    refused(
        &ask(json!({"model": "vectors", "input": [1, 2]})),
        "token_ids",
    );
    let chat = json!({"model": "vectors", "messages": [{"role": "user", "content": "a"}]});
    refused(&post("/v1/chat/completions", chat), "completions");
    let failed = ask(json!({"model": "vectors", "input": "status 500"}));
    assert_eq!(
        (failed.status, &failed.json()["error"]["code"]),
        (502, &json!("upstream_error"))
    );
    let listed = Client::connect(front.address)
        .get("/v1/models/vectors")
        .json();
    assert_eq!(
        (&listed["type"], &listed["capabilities"]),
        (&json!("embeddings"), &json!(["embeddings"]))
    );
    // Behind another tinyloop, where it must be allowed to leave: the vectors are those that it makes.
    let refusal = ask(json!({"model": "far", "input": "a ship"}));
    let code = &refusal.json()["error"]["code"];
    assert_eq!((refusal.status, code), (403, &json!("remote_not_allowed")));
    let far = ask(json!({"model": "far", "input": "a ship", "allow_remote": true}));
    let direct = json!({"model": "there", "input": "a ship"});
    let direct = Client::connect(near.address).post("/v1/embeddings", &direct);
    let of = |answer: &Answer| -> Vec<f64> {
        let vector = answer.json()["data"][0]["embedding"].clone();
        serde_json::from_value(vector).expect("numbers")
    };
    let (far, direct) = (of(&far), of(&direct));
    assert!(far.len() == direct.len() && !far.is_empty());
    assert!(far.iter().zip(&direct).all(|(a, b)| (a - b).abs() < 1e-5));
}

//! The HTTP APIs through real sockets, over a runtime that says the alphabet.
//!
//! Every test starts a whole server (wire, routes, executor) on a free port; only the runtime is
//! a stand-in. Nothing sleeps: tests that need a moment wait for a condition with a deadline.

mod abuse;
mod access;
mod admission;
mod anthropic;
mod cancel;
mod cases;
mod client;
mod complaints;
mod depth;
mod dialect_tools;
mod drain;
mod embeddings;
mod exact;
mod fake;
mod llama_routes;
mod llama_web_ui;
mod lmstudio;
mod loading;
mod native;
mod native_real;
mod native_tokens;
mod openapi;
mod prefixes;
mod real_engine;
mod responses;
mod schema;
mod shapes;
mod shared;
mod streams;
mod structured;
mod tools;
mod window;

use client::Client;
use fake::Alphabet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tinyloop::config::{Config, ExecutorConfig};
use tinyloop::pool::{LoadedModel, ModelMeta, Pool, RuntimeWatch};
use tinyloop::runtime::Runtime;
use tinyloop::scheduler::{Executor, ExecutorContext, Metrics};
use tinyloop::server::Server;
use tinyloop::tokenizer::{ChatTemplate, Grammars};

const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}\
                        {% if messages[0].content == 'boom' %}{{ raise_exception('no boom') }}{% endif %}\
                        {% if add_generation_prompt %}assistant:{% endif %}";

/// A server and what stands behind it.
struct TestServer {
    server: Option<Server>,
    address: SocketAddr,
    executor: Arc<Executor>,
}

impl TestServer {
    fn start(runtime: Arc<Alphabet>) -> Self {
        Self::with(runtime, |_| {})
    }

    fn with(runtime: Arc<Alphabet>, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::default();
        config.server.port = 0;
        config.server.http_workers = 8;
        config.management.port = 0;
        change(&mut config);
        let metrics = Arc::new(Metrics::new());
        let pool = Arc::new(Pool::new(Arc::clone(&metrics)));
        let executor = add_model(&pool, ["test/model", "alias"], runtime, &config.executor);
        let server = Server::start(&config, pool).expect("the server starts");
        Self {
            address: server.address(),
            server: Some(server),
            executor,
        }
    }

    fn client(&self) -> Client {
        Client::connect(self.address)
    }

    fn server(&self) -> &Server {
        self.server.as_ref().expect("it runs")
    }

    fn stop(&mut self, drain: Duration) {
        self.server.take().expect("it runs").shutdown(drain);
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.shutdown(Duration::ZERO);
        }
    }
}

fn add_model(
    pool: &Pool,
    names: [&str; 2],
    runtime: Arc<Alphabet>,
    config: &ExecutorConfig,
) -> Arc<Executor> {
    add_model_with(pool, names, runtime, config, TEMPLATE)
}

fn add_model_with(
    pool: &Pool,
    [name, alias]: [&str; 2],
    runtime: Arc<Alphabet>,
    config: &ExecutorConfig,
    template: &str,
) -> Arc<Executor> {
    let context_length = runtime.capability().context_length;
    let tokenizer = runtime.tokenizer();
    let context = ExecutorContext::new(name, Arc::clone(pool.metrics()));
    let executor = Executor::with_context(vec![runtime], config.clone(), context);
    executor.start().expect("the driver starts");
    let executor = Arc::new(executor);
    let template = ChatTemplate::compile(template, "", "").expect("the template is valid");
    pool.insert(LoadedModel {
        name: name.to_owned(),
        aliases: vec![alias.to_owned()],
        created: SystemTime::now(),
        executor: Arc::clone(&executor),
        grammars: tokenizer.clone().map(Grammars::new).map(Arc::new),
        tokenizer,
        chat_template: Ok(Arc::new(template)),
        context_length,
        meta: ModelMeta::default(),
        runtimes: RuntimeWatch::default(),
    })
    .expect("the name is free");
    executor
}

/// Waits until `condition` holds; fails after a while.
#[track_caller]
fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for: {what}");
        std::thread::yield_now();
    }
}

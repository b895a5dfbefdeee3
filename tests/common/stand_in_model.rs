//! A loaded model of whatever runtimes a test has, without a file: what pools under test load.

use std::sync::Arc;
use std::time::SystemTime;
use tinyloop::config::ModelConfig;
use tinyloop::pool::ledger::ModelMemory;
use tinyloop::pool::{LoadedModel, ModelMeta, RuntimeWatch};
use tinyloop::runtime::{ReplicaFactory, Runtime};
use tinyloop::scheduler::{Executor, ExecutorContext, Metrics};

/// With a started executor; `watch` already knows the runtimes.
pub(crate) fn stand_in_model(
    config: &ModelConfig,
    (runtimes, factory): (Vec<Arc<dyn Runtime>>, Option<ReplicaFactory>),
    metrics: &Arc<Metrics>,
    memory: ModelMemory,
    watch: RuntimeWatch,
) -> Result<LoadedModel, String> {
    let mut context = ExecutorContext::new(config.name.clone(), Arc::clone(metrics));
    context.factory = factory;
    let executor = Executor::with_context(runtimes, config.executor.clone(), context);
    executor.start().map_err(|error| error.to_string())?;
    Ok(LoadedModel {
        name: config.name.clone(),
        aliases: config.aliases.clone(),
        created: SystemTime::now(),
        context_length: executor.context_length(),
        executor: Arc::new(executor),
        tokenizer: None,
        grammars: None,
        chat_template: Err("a stand-in".to_owned()),
        meta: ModelMeta {
            memory,
            ..ModelMeta::default()
        },
        runtimes: watch,
    })
}

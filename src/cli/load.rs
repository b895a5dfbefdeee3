//! Loading models for a subcommand, with a progress bar.
//!
//! Runs on the main thread, under `serve` on a thread of its own; the loads run on the pool's. What
//! is not here: what loading is (`pool`).

use super::progress::bytes_bar;
use crate::config::{ModelConfig, PoolConfig};
use crate::error::Error;
use crate::pool::state::State;
use crate::pool::{LoadedModel, Pool};
use crate::scheduler::Metrics;
use std::sync::Arc;
use std::time::Duration;

/// How often the bar moves.
const BAR_INTERVAL: Duration = Duration::from_millis(100);

/// Makes the models known.
pub fn add_all(pool: &Pool, models: &[ModelConfig]) -> Result<(), Error> {
    for model in models {
        pool.add(model.clone())
            .map_err(|error| Error::Usage(error.to_string()))?;
    }
    Ok(())
}

/// Loads the enabled models. What fails is known to the pool.
///
/// # Errors
/// The reasons, when there were enabled models and not one of them was loaded.
pub fn load_enabled(pool: &Pool) -> Result<(), Error> {
    pool.load_enabled();
    show_until_started(pool);
    let entries = pool.entries();
    let failures: Vec<String> = entries
        .iter()
        .filter_map(|entry| match &entry.state {
            State::Failed(why) => Some(format!("{}: {why}", entry.name)),
            State::Unloaded | State::Loading(_) | State::Loaded(_) | State::Unloading(_) => None,
        })
        .collect();
    if failures.is_empty() || entries.iter().any(|entry| entry.loaded().is_some()) {
        return Ok(());
    }
    match failures.as_slice() {
        [only] => Err(Error::Other(only.clone())),
        all => Err(Error::Other(format!(
            "no model was loaded: {}",
            all.join("; ")
        ))),
    }
}

/// Loads one model into a pool of its own, which has no limit on memory: whoever runs a single model
/// by hand knows what they ask for.
pub fn load_one(model: &ModelConfig) -> Result<(Arc<Pool>, Arc<LoadedModel>), Error> {
    let config = PoolConfig {
        cpu_bytes: Some(u64::MAX),
        cuda_bytes: Some(u64::MAX),
        ..PoolConfig::default()
    };
    let pool = Arc::new(Pool::with_config(Arc::new(Metrics::new()), config));
    add_all(&pool, std::slice::from_ref(model))?;
    pool.load_enabled();
    show_until_started(&pool);
    match pool.find(&model.name).map(|entry| entry.state) {
        Some(State::Loaded(loaded)) => Ok((pool, loaded)),
        Some(State::Failed(why)) => Err(Error::Other(why.to_string())),
        _ => Err(Error::Other(format!(
            "the model '{}' was not loaded",
            model.name
        ))),
    }
}

/// One bar over all loads, until the start is over.
fn show_until_started(pool: &Pool) {
    let bar = bytes_bar("loading");
    while !pool.wait_started(BAR_INTERVAL) {
        let entries = pool.entries();
        let loads = entries.iter().filter_map(|entry| match &entry.state {
            State::Loading(load) => Some(load),
            State::Unloaded | State::Loaded(_) | State::Unloading(_) | State::Failed(_) => None,
        });
        let (mut done, mut total, mut names) = (0, 0, Vec::new());
        for load in loads {
            let progress = load.progress();
            done += progress.done_bytes;
            total += progress.total_bytes;
            if progress.total_bytes > 0 {
                names.push(load.name.as_str());
            }
        }
        bar.set_message(format!("loading {}", names.join(", ")));
        bar.set_length(total);
        bar.set_position(done);
    }
    bar.finish_and_clear();
}

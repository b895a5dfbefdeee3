//! Loading models for a subcommand, with a progress bar.
//!
//! Runs on the main thread, under `serve` on a thread of its own. What is not here: what loading is (`pool::loader`).

use super::progress::bytes_bar;
use crate::config::ModelConfig;
use crate::error::Error;
use crate::pool::{LoadedModel, Pool, PoolEntry, loader};
use crate::runtime::native::BackendKind;
use crate::scheduler::Metrics;
use std::sync::Arc;
use std::time::Instant;

/// Loads all announced models, one after the other, and reports progress to the pool.
pub fn load_all(pool: &Pool, models: &[ModelConfig]) -> Result<(), Error> {
    for model in models {
        load(pool, model)?;
    }
    Ok(())
}

/// Makes the models known as loading.
pub fn announce_all(pool: &Pool, models: &[ModelConfig]) -> Result<(), Error> {
    for model in models {
        pool.announce(&model.name, &model.aliases)
            .map_err(|error| Error::Usage(error.to_string()))?;
    }
    Ok(())
}

/// Loads one model into a pool of its own.
pub fn load_one(model: &ModelConfig) -> Result<(Arc<Pool>, Arc<LoadedModel>), Error> {
    let pool = Arc::new(Pool::new(Arc::new(Metrics::new())));
    let loaded = load(&pool, model)?;
    Ok((pool, loaded))
}

fn load(pool: &Pool, config: &ModelConfig) -> Result<Arc<LoadedModel>, Error> {
    let started = Instant::now();
    let bar = bytes_bar(&format!("loading {}", config.name));
    let announced = match pool.find(&config.name) {
        Some(PoolEntry::Loading(model)) => Some(model),
        _ => None,
    };
    let mut progress = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
        if let Some(model) = &announced {
            model.report(done, total);
        }
    };
    let loaded = loader::load(config, BackendKind::Cpu, pool.metrics(), &mut progress);
    bar.finish_and_clear();
    let model = loaded.map_err(|error| Error::Other(error.to_string()))?;
    tracing::info!(
        model = %model.name,
        file = %model.meta.file,
        context_length = model.context_length,
        seconds = (started.elapsed().as_secs_f64() * 1e3).round() / 1e3,
        "loaded"
    );
    pool.insert(model)
        .map_err(|error| Error::Usage(error.to_string()))
}

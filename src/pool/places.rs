//! Which devices the replicas of native models take, and their turns on each.
//!
//! GPUs are asked for once, when the first model may run on one. What is not here: the choice
//! (`runtime::device`, pure), whether the bytes fit (`ledger`).

use super::ledger::{DeviceId, ModelMemory};
use super::sizes::Estimate;
use crate::backend::cuda;
use crate::config::{DeviceChoice, EngineConfig, ModelConfig, ModelSource};
use crate::engine::arbiter::{DeviceArbiter, DeviceShare};
use crate::runtime::device::{Found, Places, places};
use crate::runtime::native::BackendKind;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// The devices of one loader.
pub(super) struct NativePlaces {
    /// Anything but `Cpu` is for all models, whatever they ask for.
    kind: BackendKind,
    /// What native engines share: main memory's cores, and each GPU by itself.
    arbiters: Mutex<BTreeMap<DeviceId, DeviceArbiter>>,
    found: OnceLock<Found>,
}

/// Where a backend keeps its bytes.
pub(super) fn device_of(kind: BackendKind) -> DeviceId {
    match kind {
        BackendKind::Cpu | BackendKind::Reference => DeviceId::Cpu,
        BackendKind::Cuda { number, .. } => DeviceId::Cuda(number),
    }
}

impl NativePlaces {
    pub(super) fn new(kind: BackendKind) -> Self {
        Self {
            kind,
            arbiters: Mutex::new(BTreeMap::new()),
            found: OnceLock::new(),
        }
    }

    /// Where the replicas of a model file run, or why they cannot run where it wants.
    pub(super) fn of(&self, config: &EngineConfig) -> Result<Places, String> {
        match (self.kind, config.device) {
            (BackendKind::Cpu, DeviceChoice::Cpu) => places(config, &Ok(Vec::new())),
            (BackendKind::Cpu, _) => places(config, self.found.get_or_init(cuda::devices)),
            (kind, _) => Ok(Places {
                kinds: vec![kind],
                fallback: None,
            }),
        }
    }

    /// The same with a share of each device.
    pub(super) fn shares(
        &self,
        config: &ModelConfig,
    ) -> Result<Vec<(BackendKind, DeviceShare)>, String> {
        let places = self.of(&config.engine)?;
        if let Some(why) = &places.fallback {
            tracing::warn!(model = %config.name, %why, "device = \"auto\": it runs on the processor");
        }
        let mut arbiters = self.arbiters.lock();
        let share = |kind| {
            let arbiter = arbiters.entry(device_of(kind));
            let arbiter = arbiter.or_default();
            (kind, arbiter.share(config.lifecycle.device_weight))
        };
        Ok(places.kinds.into_iter().map(share).collect())
    }

    /// The estimate of one replica, for all. Where they are spread over several GPUs, the first one
    /// holds most of them, and the ledger counts that one.
    pub(super) fn estimate(&self, one: Estimate, config: &ModelConfig) -> Estimate {
        let places = self.of(&config.engine);
        // A model that has no place is counted as if it were on the processor; its load says why.
        let kinds = places.map_or(vec![BackendKind::Cpu], |places| places.kinds);
        let most_on_one = config.lifecycle.replicas.div_ceil(kinds.len() as u32);
        Estimate {
            memory: ModelMemory {
                device: device_of(kinds[0]),
                ..one.memory.times(most_on_one)
            },
            ..one
        }
    }

    /// Bytes that the GPUs a model may run on had free when they were asked for, less a twentieth for
    /// the driver and others.
    pub(super) fn gpu_room(&self, config: &ModelConfig) -> Vec<(DeviceId, u64)> {
        if !matches!(config.source, ModelSource::File(_)) {
            return Vec::new();
        }
        let places = self.of(&config.engine);
        let kinds = places.map(|places| places.kinds).unwrap_or_default();
        let used: Vec<DeviceId> = kinds.into_iter().map(device_of).collect();
        let found = self.found.get().and_then(|found| found.as_ref().ok());
        let room = found.into_iter().flatten().map(|gpu| {
            let room_bytes = gpu.free_bytes - gpu.free_bytes / 20;
            (DeviceId::Cuda(gpu.ordinal as u32), room_bytes)
        });
        room.filter(|(device, _)| used.contains(device)).collect()
    }
}

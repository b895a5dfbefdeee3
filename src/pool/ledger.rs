//! Bytes per device: who holds how many, whether a load fits, and who makes room for it.
//!
//! Pure accounting and one pure decision; no lock, clock or log. A model's bytes count from the
//! moment its load is taken (by estimate), then as measured, until its unload has seen them come
//! back. Kinds: weights; KV, which includes the prefix cache, because registered and found-again
//! prefixes live in pages of that pool; scratch (activations, logits and other buffers of the
//! host). Devices are `cpu` and, once there are GPUs, `cuda:N`.
//!
//! [`make_room`], in this order:
//! 1. the model needs nothing, or it fits: load it;
//! 2. it can't fit even with everything but pinned models gone: refuse, waiting won't help;
//! 3. enough may be evicted: evict, the least recently used first, none in vain;
//! 4. otherwise refuse with both numbers.
//!
//! A load that turns out larger than it was promised is asked for once more when it ends, with what it
//! was measured to hold ([`after_load`]): idle models go as they do for a load, else it goes itself.
//!
//! Models that are being unloaded count as gone: their bytes are promised to whoever asks first, and
//! that load *starts* only when they are back ([`may_start`]). What is not here: how bytes are
//! estimated (`estimate`), who asks (`registry`).

use std::fmt;
use std::time::Instant;

/// Where memory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceId {
    /// Main memory.
    #[default]
    Cpu,
    /// A GPU by its number.
    Cuda(u32),
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// How a model's bytes are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemorySource {
    /// What the last load added: for our own engine the bytes that its backend allocated, summed as it
    /// allocated them (resident memory would not show pages of KV that nobody has touched yet); for child
    /// processes the main memory that they and what they started hold, where there was none before.
    MeasuredLoadDelta,
    /// From the size of its files and the configuration, its KV included.
    ArtifactSize,
    /// Nobody knows: a remote server, a stand-in.
    #[default]
    Unavailable,
}

impl MemorySource {
    /// For lists.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::MeasuredLoadDelta => "measured load delta",
            Self::ArtifactSize => "artifact size",
            Self::Unavailable => "unavailable",
        }
    }
}

/// What a model holds, or will, over all replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelMemory {
    /// Where.
    pub device: DeviceId,
    /// Bytes of weights in the backend's layout.
    pub weight_bytes: u64,
    /// Bytes of the KV pools, prefix caches included.
    pub kv_bytes: u64,
    /// Bytes of activations, logits and other buffers.
    pub scratch_bytes: u64,
    /// How that is known.
    pub source: MemorySource,
}

impl ModelMemory {
    /// All kinds together.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        let all = self.weight_bytes.saturating_add(self.kv_bytes);
        all.saturating_add(self.scratch_bytes)
    }

    /// The same model `n` times.
    #[must_use]
    pub fn times(self, n: u32) -> Self {
        let n = u64::from(n);
        Self {
            weight_bytes: self.weight_bytes.saturating_mul(n),
            kv_bytes: self.kv_bytes.saturating_mul(n),
            scratch_bytes: self.scratch_bytes.saturating_mul(n),
            ..self
        }
    }

    /// (kind, bytes) in the order of the fields.
    #[must_use]
    pub fn kinds(&self) -> [(&'static str, u64); 3] {
        [
            ("weights", self.weight_bytes),
            ("kv", self.kv_bytes),
            ("scratch", self.scratch_bytes),
        ]
    }
}

/// Why a model stays where it is, or that it need not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Loaded, idle, not pinned, and for long enough.
    Evictable,
    /// Requests wait or run, or somebody is about to send one.
    Busy,
    /// Its configuration says so.
    Pinned,
    /// Loaded so lately that throwing it out would be thrashing.
    JustLoaded,
    /// On its way; its bytes are promised.
    Loading,
    /// On its way out; its bytes will be there.
    Leaving,
}

/// A model that counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Its public name.
    pub name: String,
    /// What it holds on the device in question.
    pub bytes: u64,
    /// Whether it may go.
    pub standing: Standing,
    /// When it was last used.
    pub last_used: Instant,
}

/// The numbers of a refusal, in bytes of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom {
    /// Which device.
    pub device: DeviceId,
    /// What the model needs.
    pub needed_bytes: u64,
    /// What is free, or will be when those that are leaving have left.
    pub free_bytes: u64,
    /// What idle models would give back.
    pub evictable_bytes: u64,
    /// The limit of the device.
    pub limit_bytes: u64,
    /// Nothing that changes by itself will make room: more than the limit without pinned models.
    pub is_hopeless: bool,
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "it needs {} bytes on {}; {} of {} are free and idle models could give back {}",
            self.needed_bytes, self.device, self.free_bytes, self.limit_bytes, self.evictable_bytes
        )
    }
}

/// What [`make_room`] says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Room {
    /// Take it; it starts when [`may_start`] says so.
    Fits,
    /// Unload these first.
    Evict(Vec<String>),
    /// Not now.
    Refused(NoRoom),
}

/// Whether a load of `needed_bytes` is taken; see the module for the order of the cases.
#[must_use]
pub fn make_room(
    device: DeviceId,
    limit_bytes: u64,
    needed_bytes: u64,
    residents: &[Resident],
) -> Room {
    let sum = |wanted: fn(Standing) -> bool| {
        let counted = residents.iter().filter(|one| wanted(one.standing));
        counted.fold(0_u64, |all, one| all.saturating_add(one.bytes))
    };
    let used_bytes = sum(|standing| standing != Standing::Leaving);
    let missing_bytes = used_bytes
        .saturating_add(needed_bytes)
        .saturating_sub(limit_bytes);
    // Case 1.
    if needed_bytes == 0 || missing_bytes == 0 {
        return Room::Fits;
    }
    let evictable_bytes = sum(|standing| standing == Standing::Evictable);
    let pinned_bytes = sum(|standing| standing == Standing::Pinned);
    // Case 3: case 2 never has enough that may be evicted.
    if missing_bytes <= evictable_bytes {
        return Room::Evict(evicted(residents, missing_bytes));
    }
    // Cases 2 and 4.
    Room::Refused(NoRoom {
        device,
        needed_bytes,
        free_bytes: limit_bytes.saturating_sub(used_bytes),
        evictable_bytes,
        limit_bytes,
        is_hopeless: needed_bytes > limit_bytes.saturating_sub(pinned_bytes),
    })
}

/// Whether a load that ended may keep the `measured_bytes` it turned out to hold; it was promised
/// `promised_bytes`. `residents` are the others that hold bytes, without it and without loads that only wait.
#[must_use]
pub fn after_load(
    device: DeviceId,
    limit_bytes: u64,
    (promised_bytes, measured_bytes): (u64, u64),
    residents: &[Resident],
) -> Room {
    if measured_bytes <= promised_bytes {
        return Room::Fits; // nobody else's bytes are touched
    }
    make_room(device, limit_bytes, measured_bytes, residents)
}

/// Least recently used first until `missing_bytes` are there; then whoever is not needed after all,
/// because a later one is large enough, stays.
fn evicted(residents: &[Resident], missing_bytes: u64) -> Vec<String> {
    let mut candidates: Vec<&Resident> = residents
        .iter()
        .filter(|one| one.standing == Standing::Evictable && one.bytes > 0)
        .collect();
    candidates.sort_by(|a, b| (a.last_used, &a.name).cmp(&(b.last_used, &b.name)));
    let mut chosen = Vec::new();
    let mut found_bytes = 0_u64;
    for one in candidates {
        if found_bytes >= missing_bytes {
            break;
        }
        found_bytes = found_bytes.saturating_add(one.bytes);
        chosen.push(one);
    }
    // From the most recently used on, so that it is the one that stays.
    for index in (0..chosen.len()).rev() {
        let without = found_bytes - chosen[index].bytes;
        if without >= missing_bytes {
            found_bytes = without;
            chosen.remove(index);
        }
    }
    chosen.into_iter().map(|one| one.name.clone()).collect()
}

/// Whether the bytes that a taken load needs are really there: `held_bytes` is everything that has
/// not come back yet, without the loads that wait for their start.
#[must_use]
pub fn may_start(limit_bytes: u64, needed_bytes: u64, held_bytes: u64) -> bool {
    needed_bytes == 0 || held_bytes.saturating_add(needed_bytes) <= limit_bytes
}

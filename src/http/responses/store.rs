//! Responses that are kept for `previous_response_id`, item references and the routes by id.
//!
//! A plain structure without lock or clock (`kept` has both). Bounded three ways: number of responses,
//! bytes, age; what goes over a bound pushes out the oldest of the owner that holds most, so that one
//! key's flood costs the others nothing. Turns are shared: a response that
//! continues another holds its turns, so that a conversation survives when its older responses are
//! pushed out or deleted, and the bytes of a turn are counted once, until nobody holds it. Every
//! response has an owner (the API key that made it); for others neither it nor its items exist,
//! whatever ids they chose. There are as many owners as keys.

use serde_json::Value;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// What an item or a response costs beside its text: map entries, pointers, allocations.
const OVERHEAD_BYTES: usize = 160;

/// Who made a response; None where no keys are asked for.
pub type Owner<'a> = Option<&'a str>;

/// How much is kept, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most responses; 0 = nothing is kept.
    pub responses_max: usize,
    /// Most bytes of text and bookkeeping.
    pub bytes_max: usize,
    /// How long a response is kept.
    pub ttl: Duration,
}

/// One item of a conversation.
#[derive(Debug)]
pub struct Item {
    id: Box<str>,
    /// As it is listed.
    json: Box<str>,
}

impl Item {
    /// The item as JSON.
    #[must_use]
    pub fn value(&self) -> Value {
        serde_json::from_str(&self.json).expect("it was written from a value")
    }
}

/// Counts the bytes of all turns that anybody holds, requests on their way included: of all owners
/// together, and of one.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    total: Arc<AtomicUsize>,
    own: Arc<AtomicUsize>,
}

/// Items that came together: the input or the output of one response.
#[derive(Debug)]
pub struct Turn {
    items: Vec<Item>,
    n_bytes: usize,
    ledger: Ledger,
}

impl Turn {
    /// Items as they are kept, counted until nobody holds them.
    #[must_use]
    pub fn new(items: &[Value], ledger: &Ledger) -> Arc<Self> {
        let item = |value: &Value| Item {
            id: value["id"].as_str().unwrap_or_default().into(),
            json: value.to_string().into(),
        };
        let items: Vec<Item> = items.iter().map(item).collect();
        // The id stands there twice: here and in the index.
        let bytes = |item: &Item| item.json.len() + 2 * item.id.len() + OVERHEAD_BYTES;
        let n_bytes = items.iter().map(bytes).sum();
        // A counter only: nothing is ordered by it.
        ledger.total.fetch_add(n_bytes, Ordering::Relaxed);
        ledger.own.fetch_add(n_bytes, Ordering::Relaxed);
        let ledger = ledger.clone();
        Arc::new(Self {
            items,
            n_bytes,
            ledger,
        })
    }

    /// The items in their order.
    #[must_use]
    pub fn items(&self) -> &[Item] {
        &self.items
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let ledger = &self.ledger;
        ledger.total.fetch_sub(self.n_bytes, Ordering::Relaxed);
        ledger.own.fetch_sub(self.n_bytes, Ordering::Relaxed);
    }
}

/// A response to be kept.
#[derive(Debug)]
pub struct Kept {
    /// `resp_..`
    pub id: String,
    /// Who made it.
    pub owner: Option<Arc<str>>,
    /// The response object as JSON text.
    pub json: Arc<[u8]>,
    /// What came before its input.
    pub history: Vec<Arc<Turn>>,
    /// Its own input.
    pub input: Arc<Turn>,
    /// What the model said.
    pub output: Arc<Turn>,
}

struct Entry {
    /// Place in the order of age.
    serial: u64,
    owner: Option<Arc<str>>,
    json: Arc<[u8]>,
    history: Vec<Arc<Turn>>,
    input: Arc<Turn>,
    output: Arc<Turn>,
    kept_at: Instant,
}

/// What one owner holds.
struct Holding {
    /// Ids by age, oldest first.
    by_age: BTreeMap<u64, String>,
    /// Which response an item belongs to.
    items: HashMap<Box<str>, String>,
    /// Of the entries themselves.
    entry_bytes: usize,
    /// Of the turns.
    ledger: Ledger,
}

impl Holding {
    fn new(total: &Arc<AtomicUsize>) -> Self {
        Self {
            by_age: BTreeMap::new(),
            items: HashMap::new(),
            entry_bytes: 0,
            ledger: Ledger {
                total: Arc::clone(total),
                own: Arc::default(),
            },
        }
    }

    fn n_bytes(&self) -> usize {
        self.entry_bytes + self.ledger.own.load(Ordering::Relaxed)
    }

    /// Nothing is kept, and no request on its way counts here.
    fn is_idle(&self) -> bool {
        self.by_age.is_empty() && Arc::strong_count(&self.ledger.own) == 1
    }
}

/// Something that may be pushed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Oldest<'a> {
    /// How much its owner holds, of what there is too much of.
    owner_load: usize,
    serial: u64,
    id: &'a str,
}

/// Which response is pushed out: the oldest of the owner that holds most; among equals, the oldest.
fn victim<'a>(oldest_of_owners: impl Iterator<Item = Oldest<'a>>) -> Option<&'a str> {
    let most = oldest_of_owners.max_by_key(|one| (one.owner_load, Reverse(one.serial)));
    most.map(|one| one.id)
}

/// See the module.
pub struct Store {
    limits: Limits,
    entries: HashMap<String, Entry>,
    /// Ids by age, oldest first.
    by_age: BTreeMap<u64, String>,
    owners: HashMap<Option<Arc<str>>, Holding>,
    next_serial: u64,
    /// Bytes of all turns.
    turn_bytes: Arc<AtomicUsize>,
    /// Of the entries themselves.
    entry_bytes: usize,
}

impl Store {
    /// An empty store.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            entries: HashMap::new(),
            by_age: BTreeMap::new(),
            owners: HashMap::new(),
            next_serial: 0,
            turn_bytes: Arc::default(),
            entry_bytes: 0,
        }
    }

    /// Where the turns of an owner are counted.
    #[must_use]
    pub fn ledger(&mut self, owner: Owner<'_>) -> Ledger {
        self.holding(owner.map(Arc::from)).ledger.clone()
    }

    fn holding(&mut self, owner: Option<Arc<str>>) -> &mut Holding {
        let total = &self.turn_bytes;
        let holding = self.owners.entry(owner);
        holding.or_insert_with(|| Holding::new(total))
    }

    /// Responses kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes of all that is kept.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        self.entry_bytes + self.turn_bytes.load(Ordering::Relaxed)
    }

    /// Keeps a response, and pushes out what no longer fits. False = it is not kept: it is larger
    /// than everything that may be, or than its owner's part while others hold theirs.
    pub fn keep(&mut self, kept: Kept, now: Instant) -> bool {
        self.expire(now);
        let entry = Entry {
            serial: self.next_serial,
            owner: kept.owner,
            json: kept.json,
            history: kept.history,
            input: kept.input,
            output: kept.output,
            kept_at: now,
        };
        let history_bytes: usize = entry.history.iter().map(|turn| turn.n_bytes).sum();
        let own_bytes = entry.n_bytes() + entry.input.n_bytes + entry.output.n_bytes;
        if own_bytes + history_bytes > self.limits.bytes_max || self.limits.responses_max == 0 {
            return false;
        }
        self.next_serial += 1;
        self.remove(&kept.id); // ids are random: it is not there
        self.entry_bytes += entry.n_bytes();
        let id = kept.id;
        let holding = self.holding(entry.owner.clone());
        holding.entry_bytes += entry.n_bytes();
        for item in entry.own_items() {
            holding.items.insert(item.id.clone(), id.clone());
        }
        holding.by_age.insert(entry.serial, id.clone());
        self.by_age.insert(entry.serial, id.clone());
        self.entries.insert(id.clone(), entry);
        // What is left when all entries are gone belongs to requests on their way.
        while let Some(id) = self.pushed_out() {
            self.remove(&id);
        }
        self.entries.contains_key(&id)
    }

    /// The response that has to go, if a bound is broken.
    fn pushed_out(&self) -> Option<String> {
        let load: fn(&Holding) -> usize = if self.entries.len() > self.limits.responses_max {
            |holding| holding.by_age.len()
        } else if self.n_bytes() > self.limits.bytes_max {
            Holding::n_bytes
        } else {
            return None;
        };
        let oldest = self.owners.values().filter_map(|holding| {
            let (serial, id) = holding.by_age.first_key_value()?;
            Some(Oldest {
                owner_load: load(holding),
                serial: *serial,
                id,
            })
        });
        victim(oldest).map(str::to_owned)
    }

    /// The response object as JSON text.
    #[must_use]
    pub fn json(&self, id: &str, owner: Owner<'_>, now: Instant) -> Option<Arc<[u8]>> {
        Some(Arc::clone(&self.entry(id, owner, now)?.json))
    }

    /// Everything that a response saw: what came before, then its input.
    #[must_use]
    pub fn seen(&self, id: &str, owner: Owner<'_>, now: Instant) -> Option<Vec<Arc<Turn>>> {
        let entry = self.entry(id, owner, now)?;
        let mut turns = entry.history.clone();
        turns.push(Arc::clone(&entry.input));
        Some(turns)
    }

    /// What comes before the input of a response that continues this one.
    #[must_use]
    pub fn history(&self, id: &str, owner: Owner<'_>, now: Instant) -> Option<Vec<Arc<Turn>>> {
        let mut turns = self.seen(id, owner, now)?;
        turns.push(Arc::clone(&self.entries.get(id)?.output));
        Some(turns)
    }

    /// An item of any response of this owner, as JSON text.
    #[must_use]
    pub fn item(&self, id: &str, owner: Owner<'_>, now: Instant) -> Option<Box<str>> {
        let holding = self.owners.get(&owner.map(Arc::from))?;
        let entry = self.entry(holding.items.get(id)?, owner, now)?;
        let found = entry.own_items().find(|item| &*item.id == id);
        found.map(|item| item.json.clone())
    }

    /// Forgets a response; conversations that continue it keep its turns. False = there is none.
    pub fn delete(&mut self, id: &str, owner: Owner<'_>, now: Instant) -> bool {
        self.expire(now);
        self.entry(id, owner, now).is_some() && self.remove(id)
    }

    fn entry(&self, id: &str, owner: Owner<'_>, now: Instant) -> Option<&Entry> {
        let entry = self.entries.get(id)?;
        let is_theirs = entry.owner.as_deref() == owner;
        (is_theirs && !self.is_expired(entry, now)).then_some(entry)
    }

    fn is_expired(&self, entry: &Entry, now: Instant) -> bool {
        now.saturating_duration_since(entry.kept_at) >= self.limits.ttl
    }

    /// Forgets what is too old. All are kept equally long, so the oldest goes first.
    fn expire(&mut self, now: Instant) {
        while let Some((_, id)) = self.by_age.first_key_value()
            && self.is_expired(&self.entries[id], now)
        {
            let id = id.clone();
            self.remove(&id);
        }
        self.owners.retain(|_, holding| !holding.is_idle());
    }

    fn remove(&mut self, id: &str) -> bool {
        let Some(entry) = self.entries.remove(id) else {
            return false;
        };
        self.by_age.remove(&entry.serial);
        self.entry_bytes -= entry.n_bytes();
        let holding = self.holding(entry.owner.clone());
        holding.by_age.remove(&entry.serial);
        holding.entry_bytes -= entry.n_bytes();
        for item in entry.own_items() {
            // A later response may have been given the same item; then it is that one's.
            if holding.items.get(&*item.id).is_some_and(|of| of == id) {
                holding.items.remove(&*item.id);
            }
        }
        true
    }
}

impl Entry {
    /// Beside its turns.
    fn n_bytes(&self) -> usize {
        let pointers = self.history.len() * size_of::<Arc<Turn>>();
        self.json.len() + pointers + 2 * OVERHEAD_BYTES
    }

    fn own_items(&self) -> impl Iterator<Item = &Item> {
        self.input.items.iter().chain(&self.output.items)
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;

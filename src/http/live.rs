//! The generations that HTTP clients wait for now, so that they can be listed and cancelled.
//!
//! Shared by all workers: a short lock around a map, never held across a call into an executor. A
//! worker registers the jobs of its request and gives the entry back by dropping its [`LiveEntry`].
//! An entry answers to three names: the 24 hexadecimal characters of `x-tinyloop-request-id`, the
//! answer's `id` (`chatcmpl-` or `cmpl-` before those), and the `x-request-id` that the client
//! chose. With API keys a client sees and cancels its own requests only. No prompt text is here.

use crate::request::RequestId;
use crate::scheduler::CancelHandle;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// See the module.
#[derive(Clone, Default)]
pub struct LiveRequests {
    entries: Arc<Mutex<HashMap<RequestId, Entry>>>,
}

struct Entry {
    /// `x-request-id`.
    name: String,
    client: Option<Arc<str>>,
    /// One per choice; the first one's id is the key.
    handles: Vec<CancelHandle>,
}

/// Takes its entry out when dropped.
pub struct LiveEntry {
    live: LiveRequests,
    id: RequestId,
}

impl Drop for LiveEntry {
    fn drop(&mut self) {
        let entry = self.live.entries.lock().remove(&self.id);
        drop(entry); // outside the lock: the handles own the request
    }
}

impl LiveRequests {
    /// Lists an answer whose first job is `id`; one with the same id is replaced.
    #[must_use]
    pub fn register(
        &self,
        id: RequestId,
        name: String,
        client: Option<Arc<str>>,
        handles: Vec<CancelHandle>,
    ) -> LiveEntry {
        let entry = Entry {
            name,
            client,
            handles,
        };
        self.entries.lock().insert(id, entry);
        LiveEntry {
            live: self.clone(),
            id,
        }
    }

    /// Cancels what answers to `name` and belongs to `owner` (None = whoever it belongs to).
    /// Returns the ids of the answers, which all end as cancelled, or nothing when there is none.
    /// One `x-request-id` may stand for several requests.
    #[must_use]
    pub fn cancel(&self, name: &str, owner: Option<&str>) -> Vec<RequestId> {
        let wanted = parse_id(name);
        let mut found = Vec::new();
        let entries = self.entries.lock();
        for (id, entry) in entries.iter() {
            let is_named = wanted == Some(*id) || entry.name == name || entry.has_job(wanted);
            if is_named && entry.belongs_to(owner) {
                found.push((*id, entry.handles.clone()));
            }
        }
        drop(entries);
        for (_, handles) in &found {
            handles.iter().for_each(CancelHandle::cancel);
        }
        found.into_iter().map(|(id, _)| id).collect()
    }

    /// `x-request-id` by job, of everything that is live.
    #[must_use]
    pub fn names(&self) -> HashMap<RequestId, String> {
        let entries = self.entries.lock();
        let jobs = entries.values().flat_map(|entry| {
            let ids = entry.handles.iter().map(CancelHandle::id);
            ids.map(|id| (id, entry.name.clone()))
        });
        jobs.collect()
    }
}

impl Entry {
    fn has_job(&self, id: Option<RequestId>) -> bool {
        id.is_some_and(|id| self.handles.iter().any(|handle| handle.id() == id))
    }

    fn belongs_to(&self, owner: Option<&str>) -> bool {
        owner.is_none() || self.client.as_deref() == owner
    }
}

/// `chatcmpl-HEX`, `cmpl-HEX` or `HEX`.
fn parse_id(name: &str) -> Option<RequestId> {
    let hex = name
        .strip_prefix("chatcmpl-")
        .or_else(|| name.strip_prefix("cmpl-"));
    RequestId::parse(hex.unwrap_or(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_id_is_the_request_id_with_a_prefix() {
        let id = RequestId::generate();
        for name in [
            format!("{id}"),
            format!("chatcmpl-{id}"),
            format!("cmpl-{id}"),
        ] {
            assert_eq!(parse_id(&name), Some(id), "{name}");
        }
        for name in ["", "cmpl-", "req_1", "chatcmpl-zz"] {
            assert_eq!(parse_id(name), None, "{name}");
        }
    }
}

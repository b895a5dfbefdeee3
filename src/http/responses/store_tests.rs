//! Tests of the store: bounds, owners, shared turns.

use super::*;
use proptest::prelude::*;
use serde_json::json;

fn limits(responses_max: usize, bytes_max: usize, ttl_s: u64) -> Limits {
    Limits {
        responses_max,
        bytes_max,
        ttl: Duration::from_secs(ttl_s),
    }
}

fn kept(store: &mut Store, id: &str, owner: Option<&str>, history: Vec<Arc<Turn>>) -> Kept {
    let ledger = store.ledger(owner);
    let turn = |item: Value| Turn::new(&[item], &ledger);
    Kept {
        id: id.to_owned(),
        owner: owner.map(Arc::from),
        json: json!({"id": id}).to_string().into_bytes().into(),
        history,
        input: turn(json!({"id": format!("msg_{id}"), "text": "question"})),
        output: turn(json!({"id": format!("out_{id}"), "text": "answer"})),
    }
}

type Plan<'a> = (&'a str, Option<&'a str>, Vec<Arc<Turn>>);

fn keep(store: &mut Store, (id, owner, history): Plan<'_>, now: Instant) -> bool {
    let kept = kept(store, id, owner, history);
    store.keep(kept, now)
}

fn texts(turns: &[Arc<Turn>]) -> Vec<String> {
    let items = turns.iter().flat_map(|turn| turn.items());
    items
        .map(|item| item.value()["id"].as_str().expect("an id").to_owned())
        .collect()
}

#[test]
fn a_conversation_survives_its_older_responses() {
    let mut store = Store::new(limits(2, 1 << 20, 60));
    let now = Instant::now();
    keep(&mut store, ("a", None, Vec::new()), now);
    let history = store.history("a", None, now).expect("it is there");
    keep(&mut store, ("b", None, history), now);
    assert_eq!(
        texts(&store.seen("b", None, now).expect("there")),
        ["msg_a", "out_a", "msg_b"]
    );
    let history = store.history("b", None, now).expect("it is there");
    assert!(store.delete("a", None, now) && !store.delete("a", None, now));
    assert_eq!(store.json("a", None, now), None);
    assert_eq!(texts(&history), ["msg_a", "out_a", "msg_b", "out_b"]);
    keep(&mut store, ("c", None, history), now);
    keep(&mut store, ("d", None, Vec::new()), now);
    assert_eq!(
        store.json("b", None, now),
        None,
        "the oldest was pushed out"
    );
    let seen = store.seen("c", None, now).expect("it is there");
    assert_eq!(texts(&seen), ["msg_a", "out_a", "msg_b", "out_b", "msg_c"]);
}

#[test]
fn responses_and_items_exist_for_their_owner_only() {
    let mut store = Store::new(limits(9, 1 << 20, 60));
    let now = Instant::now();
    keep(&mut store, ("a", Some("alice"), Vec::new()), now);
    for other in [None, Some("bob")] {
        assert_eq!(store.json("a", other, now), None);
        assert!(store.seen("a", other, now).is_none() && store.history("a", other, now).is_none());
        assert_eq!(store.item("out_a", other, now), None);
        assert!(!store.delete("a", other, now));
    }
    let item = store.item("out_a", Some("alice"), now).expect("hers");
    assert!(item.contains("answer"));
    assert!(store.delete("a", Some("alice"), now));
    assert_eq!(store.item("out_a", Some("alice"), now), None);
    assert_eq!(store.n_bytes(), 0);
}

#[test]
fn time_and_size_have_ends() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut store = Store::new(limits(9, 1 << 20, 60));
    keep(&mut store, ("a", None, Vec::new()), start);
    assert!(store.json("a", None, at(59)).is_some());
    assert!(store.json("a", None, at(60)).is_none());
    keep(&mut store, ("b", None, Vec::new()), at(60));
    assert_eq!(store.len(), 1, "what is too old makes room");
    let one = store.n_bytes();
    let mut small = Store::new(limits(9, one - 1, 60));
    assert!(!keep(&mut small, ("b", None, Vec::new()), start));
    assert_eq!((small.len(), small.n_bytes()), (0, 0));
    let mut off = Store::new(limits(0, 1 << 20, 60));
    assert!(!keep(&mut off, ("a", None, Vec::new()), start));
}

#[test]
fn an_item_id_means_to_each_owner_their_own_item() {
    let mut store = Store::new(limits(9, 1 << 20, 60));
    let now = Instant::now();
    for (id, owner) in [("a", "alice"), ("b", "bob")] {
        let mut kept = kept(&mut store, id, Some(owner), Vec::new());
        let item = json!({"id": "msg_same", "text": owner});
        kept.input = Turn::new(&[item], &store.ledger(Some(owner)));
        assert!(store.keep(kept, now));
    }
    let item = |store: &Store, owner| store.item("msg_same", Some(owner), now);
    assert!(item(&store, "alice").expect("hers").contains("alice"));
    assert!(item(&store, "bob").expect("his").contains("bob"));
    assert!(store.delete("b", Some("bob"), now));
    assert!(item(&store, "alice").is_some() && item(&store, "bob").is_none());
}

#[test]
fn a_flood_pushes_out_its_own_owner() {
    let now = Instant::now();
    let mut one = Store::new(limits(9, 1 << 20, 60));
    keep(&mut one, ("a1", Some("a"), Vec::new()), now);
    let room = one.n_bytes() * 9 / 2; // four and a half
    for bound in [limits(4, 1 << 20, 60), limits(99, room, 60)] {
        let mut store = Store::new(bound);
        keep(&mut store, ("a1", Some("a"), Vec::new()), now);
        for number in 0..20 {
            let id = format!("b{number}");
            assert!(keep(&mut store, (&id, Some("b"), Vec::new()), now));
        }
        assert!(store.json("a1", Some("a"), now).is_some());
        assert!(store.json("b19", Some("b"), now).is_some());
        assert!(store.json("b0", Some("b"), now).is_none());
    }
}

#[test]
fn the_heaviest_owner_gives_way_and_among_equals_the_oldest() {
    let oldest = |owner_load, serial, id| Oldest {
        owner_load,
        serial,
        id,
    };
    let of = |all: &[Oldest<'static>]| victim(all.iter().copied());
    assert_eq!(of(&[]), None);
    assert_eq!(of(&[oldest(1, 0, "a"), oldest(2, 5, "b")]), Some("b"));
    assert_eq!(of(&[oldest(2, 7, "a"), oldest(2, 5, "b")]), Some("b"));
}

#[derive(Clone, Debug)]
enum Action {
    Keep {
        size: usize,
        owner: bool,
        after: usize,
    },
    Delete(usize),
    Wait(u64),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => (0..3000_usize, any::<bool>(), 0..40_usize)
            .prop_map(|(size, owner, after)| Action::Keep { size, owner, after }),
        1 => (0..40_usize).prop_map(Action::Delete),
        1 => (0..30_u64).prop_map(Action::Wait),
    ]
}

proptest! {
    /// Whatever happens, the bounds hold and the counts agree with what is there.
    #[test]
    fn bounds_hold(actions in prop::collection::vec(action(), 0..60)) {
        let mut store = Store::new(limits(5, 20_000, 60));
        let mut now = Instant::now();
        let mut ids: Vec<String> = Vec::new();
        for (number, action) in actions.into_iter().enumerate() {
            let nth = |place: usize| ids.get(place % ids.len().max(1)).cloned().unwrap_or_default();
            match action {
                Action::Wait(seconds) => now += Duration::from_secs(seconds),
                Action::Delete(place) => {
                    let id = nth(place);
                    let _ = store.delete(&id, None, now) || store.delete(&id, Some("x"), now);
                    prop_assert!(store.json(&id, None, now).is_none());
                }
                Action::Keep { size, owner, after } => {
                    let owner = owner.then_some("x");
                    let history = store.history(&nth(after), owner, now).unwrap_or_default();
                    let id = format!("r{number}");
                    let mut kept = kept(&mut store, &id, owner, history);
                    let big = json!({"id": format!("big_{id}"), "text": "x".repeat(size)});
                    kept.output = Turn::new(&[big], &store.ledger(owner));
                    if store.keep(kept, now) {
                        prop_assert!(store.json(&id, owner, now).is_some());
                        let item = format!("big_{id}");
                        prop_assert!(store.item(&item, owner, now).is_some());
                    }
                    ids.push(id);
                }
            }
            prop_assert!(store.len() <= 5 && store.n_bytes() <= 20_000);
            prop_assert_eq!(store.by_age.len(), store.len());
            let n_items: usize = store.entries.values().map(|entry| entry.own_items().count()).sum();
            let held: usize = store.owners.values().map(|holding| holding.items.len()).sum();
            prop_assert_eq!(held, n_items);
            let owned: usize = store.owners.values().map(Holding::n_bytes).sum();
            prop_assert_eq!(owned, store.n_bytes());
            prop_assert_eq!(store.n_bytes() == 0, store.is_empty());
        }
    }
}

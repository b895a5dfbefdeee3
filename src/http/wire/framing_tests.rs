//! The framer's specification: a table of inputs, each at every cut, and properties.

use super::*;
use proptest::prelude::*;

fn small() -> FramingLimits {
    FramingLimits {
        head_bytes: 512,
        body_bytes: 1000,
        chunk_line_bytes: 32,
        trailer_bytes: 64,
    }
}

fn big() -> FramingLimits {
    FramingLimits {
        head_bytes: 32 << 10,
        body_bytes: 16 << 20,
        ..small()
    }
}

/// All steps that `bytes` lead to when they arrive in these pieces; stops at a reject.
fn steps(pieces: &[&[u8]], limits: FramingLimits) -> (Vec<Step>, Stage) {
    let mut f = Framer::new(limits);
    let mut out = Vec::new();
    for p in pieces {
        f.feed(p);
        loop {
            match f.step() {
                Step::More => break,
                Step::Reject(r) => {
                    out.push(Step::Reject(r));
                    return (out, Stage::Body);
                }
                s => out.push(s),
            }
        }
    }
    (out, f.stage())
}

fn status(raw: &[u8]) -> u16 {
    match steps(&[raw], small()).0.pop() {
        Some(Step::Reject(r)) => r.status,
        Some(Step::Request(_)) => 200,
        Some(Step::Continue) => 100,
        _ => 0,
    }
}

/// Corpus used by the table, the split test and the mutation test.
const CASES: &[(&[u8], u16)] = &[
    (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 200),
    (b"\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", 200),
    (b"\r\n\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"GET / HTTP/1.0\r\n\r\n", 200),
    (b"GET http://h:1/p?q HTTP/1.1\r\nHost: h:1\r\n\r\n", 200),
    (b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n", 200),
    (b"GET * HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    (b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
    (b"GET / HTTP/1.1\nHost: a\n\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\n\r\n", 400),
    (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"GET /\xc3\xa4 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX : y\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\n X: y\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n", 400),
    (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    (b"\x16\x03\x01\x02\x00\x01", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc", 200),
    (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 200),
    (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3, 3\r\n\r\nabc", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\nabc", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x3\r\n\r\nabc", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1001\r\n\r\n", 413),
    (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9223372036854775808\r\n\r\n", 413),
    (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n", 413),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 200),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n3;x=\"y\"\r\nabc\r\nA\r\n0123456789\r\n0\r\nT: v\r\n\r\n", 200),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n 3\r\nabc\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\nabc\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3 x\r\nabc\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3;a\rb\r\nabc\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", 413),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n00000000000000003\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3e8\r\n", 0),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n", 413),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3;xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nno colon\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: 0123456789012345678901234567\r\nB: 0123456789012345678901234567\r\nC: d\r\n\r\n", 431),
    (b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n", 100),
    (b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc", 200),
    (b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 9999\r\n\r\n", 413),
    (b"POST / HTTP/1.1\r\nHost: a\r\nExpect: tea\r\n\r\n", 417),
    (b"GET /a HTTP/1.1\r\nHost: a\r\n\r\nPOST /b HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhiGET /c HTTP/1.1\r\nHost: a\r\n\r\n", 200),
];

#[test]
fn table() {
    for (raw, want) in CASES {
        assert_eq!(status(raw), *want, "{}", String::from_utf8_lossy(raw));
    }
}

#[test]
fn every_single_split_and_bytewise() {
    for (raw, _) in CASES {
        let whole = steps(&[raw], small());
        for i in 0..=raw.len() {
            assert_eq!(
                steps(&[&raw[..i], &raw[i..]], small()),
                whole,
                "{i} {}",
                String::from_utf8_lossy(raw)
            );
        }
        let bytes: Vec<&[u8]> = raw.chunks(1).collect();
        assert_eq!(steps(&bytes, small()), whole);
    }
}

#[test]
fn limits() {
    let long = |n: usize| [b"GET / HTTP/1.1\r\nHost: a\r\nX: ".to_vec(), vec![b'a'; n]].concat();
    assert_eq!(status(&long(400)), 0);
    assert_eq!(status(&long(600)), 431);
    assert_eq!(status(&[&long(600)[..], b"\r\n\r\n"].concat()), 431);
    let many = |n: usize| {
        [
            b"GET / HTTP/1.1\r\nHost: a\r\n".to_vec(),
            b"a: b\r\n".repeat(n),
            b"\r\n".to_vec(),
        ]
        .concat()
    };
    assert!(matches!(steps(&[&many(99)], big()).0[0], Step::Request(_)));
    assert!(matches!(
        steps(&[&many(100)], big()).0[0],
        Step::Reject(Reject { status: 431, .. })
    ));
}

#[test]
fn memory_follows_bytes_not_promises() {
    let mut f = Framer::new(big());
    f.feed(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 16000000\r\n\r\nx");
    assert_eq!(f.step(), Step::More);
    assert!(f.held_bytes() < 70_000, "{}", f.held_bytes());
}

fn cut(raw: &[u8], cuts: &[usize]) -> Vec<Vec<u8>> {
    let mut at: Vec<usize> = cuts.iter().map(|c| c % (raw.len() + 1)).collect();
    at.push(0);
    at.push(raw.len());
    at.sort();
    at.windows(2).map(|w| raw[w[0]..w[1]].to_vec()).collect()
}

/// Valid requests built from a model, so that the framer can be checked against what was meant.
fn arb_request() -> impl Strategy<Value = (Vec<u8>, String, Vec<u8>)> {
    let body = proptest::collection::vec(any::<u8>(), 0..200);
    (
        "/[a-z0-9/?=&]{0,20}",
        body,
        0..3u8,
        proptest::collection::vec(1..50usize, 1..6),
    )
        .prop_map(|(target, body, kind, sizes)| {
            let mut raw = format!("POST {target} HTTP/1.1\r\nhost: x\r\n").into_bytes();
            match kind {
                0 if body.is_empty() => raw.extend(b"\r\n"),
                0 | 1 => {
                    raw.extend(format!("content-length: {}\r\n\r\n", body.len()).bytes());
                    raw.extend(&body);
                }
                _ => {
                    raw.extend(b"Transfer-Encoding: chunked\r\n\r\n");
                    let (mut left, mut i) = (&body[..], 0);
                    while !left.is_empty() {
                        let n = sizes[i % sizes.len()].min(left.len());
                        i += 1;
                        raw.extend(format!("{n:x};e\r\n").bytes());
                        raw.extend(&left[..n]);
                        raw.extend(b"\r\n");
                        left = &left[n..];
                    }
                    raw.extend(b"0\r\n\r\n");
                }
            }
            (raw, target, body)
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn pipelined_requests_in_any_cut(
        list in proptest::collection::vec(arb_request(), 1..5),
        cuts in proptest::collection::vec(any::<usize>(), 0..20),
    ) {
        let raw: Vec<u8> = list.iter().flat_map(|(r, _, _)| r.clone()).collect();
        let pieces = cut(&raw, &cuts);
        let (got, stage) = steps(&pieces.iter().map(|p| &p[..]).collect::<Vec<_>>(), small());
        prop_assert_eq!(got.len(), list.len());
        prop_assert_eq!(stage, Stage::Idle);
        for (step, (_, target, body)) in got.iter().zip(&list) {
            let Step::Request(r) = step else { panic!("{step:?}") };
            prop_assert_eq!(r.target(), &target[..]);
            prop_assert_eq!(&r.body, body);
        }
    }

    /// Damaged input: no panic, no difference by cut.
    #[test]
    fn mutations_in_any_cut(
        case in 0..CASES.len(), second in 0..CASES.len(),
        edits in proptest::collection::vec((any::<usize>(), 0..3u8, prop_oneof![Just(b'\r'), Just(b'\n'), Just(b' '), Just(b':'), Just(b'0'), any::<u8>()]), 0..6),
        cuts in proptest::collection::vec(any::<usize>(), 0..20),
    ) {
        let mut raw = [CASES[case].0, CASES[second].0].concat();
        for (at, kind, byte) in edits {
            let at = at % raw.len();
            match kind { 0 => raw[at] = byte, 1 => raw.insert(at, byte), _ => { raw.remove(at); } }
        }
        let whole = steps(&[&raw], small());
        let pieces = cut(&raw, &cuts);
        prop_assert_eq!(&steps(&pieces.iter().map(|p| &p[..]).collect::<Vec<_>>(), small()), &whole);
        prop_assert_eq!(steps(&raw.chunks(1).collect::<Vec<_>>(), small()), whole);
    }

    #[test]
    fn noise_never_panics(raw in proptest::collection::vec(any::<u8>(), 0..300), cuts in proptest::collection::vec(any::<usize>(), 0..5)) {
        let whole = steps(&[&raw], small());
        let pieces = cut(&raw, &cuts);
        prop_assert_eq!(steps(&pieces.iter().map(|p| &p[..]).collect::<Vec<_>>(), small()), whole);
    }
}

//! Neither batch nor chunks nor threads nor copies change a bit.

use crate::cpu_paths::{cpu, paths};
use crate::support::*;
use tinyloop::backend::*;
use tinyloop::dtype::DType;

#[test]
fn neither_batch_nor_chunks_nor_threads_change_a_bit() {
    let vocab = SMOL.vocab_size;
    let (long, other) = (tokens(300, 3), tokens(40, 4));
    for path in paths() {
        for shape in [
            SMOL,
            Shape {
                window: 280,
                cache_window: CacheWindow {
                    tokens: 40,
                    n_kept: 32,
                },
                drops_unseen: true,
                extras: true,
                ..SMOL
            },
            Shape {
                dtype: DType::F16,
                other_dtype: DType::Q5_1,
                loops: 2,
                ..SMOL
            },
        ] {
            let alone = Rig::new(cpu(path, 1), shape).run(&[(0, 0, &long)]);
            assert!(alone.iter().all(|logit| logit.is_finite()));
            for n_threads in [1, 2, 3] {
                let whole = Rig::new(cpu(path, n_threads), shape).run(&[(0, 0, &long)]);
                assert!(alone == whole, "{path}: {n_threads} threads");

                let mut rig = Rig::new(cpu(path, n_threads), shape);
                let mut chunked = rig.run(&[(0, 0, &long[..7])]);
                let mixed = rig.run(&[(1, 0, &other), (0, 7, &long[7..290])]);
                chunked.extend_from_slice(&mixed[other.len() * vocab..]);
                // One or two rows at a long context: splits run on different threads.
                for position in 290..298 {
                    chunked.extend(rig.run(&[(0, position, &long[position..=position])]));
                }
                let last = rig.run(&[(0, 298, &long[298..]), (2, 0, &other[..1])]);
                chunked.extend_from_slice(&last[..2 * vocab]);
                assert!(alone == chunked, "{path}: chunked with {n_threads} threads");
                let other_alone = Rig::new(cpu(path, 1), shape).run(&[(0, 0, &other)]);
                assert!(
                    other_alone == mixed[..other.len() * vocab],
                    "{path}: in a batch"
                );
            }
        }
    }
}

#[test]
fn a_copied_page_serves_like_the_original() {
    let long = tokens(20, 5);
    for path in paths() {
        let mut rig = Rig::new(cpu(path, 2), SMOL);
        rig.run(&[(0, 0, &long)]);
        for page in 0..PAGES_PER_GROUP {
            let (from, to) = (PageId(page as u32), PageId((PAGES_PER_GROUP + page) as u32));
            rig.backend.copy_page(from, to).expect("pages exist");
        }
        let original = rig.run(&[(0, 20, &[9])]);
        assert!(original == rig.run(&[(1, 20, &[9])]), "{path}");
    }
}

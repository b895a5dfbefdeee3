//! What the bench asks for and when: the same for every way of batching.
//!
//! Pure: the same seed gives the same requests and the same arrivals on every machine.

use crate::request::TokenId;

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Item {
    pub(super) loops: u32,
    pub(super) prompt: Vec<TokenId>,
    /// Tokens to generate; it always generates all of them.
    pub(super) n_generate: u32,
    /// Of its sampler.
    pub(super) seed: u64,
}

/// Sizes of a workload.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) n_requests: usize,
    /// Depths that requests draw from.
    pub(super) depths: Vec<u32>,
    /// Mean prompt and generated tokens; each request draws from half to one and a half of them.
    pub(super) n_prompt: u32,
    pub(super) n_generate: u32,
    pub(super) vocab_size: u32,
}

/// The requests of a seed. Every depth occurs equally often, in random order.
pub(super) fn requests(shape: &Shape, seed: u64) -> Vec<Item> {
    let mut random = SplitMix(seed);
    let mut depths: Vec<u32> = (0..shape.n_requests)
        .map(|index| shape.depths[index % shape.depths.len()])
        .collect();
    for index in (1..depths.len()).rev() {
        depths.swap(index, random.below(index as u64 + 1) as usize);
    }
    let about = |random: &mut SplitMix, mean: u32| {
        let least = mean.div_ceil(2);
        least + random.below(u64::from(mean) + 1) as u32
    };
    depths
        .into_iter()
        .map(|loops| {
            let n_prompt = about(&mut random, shape.n_prompt);
            let token = |random: &mut SplitMix| random.below(u64::from(shape.vocab_size)) as u32;
            Item {
                loops,
                prompt: (0..n_prompt).map(|_| token(&mut random)).collect(),
                n_generate: about(&mut random, shape.n_generate),
                seed: random.next(),
            }
        })
        .collect()
}

/// Poisson arrivals: `n` times in seconds, rising from 0, with `per_second` on the average.
pub(super) fn arrivals(n: usize, per_second: f64, seed: u64) -> Vec<f64> {
    let mut random = SplitMix(seed ^ 0xa77);
    let mut now = 0.0;
    (0..n)
        .map(|_| {
            let arrival = now;
            now -= (1.0 - random.fraction()).ln() / per_second;
            arrival
        })
        .collect()
}

/// The SplitMix64 generator.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 0..n; the bias of the remainder is far below what a bench can see.
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// 0..1, below 1.
    fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_requests_and_every_depth_equally_often() {
        let shape = Shape {
            n_requests: 24,
            depths: vec![1, 2, 5],
            n_prompt: 10,
            n_generate: 1,
            vocab_size: 50,
        };
        let all = requests(&shape, 3);
        assert_eq!(all, requests(&shape, 3));
        assert_ne!(all, requests(&shape, 4));
        for depth in &shape.depths {
            assert_eq!(all.iter().filter(|item| item.loops == *depth).count(), 8);
        }
        for item in &all {
            assert!((5..=15).contains(&item.prompt.len()));
            assert!((1..=2).contains(&item.n_generate));
            assert!(item.prompt.iter().all(|token| *token < 50));
        }
    }

    #[test]
    fn arrivals_rise_and_have_their_rate() {
        let times = arrivals(4000, 50.0, 1);
        assert_eq!(times[0], 0.0);
        assert!(times.windows(2).all(|pair| pair[0] <= pair[1]));
        let rate = times.len() as f64 / times[times.len() - 1];
        assert!((47.0..53.0).contains(&rate), "{rate}");
    }
}

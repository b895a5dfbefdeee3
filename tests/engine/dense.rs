//! A llama-like model written out in f64 without pages, chunks or caches: every row against every
//! position, with the window as an explicit mask. The oracle for windows; it shares nothing with
//! the backends but the random weights.

use tinyloop::backend::CacheWindow;
use tinyloop::model::testing::{RandomTensors, TinyShape, tiny_spec};
use tinyloop::model::weights::TensorSource;

const D_MODEL: usize = 64;
const HEAD: usize = 16;
const N_HEADS: usize = 4;
const N_KV_HEADS: usize = 2;

/// The weights of `testing::tiny` and `testing::tiny_looped` (the same seed, 7).
pub(crate) struct Dense {
    tensors: RandomTensors,
    /// The file's blocks in the order in which a row meets them.
    blocks: Vec<usize>,
}

impl Dense {
    /// A model of this shape, its loops written out.
    pub(crate) fn new(shape: &TinyShape, loops: u32) -> Self {
        let plan = &shape.plan;
        let mut blocks: Vec<usize> = plan.prelude.clone().map(|b| b as usize).collect();
        for _ in 0..loops {
            blocks.extend(plan.core.clone().map(|b| b as usize));
        }
        blocks.extend(plan.coda.clone().map(|b| b as usize));
        Self {
            tensors: RandomTensors::new(&tiny_spec(shape), 7),
            blocks,
        }
    }

    fn vector(&self, name: &str) -> Vec<f64> {
        let values = self.tensors.vector(name).expect("a tensor of the model");
        values.into_iter().map(f64::from).collect()
    }

    /// `W x` for every row of `x` (rows, n_in).
    fn project(&self, name: &str, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let mut scratch = Vec::new();
        let matrix = self.tensors.matrix(name, &mut scratch).expect("a tensor");
        let weights: Vec<f64> = matrix
            .bytes
            .chunks_exact(4)
            .map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
            .collect();
        let row = |x: &Vec<f64>| {
            let dot = |w: &[f64]| w.iter().zip(x).map(|(w, x)| w * x).sum();
            weights.chunks_exact(matrix.n_in).map(dot).collect()
        };
        x.iter().map(row).collect()
    }

    fn normed(&self, name: &str, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let weight = self.vector(name);
        let row = |x: &Vec<f64>| {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            let factor = 1.0 / (mean + 1e-5).sqrt();
            x.iter().zip(&weight).map(|(x, w)| x * factor * w).collect()
        };
        x.iter().map(row).collect()
    }

    /// Natural log of the probability of each token but the first.
    pub(crate) fn logprobs(&self, tokens: &[u32], window: CacheWindow) -> Vec<f64> {
        let mut hidden = Vec::new();
        let embeddings = self.project("token_embd.weight", &identity());
        for token in tokens {
            hidden.push(
                embeddings
                    .iter()
                    .map(|column| column[*token as usize])
                    .collect(),
            );
        }
        for block in &self.blocks {
            let name = |part: &str| format!("blk.{block}.{part}.weight");
            let normed = self.normed(&name("attn_norm"), &hidden);
            let [q, k] =
                ["attn_q", "attn_k"].map(|part| rotated(self.project(&name(part), &normed)));
            let v = self.project(&name("attn_v"), &normed);
            let attention = attend(&q, &k, &v, window);
            add(&mut hidden, &self.project(&name("attn_output"), &attention));
            let normed = self.normed(&name("ffn_norm"), &hidden);
            let mut gate = self.project(&name("ffn_gate"), &normed);
            let up = self.project(&name("ffn_up"), &normed);
            for (gate, up) in gate.iter_mut().flatten().zip(up.iter().flatten()) {
                *gate = *gate / (1.0 + (-*gate).exp()) * up;
            }
            add(&mut hidden, &self.project(&name("ffn_down"), &gate));
        }
        let logits = self.project(
            "token_embd.weight",
            &self.normed("output_norm.weight", &hidden),
        );
        let pairs = logits.iter().zip(&tokens[1..]);
        pairs
            .map(|(logits, next)| {
                let max = logits.iter().copied().fold(f64::MIN, f64::max);
                let total: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
                logits[*next as usize] - max - total.ln()
            })
            .collect()
    }
}

/// Projecting these gives the columns of a matrix.
fn identity() -> Vec<Vec<f64>> {
    let row = |i| (0..D_MODEL).map(|j| f64::from(u8::from(i == j))).collect();
    (0..D_MODEL).map(row).collect()
}

fn add(x: &mut [Vec<f64>], y: &[Vec<f64>]) {
    for (x, y) in x.iter_mut().flatten().zip(y.iter().flatten()) {
        *x += y;
    }
}

/// Neighbouring coordinates turned by the angle of their row.
fn rotated(mut rows: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    for (position, row) in rows.iter_mut().enumerate() {
        for (pair_idx, pair) in row.chunks_exact_mut(2).enumerate() {
            let exponent = -2.0 * (pair_idx % (HEAD / 2)) as f64 / HEAD as f64;
            let (sin, cos) = (position as f64 * 10_000_f64.powf(exponent)).sin_cos();
            (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos);
        }
    }
    rows
}

fn attend(q: &[Vec<f64>], k: &[Vec<f64>], v: &[Vec<f64>], window: CacheWindow) -> Vec<Vec<f64>> {
    let sees = |row: usize, column: usize| {
        let is_recent = window.tokens == 0 || row - column < window.tokens as usize;
        is_recent || column < window.n_kept as usize
    };
    let mut out = vec![vec![0.0; N_HEADS * HEAD]; q.len()];
    for (row, out) in out.iter_mut().enumerate() {
        for (head, out) in out.chunks_exact_mut(HEAD).enumerate() {
            let of = |rows: &[Vec<f64>], column: usize| {
                let kv_head = head / (N_HEADS / N_KV_HEADS);
                rows[column][kv_head * HEAD..][..HEAD].to_vec()
            };
            let query = &q[row][head * HEAD..][..HEAD];
            let weights: Vec<f64> = (0..=row)
                .map(|column| match sees(row, column) {
                    true => query
                        .iter()
                        .zip(of(k, column))
                        .map(|(q, k)| q * k / 4.0)
                        .sum(),
                    false => f64::NEG_INFINITY,
                })
                .map(f64::exp)
                .collect();
            let total: f64 = weights.iter().sum();
            for (column, weight) in weights.iter().enumerate() {
                for (out, value) in out.iter_mut().zip(of(v, column)) {
                    *out += weight / total * value;
                }
            }
        }
    }
    out
}

//! Kernels over one KV page: scores of its 16 keys, weighted sum of its 16 values.
//!
//! Keys lie transposed, `(head_dim, 16)` f16: one load gives the same coordinate of 8 or 16
//! positions, and no horizontal sum is needed. Values lie `(16, padded head_dim)` f16. A column is
//! one query head of one row; up to three share each converted key or value register (three query
//! heads per key head are common, and 12 running sums fit AVX2). A column's order of arithmetic is
//! the same alone: scores sum even and odd coordinates apart, values run position by position.

use super::super::lanes::Lanes;
use crate::backend::PAGE_TOKENS;

/// Scores of one page.
pub(in super::super) struct ScoresArgs {
    /// `(head_dim, 16)` f16.
    pub(in super::super) keys: *const u16,
    /// Width of a head.
    pub(in super::super) head_dim: usize,
    /// `(n_columns, query_stride)`, already scaled.
    pub(in super::super) queries: *const f32,
    /// From column to column.
    pub(in super::super) query_stride: usize,
    /// Columns.
    pub(in super::super) n_columns: usize,
    /// `(n_columns, out_stride)`: 16 scores each.
    pub(in super::super) out: *mut f32,
    /// From column to column.
    pub(in super::super) out_stride: usize,
}

/// Weighted sum of one page.
pub(in super::super) struct ValuesArgs {
    /// `(16, padded_dim)` f16.
    pub(in super::super) values: *const u16,
    /// A multiple of 16.
    pub(in super::super) padded_dim: usize,
    /// First position of the page to add.
    pub(in super::super) first: usize,
    /// After the last position to add, at most 16.
    pub(in super::super) end: usize,
    /// `(n_columns, weight_stride)`: 16 weights each.
    pub(in super::super) weights: *const f32,
    /// From column to column.
    pub(in super::super) weight_stride: usize,
    /// Columns.
    pub(in super::super) n_columns: usize,
    /// `(n_columns, sum_stride)`, the first `padded_dim` of each are added to.
    pub(in super::super) sums: *mut f32,
    /// From column to column.
    pub(in super::super) sum_stride: usize,
}

/// `out[column][t] = queries[column] · keys[t]`.
#[inline(always)]
pub(super) unsafe fn scores<L: Lanes>(args: &ScoresArgs) {
    let mut column = 0;
    while column < args.n_columns {
        // SAFETY: passed on to the caller; columns stay below `n_columns`.
        unsafe {
            match args.n_columns - column {
                1 => column += score_columns::<L, 1>(args, column),
                2 | 4 => column += score_columns::<L, 2>(args, column),
                _ => column += score_columns::<L, 3>(args, column),
            }
        }
    }
}

#[inline(always)]
unsafe fn score_columns<L: Lanes, const N: usize>(args: &ScoresArgs, column: usize) -> usize {
    let n_halves = PAGE_TOKENS / L::LANES;
    // SAFETY: inside the areas that `ScoresArgs` describes.
    unsafe {
        let queries = args.queries.add(column * args.query_stride);
        // [parity of the coordinate][column][half of the page]
        let mut sums = [[[L::zero(); 2]; N]; 2];
        for d in (0..args.head_dim & !1).step_by(2) {
            for (parity, sums) in sums.iter_mut().enumerate() {
                add_coordinate::<L, N>(args, queries, d + parity, sums);
            }
        }
        if args.head_dim & 1 == 1 {
            add_coordinate::<L, N>(args, queries, args.head_dim - 1, &mut sums[0]);
        }
        let [even, odd] = sums;
        for (i, (even, odd)) in even.into_iter().zip(odd).enumerate() {
            for (half, (even, odd)) in even.into_iter().zip(odd).enumerate().take(n_halves) {
                let at = (column + i) * args.out_stride + half * L::LANES;
                L::store(args.out.add(at), L::add(even, odd));
            }
        }
    }
    N
}

#[inline(always)]
unsafe fn add_coordinate<L: Lanes, const N: usize>(
    args: &ScoresArgs,
    queries: *const f32,
    d: usize,
    sums: &mut [[L::F; 2]; N],
) {
    let n_halves = PAGE_TOKENS / L::LANES;
    // SAFETY: `d < head_dim`; inside the areas that `ScoresArgs` describes.
    unsafe {
        let keys = args.keys.add(d * PAGE_TOKENS);
        let mut loaded = [L::zero(); 2];
        for (half, loaded) in loaded.iter_mut().enumerate().take(n_halves) {
            *loaded = L::load_f16(keys.add(half * L::LANES));
        }
        for (i, sums) in sums.iter_mut().enumerate() {
            let query = L::splat(*queries.add(i * args.query_stride + d));
            for half in 0..n_halves {
                sums[half] = L::mul_add(loaded[half], query, sums[half]);
            }
        }
    }
}

/// `sums[column] += weights[column][t] * values[t]` for `t` in `first..end`.
#[inline(always)]
pub(super) unsafe fn values<L: Lanes>(args: &ValuesArgs) {
    let mut column = 0;
    while column < args.n_columns {
        // SAFETY: passed on to the caller; columns stay below `n_columns`.
        unsafe {
            match args.n_columns - column {
                1 => column += value_columns::<L, 1>(args, column),
                2 | 4 => column += value_columns::<L, 2>(args, column),
                _ => column += value_columns::<L, 3>(args, column),
            }
        }
    }
}

#[inline(always)]
unsafe fn value_columns<L: Lanes, const N: usize>(args: &ValuesArgs, column: usize) -> usize {
    let mut d = 0;
    // SAFETY: `d + WIDTH * LANES <= padded_dim`, a multiple of 16 and so of LANES.
    unsafe {
        while d + 4 * L::LANES <= args.padded_dim {
            value_slice::<L, N, 4>(args, column, d);
            d += 4 * L::LANES;
        }
        while d < args.padded_dim {
            value_slice::<L, N, 1>(args, column, d);
            d += L::LANES;
        }
    }
    N
}

/// `WIDTH` vectors of the head from coordinate `d` on.
#[inline(always)]
unsafe fn value_slice<L: Lanes, const N: usize, const WIDTH: usize>(
    args: &ValuesArgs,
    column: usize,
    d: usize,
) {
    // SAFETY: inside the areas that `ValuesArgs` describes.
    unsafe {
        let at = |i: usize, w: usize| {
            args.sums
                .add((column + i) * args.sum_stride + d + w * L::LANES)
        };
        let mut sums: [[L::F; WIDTH]; N] =
            std::array::from_fn(|i| std::array::from_fn(|w| L::load(at(i, w))));
        for t in args.first..args.end {
            let values = args.values.add(t * args.padded_dim + d);
            let mut weights = [L::zero(); N];
            for (i, weight) in weights.iter_mut().enumerate() {
                *weight = L::splat(*args.weights.add((column + i) * args.weight_stride + t));
            }
            for w in 0..WIDTH {
                let value = L::load_f16(values.add(w * L::LANES));
                for (sums, weight) in sums.iter_mut().zip(weights) {
                    sums[w] = L::mul_add(value, weight, sums[w]);
                }
            }
        }
        for (i, sums) in sums.into_iter().enumerate() {
            for (w, sum) in sums.into_iter().enumerate() {
                L::store(at(i, w), sum);
            }
        }
    }
}

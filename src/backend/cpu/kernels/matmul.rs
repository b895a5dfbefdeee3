//! Products of weight panels with activation rows, over `Lanes`.
//!
//! A panel is `LANES` outputs; the picture of its bytes is in `cpu/mod.rs`. For a quantized panel
//! the sum of an output is, block after block of 32 inputs and group after group within,
//!
//! ```text
//! total = fma(dot(codes, activations) - offset * sum(activations), scale_w * scale_a, total)
//! total = fma(minimum_w, scale_a * sum(activations), total)          where there is a minimum
//! ```
//!
//! with an exact integer `dot`. Columns (activation rows) are handled 1 to 8 at a time while the
//! unpacked codes are in registers; a column's own order never changes, so one row and 512 rows
//! give the same bits. Float panels keep two running sums, over even and odd inputs.

use super::super::lanes::Lanes;
use super::vector::{ActivationBlock, BLOCK};

/// One product: `n_panels` panels times `n_rows` rows.
pub(in super::super) struct MatmulArgs {
    /// First panel.
    pub(in super::super) panels: *const u8,
    /// Bytes from panel to panel.
    pub(in super::super) panel_bytes: usize,
    /// Panels to multiply.
    pub(in super::super) n_panels: usize,
    /// Columns of the matrix.
    pub(in super::super) n_in: usize,
    /// Quantized rows, `(n_rows, n_in / 32)`; for quantized layouts.
    pub(in super::super) blocks: *const ActivationBlock,
    /// What quantization left over, in the same shape and added to the product; null = nothing.
    pub(in super::super) remainders: *const ActivationBlock,
    /// Plain rows, `(n_rows, n_in)`; for float layouts.
    pub(in super::super) floats: *const f32,
    /// Rows.
    pub(in super::super) n_rows: usize,
    /// `(n_rows, out_stride)`; the first `n_panels * LANES` of each row are written.
    pub(in super::super) out: *mut f32,
    /// From row to row of `out`, in values.
    pub(in super::super) out_stride: usize,
}

/// How codes lie in a panel.
pub(in super::super) trait Codes {
    /// Bytes of 8 inputs of one output.
    const BYTES_PER_8: usize;
    /// Running sum.
    type Sum<L: Lanes>: Copy;
    /// Offset that `finish` leaves in: `(sum of activations) << shift`, 0 = none.
    fn bias_shift<L: Lanes>() -> u32;
    unsafe fn zero<L: Lanes>() -> Self::Sum<L>;
    /// Adds 8 inputs for each column.
    unsafe fn add_8<L: Lanes, const N: usize>(
        sums: &mut [Self::Sum<L>; N],
        codes: *const u8,
        activations: &[*const i8; N],
    );
    unsafe fn finish<L: Lanes>(sum: Self::Sum<L>) -> L::I;
}

/// Unsigned 4-bit codes.
pub(in super::super) struct U4;

impl Codes for U4 {
    const BYTES_PER_8: usize = 4;
    type Sum<L: Lanes> = L::U4Sum;
    #[inline(always)]
    fn bias_shift<L: Lanes>() -> u32 {
        0
    }
    #[inline(always)]
    unsafe fn zero<L: Lanes>() -> L::U4Sum {
        // SAFETY: passed on to the caller.
        unsafe { L::zero_u4() }
    }
    #[inline(always)]
    unsafe fn add_8<L: Lanes, const N: usize>(
        sums: &mut [L::U4Sum; N],
        codes: *const u8,
        activations: &[*const i8; N],
    ) {
        // SAFETY: `4 * LANES` code bytes and 8 activations per column (callers' promise).
        unsafe {
            let (low, high) = L::load_u4(codes);
            for column in 0..N {
                sums[column] = L::dot_u4(sums[column], low, activations[column]);
                sums[column] = L::dot_u4(sums[column], high, activations[column].add(4));
            }
        }
    }
    #[inline(always)]
    unsafe fn finish<L: Lanes>(sum: L::U4Sum) -> L::I {
        // SAFETY: passed on to the caller.
        unsafe { L::finish_u4(sum) }
    }
}

/// Signed 8-bit codes.
pub(in super::super) struct S8;

impl Codes for S8 {
    const BYTES_PER_8: usize = 8;
    type Sum<L: Lanes> = L::I;
    #[inline(always)]
    fn bias_shift<L: Lanes>() -> u32 {
        L::S8_BIAS_SHIFT
    }
    #[inline(always)]
    unsafe fn zero<L: Lanes>() -> L::I {
        // SAFETY: passed on to the caller.
        unsafe { L::zero_i32() }
    }
    #[inline(always)]
    unsafe fn add_8<L: Lanes, const N: usize>(
        sums: &mut [L::I; N],
        codes: *const u8,
        activations: &[*const i8; N],
    ) {
        // SAFETY: `8 * LANES` code bytes and 8 activations per column (callers' promise).
        unsafe {
            let low = L::load_s8(codes);
            for column in 0..N {
                sums[column] = L::dot_s8(sums[column], low, activations[column]);
            }
            let high = L::load_s8(codes.add(4 * L::LANES));
            for column in 0..N {
                sums[column] = L::dot_s8(sums[column], high, activations[column].add(4));
            }
        }
    }
    #[inline(always)]
    unsafe fn finish<L: Lanes>(sum: L::I) -> L::I {
        sum
    }
}

/// Panels of quantized weights times quantized rows.
#[inline(always)]
pub(super) unsafe fn quantized<
    L: Lanes,
    C: Codes,
    const GROUP: usize,
    const WIDE: bool,
    const MIN: bool,
    const OFFSET_SHIFT: u32,
>(
    args: &MatmulArgs,
) {
    let n_blocks = args.n_in / BLOCK;
    let mut row = 0;
    // Rows outside, panels inside: a few rows and a unit's panels stay in the first-level cache.
    macro_rules! columns {
        ($n:literal) => {{
            for panel_idx in 0..args.n_panels {
                // SAFETY: all pointers stay inside the areas that `MatmulArgs` describes.
                unsafe {
                    let panel = args.panels.add(panel_idx * args.panel_bytes);
                    let blocks: [_; $n] =
                        std::array::from_fn(|i| args.blocks.add((row + i) * n_blocks));
                    let mut totals = [L::zero(); $n];
                    quantized_columns::<L, C, GROUP, WIDE, MIN, OFFSET_SHIFT, $n>(
                        panel,
                        n_blocks,
                        &blocks,
                        &mut totals,
                    );
                    if !args.remainders.is_null() {
                        let blocks: [_; $n] =
                            std::array::from_fn(|i| args.remainders.add((row + i) * n_blocks));
                        quantized_columns::<L, C, GROUP, WIDE, MIN, OFFSET_SHIFT, $n>(
                            panel,
                            n_blocks,
                            &blocks,
                            &mut totals,
                        );
                    }
                    for (i, total) in totals.into_iter().enumerate() {
                        let at = (row + i) * args.out_stride + panel_idx * L::LANES;
                        L::store(args.out.add(at), total);
                    }
                }
            }
            row += $n;
        }};
    }
    while row < args.n_rows {
        match args.n_rows - row {
            1 => columns!(1),
            2 => columns!(2),
            3 => columns!(3),
            8.. if L::MANY_REGISTERS => columns!(8),
            _ => columns!(4),
        }
    }
}

#[inline(always)]
unsafe fn quantized_columns<
    L: Lanes,
    C: Codes,
    const GROUP: usize,
    const WIDE: bool,
    const MIN: bool,
    const OFFSET_SHIFT: u32,
    const N: usize,
>(
    panel: *const u8,
    n_blocks: usize,
    blocks: &[*const ActivationBlock; N],
    totals: &mut [L::F; N],
) {
    let n_groups = BLOCK / GROUP;
    let codes_bytes = L::LANES * C::BYTES_PER_8 * BLOCK / 8;
    let scale_bytes = L::LANES * if WIDE { 4 } else { 2 };
    let block_bytes = codes_bytes + n_groups * scale_bytes * if MIN { 2 } else { 1 };
    // SAFETY: `n_blocks` blocks of the panel and of every column (callers' promise).
    unsafe {
        for block_idx in 0..n_blocks {
            let block = panel.add(block_idx * block_bytes);
            let columns: [*const ActivationBlock; N] =
                std::array::from_fn(|column| blocks[column].add(block_idx));
            for group in 0..n_groups {
                let mut sums = [C::zero::<L>(); N];
                for eight in group * GROUP / 8..(group + 1) * GROUP / 8 {
                    let codes = block.add(eight * L::LANES * C::BYTES_PER_8);
                    let activations: [*const i8; N] = std::array::from_fn(|column| {
                        (&raw const (*columns[column]).codes)
                            .cast::<i8>()
                            .add(eight * 8)
                    });
                    C::add_8::<L, N>(&mut sums, codes, &activations);
                }
                let scale_at = block.add(codes_bytes + group * scale_bytes);
                let scale = load_scale::<L, WIDE>(scale_at);
                let part = if GROUP == BLOCK { 2 } else { group };
                for column in 0..N {
                    let activation = &*columns[column];
                    let mut dot = C::finish::<L>(sums[column]);
                    if OFFSET_SHIFT != 0 {
                        dot = L::sub_shifted::<OFFSET_SHIFT>(dot, &raw const activation.sums[part]);
                    }
                    if C::bias_shift::<L>() != 0 {
                        dot = L::sub_shifted::<7>(dot, &raw const activation.sums[part]);
                    }
                    let scales = L::mul(scale, L::splat(activation.scale));
                    totals[column] = L::mul_add(L::to_f32(dot), scales, totals[column]);
                }
                if MIN {
                    let minimum = load_scale::<L, WIDE>(scale_at.add(n_groups * scale_bytes));
                    for column in 0..N {
                        let sum = L::splat((*columns[column]).scaled_sums[part]);
                        totals[column] = L::mul_add(minimum, sum, totals[column]);
                    }
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn load_scale<L: Lanes, const WIDE: bool>(from: *const u8) -> L::F {
    // SAFETY: `LANES` scales at `from` (callers' promise).
    unsafe {
        if WIDE {
            L::load(from.cast())
        } else {
            L::load_f16(from.cast())
        }
    }
}

/// A float type that stays as it is in memory.
pub(in super::super) trait FloatWeights {
    /// Bytes of one weight.
    const BYTES: usize;
    unsafe fn load<L: Lanes>(from: *const u8) -> L::F;
}

/// f32 weights.
pub(in super::super) struct F32;
/// f16 weights.
pub(in super::super) struct F16;
/// bf16 weights.
pub(in super::super) struct BF16;

impl FloatWeights for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u8) -> L::F {
        // SAFETY: passed on to the caller.
        unsafe { L::load(from.cast()) }
    }
}

impl FloatWeights for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u8) -> L::F {
        // SAFETY: passed on to the caller.
        unsafe { L::load_f16(from.cast()) }
    }
}

impl FloatWeights for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u8) -> L::F {
        // SAFETY: passed on to the caller.
        unsafe { L::load_bf16(from.cast()) }
    }
}

/// Panels of float weights times f32 rows.
#[inline(always)]
pub(super) unsafe fn floats<L: Lanes, W: FloatWeights>(args: &MatmulArgs) {
    let mut row = 0;
    macro_rules! columns {
        ($n:literal) => {{
            for panel_idx in 0..args.n_panels {
                // SAFETY: all pointers stay inside the areas that `MatmulArgs` describes.
                unsafe {
                    let panel = args.panels.add(panel_idx * args.panel_bytes);
                    let rows: [_; $n] =
                        std::array::from_fn(|i| args.floats.add((row + i) * args.n_in));
                    let totals = float_columns::<L, W, $n>(panel, args.n_in, &rows);
                    for (i, total) in totals.into_iter().enumerate() {
                        let at = (row + i) * args.out_stride + panel_idx * L::LANES;
                        L::store(args.out.add(at), total);
                    }
                }
            }
            row += $n;
        }};
    }
    while row < args.n_rows {
        match args.n_rows - row {
            1 => columns!(1),
            2 => columns!(2),
            3 => columns!(3),
            8.. if L::MANY_REGISTERS => columns!(8),
            _ => columns!(4),
        }
    }
}

#[inline(always)]
unsafe fn float_columns<L: Lanes, W: FloatWeights, const N: usize>(
    panel: *const u8,
    n_in: usize,
    rows: &[*const f32; N],
) -> [L::F; N] {
    // SAFETY: `n_in` inputs of the panel and of every column (callers' promise).
    unsafe {
        let mut even = [L::zero(); N];
        let mut odd = [L::zero(); N];
        for pair in 0..n_in / 2 {
            let first = W::load::<L>(panel.add(2 * pair * L::LANES * W::BYTES));
            let second = W::load::<L>(panel.add((2 * pair + 1) * L::LANES * W::BYTES));
            for column in 0..N {
                let x = rows[column].add(2 * pair);
                even[column] = L::mul_add(first, L::splat(*x), even[column]);
                odd[column] = L::mul_add(second, L::splat(*x.add(1)), odd[column]);
            }
        }
        if !n_in.is_multiple_of(2) {
            let last = W::load::<L>(panel.add((n_in - 1) * L::LANES * W::BYTES));
            for column in 0..N {
                let x = L::splat(*rows[column].add(n_in - 1));
                even[column] = L::mul_add(last, x, even[column]);
            }
        }
        std::array::from_fn(|column| L::add(even[column], odd[column]))
    }
}

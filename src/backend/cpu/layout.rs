//! The panel layouts: which stored type goes into which, and where each byte lies. No arithmetic.
//!
//! Pure functions. The picture is in `cpu/mod.rs`. Codes, scales and minima of a stored type are
//! kept exactly (a product of an f16 and a 6-bit integer is exact in f32), so a layout loses
//! nothing against the file.

use crate::dtype::DType;

/// Inputs per block of a quantized panel.
pub(super) const BLOCK: usize = super::kernels::vector::BLOCK;

/// Number of layouts.
pub(super) const N_LAYOUTS: usize = 12;

/// A panel layout. The order is that of `Kernels::matmul`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// 4-bit codes minus 8, f16 scale per 32.
    U4Offset8,
    /// 4-bit codes, f16 scale and minimum per 32.
    U4Min,
    /// 4-bit codes, f32 scale and minimum per 32.
    U4WideMin,
    /// 4-bit codes, f32 scale and minimum per 16.
    U4Wide16Min,
    /// 4-bit codes minus 4, f32 scale per 16.
    U4Wide16Offset4,
    /// 8-bit codes, f16 scale per 32.
    S8,
    /// 8-bit codes, f16 scale and minimum per 32.
    S8Min,
    /// 8-bit codes, f32 scale and minimum per 32.
    S8WideMin,
    /// 8-bit codes, f32 scale per 16.
    S8Wide16,
    /// f32.
    F32,
    /// f16.
    F16,
    /// bf16.
    BF16,
}

/// The shape of a quantized block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Quantized {
    /// Bits per code: 4 (unsigned) or 8 (signed).
    pub(super) bits: usize,
    /// Inputs per scale: 16 or 32.
    pub(super) group: usize,
    /// Scales and minima are f32 instead of f16.
    pub(super) wide: bool,
    /// A minimum follows the scales.
    pub(super) has_minimum: bool,
    /// Subtracted from every code.
    pub(super) offset: i32,
}

impl Layout {
    /// Where weights of this type go.
    pub(super) fn of(dtype: DType) -> Self {
        match dtype {
            DType::Q4_0 => Layout::U4Offset8,
            DType::Q4_1 => Layout::U4Min,
            DType::Q4_K => Layout::U4WideMin,
            DType::Q2_K => Layout::U4Wide16Min,
            DType::Q3_K => Layout::U4Wide16Offset4,
            DType::Q5_0 | DType::Q8_0 | DType::IQ4_NL => Layout::S8,
            DType::Q5_1 => Layout::S8Min,
            DType::Q5_K => Layout::S8WideMin,
            DType::Q6_K => Layout::S8Wide16,
            DType::F32 => Layout::F32,
            DType::F16 => Layout::F16,
            DType::BF16 => Layout::BF16,
        }
    }

    /// The shape of a block; None for float layouts.
    pub(super) fn quantized(self) -> Option<Quantized> {
        let (bits, group, wide, has_minimum, offset) = match self {
            Layout::U4Offset8 => (4, 32, false, false, 8),
            Layout::U4Min => (4, 32, false, true, 0),
            Layout::U4WideMin => (4, 32, true, true, 0),
            Layout::U4Wide16Min => (4, 16, true, true, 0),
            Layout::U4Wide16Offset4 => (4, 16, true, false, 4),
            Layout::S8 => (8, 32, false, false, 0),
            Layout::S8Min => (8, 32, false, true, 0),
            Layout::S8WideMin => (8, 32, true, true, 0),
            Layout::S8Wide16 => (8, 16, true, false, 0),
            Layout::F32 | Layout::F16 | Layout::BF16 => return None,
        };
        Some(Quantized {
            bits,
            group,
            wide,
            has_minimum,
            offset,
        })
    }

    /// Bytes of a panel of `lanes` outputs.
    pub(super) fn panel_bytes(self, lanes: usize, n_in: usize) -> usize {
        match (self, self.quantized()) {
            (_, Some(quantized)) => n_in / BLOCK * quantized.block_bytes(lanes),
            (Layout::F32, None) => 4 * lanes * n_in,
            (_, None) => 2 * lanes * n_in,
        }
    }
}

impl Quantized {
    /// Groups per block.
    pub(super) fn n_groups(&self) -> usize {
        BLOCK / self.group
    }

    fn scale_bytes(&self) -> usize {
        if self.wide { 4 } else { 2 }
    }

    fn codes_bytes(&self, lanes: usize) -> usize {
        lanes * BLOCK * self.bits / 8
    }

    /// Bytes of a block of `lanes` outputs.
    pub(super) fn block_bytes(&self, lanes: usize) -> usize {
        let n_per_group = if self.has_minimum { 2 } else { 1 };
        self.codes_bytes(lanes) + self.n_groups() * n_per_group * self.scale_bytes() * lanes
    }

    /// Where the code of (output, input) lies: byte and shift in bits.
    pub(super) fn code_at(&self, lanes: usize, lane: usize, input: usize) -> (usize, u32) {
        let within = lane * 4 + input % 4;
        if self.bits == 8 {
            (input / 4 * 4 * lanes + within, 0)
        } else {
            (input / 8 * 4 * lanes + within, (input % 8 / 4 * 4) as u32)
        }
    }

    /// Byte where the scale of (output, group) lies.
    pub(super) fn scale_at(&self, lanes: usize, lane: usize, group: usize) -> usize {
        self.codes_bytes(lanes) + (group * lanes + lane) * self.scale_bytes()
    }

    /// Byte where the minimum of (output, group) lies.
    pub(super) fn minimum_at(&self, lanes: usize, lane: usize, group: usize) -> usize {
        self.scale_at(lanes, lane, self.n_groups() + group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_a_block_has_one_meaning() {
        for layout in DType::ALL.map(Layout::of) {
            let Some(quantized) = layout.quantized() else {
                continue;
            };
            for lanes in [8, 16] {
                let mut used_bits = vec![0_u32; quantized.block_bytes(lanes)];
                for lane in 0..lanes {
                    for input in 0..BLOCK {
                        let (byte, shift) = quantized.code_at(lanes, lane, input);
                        used_bits[byte] += ((1 << quantized.bits) - 1) << shift;
                    }
                    for group in 0..quantized.n_groups() {
                        for byte in 0..quantized.scale_bytes() {
                            used_bits[quantized.scale_at(lanes, lane, group) + byte] += 255;
                            if quantized.has_minimum {
                                used_bits[quantized.minimum_at(lanes, lane, group) + byte] += 255;
                            }
                        }
                    }
                }
                assert!(
                    used_bits.iter().all(|&bits| bits == 255),
                    "{layout:?} {lanes}"
                );
            }
        }
    }

    #[test]
    fn demo_types_cost_no_more_than_in_the_file() {
        for dtype in [
            DType::Q4_0,
            DType::Q4_1,
            DType::Q8_0,
            DType::F16,
            DType::F32,
        ] {
            for lanes in [8, 16] {
                let file = dtype.bytes_for(576).expect("whole blocks") as usize * lanes;
                assert_eq!(Layout::of(dtype).panel_bytes(lanes, 576), file, "{dtype}");
            }
        }
    }
}

//! Weights on the device: repacked into planes whose units are 16 bytes, see `kernels/gemm.cu`.
//!
//! Quantized types with a kernel keep their codes; their scales become f16, one rounding where the
//! file has them as products (the K types). All others become f16, and are counted so that the log
//! can say what that costs. Pure functions over bytes; no device here.

use crate::backend::TensorData;
use crate::backend::reference::dequant::{dequantize, scale_and_min_k4};
use crate::dtype::DType;
use half::f16;

/// How a matrix is stored; the numbers are those of `kernels/embed.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Q4 = 0,
    Q8 = 1,
    Q6 = 2,
    F16 = 3,
    BF16 = 4,
}

impl Kind {
    /// Products read int8 activations where rows are few.
    pub(super) fn is_quantized(self) -> bool {
        matches!(self, Self::Q4 | Self::Q8 | Self::Q6)
    }

    /// How a stored type is kept.
    pub(super) fn of(dtype: DType) -> Self {
        match dtype {
            DType::Q4_0 | DType::Q4_1 | DType::Q4_K => Self::Q4,
            DType::Q8_0 => Self::Q8,
            DType::Q6_K => Self::Q6,
            DType::BF16 => Self::BF16,
            _ => Self::F16,
        }
    }
}

/// The planes of one matrix, in host memory.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Planes {
    pub(super) quants: Vec<u8>,
    pub(super) more: Vec<u8>,
    pub(super) scales: Vec<u8>,
}

impl Planes {
    pub(super) fn n_bytes(&self) -> u64 {
        (self.quants.len() + self.more.len() + self.scales.len()) as u64
    }

    fn scale(&mut self, value: f32) {
        self.scales
            .extend_from_slice(&f16::from_f32(value).to_le_bytes());
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Repacks a tensor as [`Kind::of`] its type says.
pub(super) fn repack(tensor: &TensorData<'_>) -> Planes {
    let mut planes = Planes::default();
    let blocks = tensor.bytes.chunks_exact(tensor.dtype.block_bytes());
    match tensor.dtype {
        DType::Q4_0 => blocks.for_each(|block| {
            let scale = half_at(block, 0);
            planes.quants.extend_from_slice(&block[2..18]);
            planes.scale(scale);
            planes.scale(-8.0 * scale);
        }),
        DType::Q4_1 => blocks.for_each(|block| {
            planes.quants.extend_from_slice(&block[4..20]);
            planes.scales.extend_from_slice(&block[..4]);
        }),
        DType::Q4_K => blocks.for_each(|block| q4_k(block, &mut planes)),
        DType::Q8_0 => blocks.for_each(|block| {
            planes.quants.extend_from_slice(&block[2..34]);
            planes.scales.extend_from_slice(&block[..2]);
        }),
        DType::Q6_K => blocks.for_each(|block| q6_k(block, &mut planes)),
        DType::F16 | DType::BF16 => planes.quants.extend_from_slice(tensor.bytes),
        _ => planes.quants = as_f16(tensor),
    }
    planes
}

/// Sub-blocks of 32: the codes of 64 weights share 32 bytes, low nibbles first.
fn q4_k(block: &[u8], planes: &mut Planes) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (scales, codes) = (&block[4..16], &block[16..144]);
    for sub in 0..8 {
        let shift = 4 * (sub % 2);
        let code = |j: usize| codes[sub / 2 * 32 + j] >> shift & 15;
        let nibbles = (0..16).map(|j| code(j) | code(j + 16) << 4);
        planes.quants.extend(nibbles);
        let (scale, min) = scale_and_min_k4(scales, sub);
        planes.scale(d * f32::from(scale));
        planes.scale(-dmin * f32::from(min));
    }
}

/// Sub-blocks of 32 with two scales each; codes of six bits in two planes.
fn q6_k(block: &[u8], planes: &mut Planes) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half_at(block, 208);
    let code = |index: usize| {
        let (half, within) = (index / 128, index % 128);
        let byte = low[half * 64 + within % 64];
        let nibble = if within < 64 { byte & 15 } else { byte >> 4 };
        let top = high[half * 32 + within % 32] >> (2 * (within / 32)) & 3;
        (nibble, top)
    };
    for sub in 0..8 {
        let codes: [(u8, u8); 32] = std::array::from_fn(|j| code(sub * 32 + j));
        let nibbles = (0..16).map(|j| codes[j].0 | codes[j + 16].0 << 4);
        planes.quants.extend(nibbles);
        for half in codes.chunks_exact(16) {
            let bits = half.iter().enumerate().map(|(j, (_, top))| {
                let place = 8 * (j % 4) + 2 * (j / 4);
                u32::from(*top) << place
            });
            let word = bits.fold(0, |word, bits| word | bits);
            planes.more.extend_from_slice(&word.to_le_bytes());
        }
        for half in 0..2 {
            planes.scale(d * f32::from(scales[2 * sub + half] as i8));
        }
    }
}

/// Any type, dequantized and rounded to f16. Values beyond its range are clamped.
fn as_f16(tensor: &TensorData<'_>) -> Vec<u8> {
    let mut values = vec![0.0; tensor.n_in];
    let row_bytes = tensor.n_in / tensor.dtype.block_len() * tensor.dtype.block_bytes();
    let mut out = Vec::with_capacity(2 * tensor.n_out * tensor.n_in);
    for row in tensor.bytes.chunks_exact(row_bytes) {
        dequantize(tensor.dtype, row, &mut values);
        let halves = values
            .iter()
            .map(|value| f16::from_f32(value.clamp(-65504.0, 65504.0)));
        out.extend(halves.flat_map(f16::to_le_bytes));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernels make of the planes (kernels/embed.cu, `table_value`).
    fn value(planes: &Planes, kind: Kind, index: usize) -> f32 {
        let (block, j) = (index / 32, index % 32);
        let scale = |i: usize| half_at(&planes.scales, 2 * i);
        match kind {
            Kind::F16 => half_at(&planes.quants, 2 * index),
            Kind::BF16 => {
                half::bf16::from_le_bytes([planes.quants[2 * index], planes.quants[2 * index + 1]])
                    .to_f32()
            }
            Kind::Q8 => scale(block) * f32::from(planes.quants[index] as i8),
            Kind::Q4 | Kind::Q6 => {
                let q = planes.quants[block * 16 + j % 16] >> (j / 16 * 4) & 15;
                if kind == Kind::Q4 {
                    return scale(2 * block) * f32::from(q) + scale(2 * block + 1);
                }
                let at = 8 * block + j / 16 * 4;
                let word: [u8; 4] = planes.more[at..at + 4].try_into().expect("four bytes");
                let place = 8 * (j % 4) + 2 * (j % 16 / 4);
                let top = (u32::from_le_bytes(word) >> place & 3) as u8;
                scale(2 * block + j / 16) * (f32::from(q | top << 4) - 32.0)
            }
        }
    }

    #[test]
    fn planes_hold_what_the_file_holds() {
        for dtype in DType::ALL {
            let (n_out, n_in) = (3, 512);
            let mut seed = 1_u32;
            let n_bytes = n_out * n_in / dtype.block_len() * dtype.block_bytes();
            let mut bytes: Vec<u8> = (0..n_bytes)
                .map(|_| {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (seed >> 24) as u8
                })
                .collect();
            // Every f16, bf16 or f32 in it small and finite: all odd bytes have few exponent bits.
            bytes.iter_mut().skip(1).step_by(2).for_each(|b| *b &= 0x2f);
            let tensor = TensorData {
                name: "t",
                dtype,
                n_out,
                n_in,
                bytes: &bytes,
            };
            let mut wanted = vec![0.0; n_out * n_in];
            dequantize(dtype, &bytes, &mut wanted);
            let planes = repack(&tensor);
            let greatest = wanted.iter().fold(0.0_f32, |max, v| max.max(v.abs()));
            for (index, wanted) in wanted.iter().enumerate() {
                let found = value(&planes, Kind::of(dtype), index);
                // Two roundings to f16 of numbers no greater than the greatest, or below what f16 knows.
                let error = (found - wanted).abs();
                assert!(
                    error <= greatest / 512.0 + f16::MIN_POSITIVE_SUBNORMAL.to_f32(),
                    "{dtype} {index}: {found} {wanted}"
                );
            }
        }
    }
}

//! Stored blocks taken apart: 32 integer codes with the scale and minimum of each group.
//!
//! Pure functions, used while loading. The formats are facts of GGUF. Every weight is
//! `scale * (code - offset) + minimum` with the layout's offset (`layout.rs`). Nothing is rounded.
//! The float types do not come here.

use half::f16;

use super::layout::BLOCK;
use crate::backend::reference::dequant::IQ4_NL_VALUES;
use crate::dtype::DType;

/// 32 weights of one row.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Codes {
    /// Unsigned 4-bit or signed 8-bit, by the layout.
    pub(super) codes: [i8; BLOCK],
    /// Per group of 16; both the same when the group is 32.
    pub(super) scales: [f32; 2],
    /// Per group, added; 0 without.
    pub(super) minima: [f32; 2],
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Takes apart the 32 weights that start at `32 * part` of the stored block `bytes`.
///
/// `bytes` is one whole block of the type; `part` is below `block_len / 32`.
pub(super) fn take_apart(dtype: DType, bytes: &[u8], part: usize) -> Codes {
    match dtype {
        DType::Q4_0 => nibbles(half_at(bytes, 0), 0.0, &bytes[2..18]),
        DType::Q4_1 => nibbles(half_at(bytes, 0), half_at(bytes, 2), &bytes[4..20]),
        DType::IQ4_NL => {
            let mut block = nibbles(half_at(bytes, 0), 0.0, &bytes[2..18]);
            block.codes = block.codes.map(|code| IQ4_NL_VALUES[code as usize]);
            block
        }
        DType::Q5_0 => {
            let mut block = nibbles(half_at(bytes, 0), 0.0, &bytes[6..22]);
            add_fifth_bit(&mut block.codes, &bytes[2..6]);
            block.codes = block.codes.map(|code| code - 16);
            block
        }
        DType::Q5_1 => {
            let mut block = nibbles(half_at(bytes, 0), half_at(bytes, 2), &bytes[8..24]);
            add_fifth_bit(&mut block.codes, &bytes[4..8]);
            block
        }
        DType::Q8_0 => Codes {
            codes: std::array::from_fn(|i| bytes[2 + i] as i8),
            scales: [half_at(bytes, 0); 2],
            minima: [0.0; 2],
        },
        DType::Q2_K => q2_k(bytes, part),
        DType::Q3_K => q3_k(bytes, part),
        DType::Q4_K => q4_k(bytes, part),
        DType::Q5_K => q5_k(bytes, part),
        DType::Q6_K => q6_k(bytes, part),
        DType::F32 | DType::F16 | DType::BF16 => unreachable!("float types have no codes"),
    }
}

/// Sixteen bytes: the low nibbles are weights 0..16, the high ones 16..32.
fn nibbles(scale: f32, minimum: f32, packed: &[u8]) -> Codes {
    Codes {
        codes: std::array::from_fn(|i| (packed[i % 16] >> (i / 16 * 4) & 15) as i8),
        scales: [scale; 2],
        minima: [minimum; 2],
    }
}

fn add_fifth_bit(codes: &mut [i8; BLOCK], high: &[u8]) {
    for (i, code) in codes.iter_mut().enumerate() {
        *code += ((high[i / 8] >> (i % 8) & 1) << 4) as i8;
    }
}

fn q2_k(bytes: &[u8], part: usize) -> Codes {
    let (scales, packed) = (&bytes[0..16], &bytes[16..80]);
    let (scale, minimum) = (half_at(bytes, 80), half_at(bytes, 82));
    let (half, shift) = (part / 4, 2 * (part % 4));
    Codes {
        codes: std::array::from_fn(|i| (packed[32 * half + i] >> shift & 3) as i8),
        scales: std::array::from_fn(|g| scale * f32::from(scales[2 * part + g] & 15)),
        minima: std::array::from_fn(|g| -(minimum * f32::from(scales[2 * part + g] >> 4))),
    }
}

fn q3_k(bytes: &[u8], part: usize) -> Codes {
    let (high, packed, scales) = (&bytes[0..32], &bytes[32..96], &bytes[96..108]);
    let scale = half_at(bytes, 108);
    let (half, shift) = (part / 4, 2 * (part % 4));
    let six_bits = |idx: usize| {
        let low = if idx < 8 {
            scales[idx] & 15
        } else {
            scales[idx - 8] >> 4
        };
        let top = scales[8 + idx % 4] >> (2 * (idx / 4)) & 3;
        f32::from(i16::from(low | top << 4) - 32)
    };
    Codes {
        codes: std::array::from_fn(|i| {
            let third_bit = (high[i] >> part & 1) << 2;
            (packed[32 * half + i] >> shift & 3 | third_bit) as i8
        }),
        scales: std::array::from_fn(|g| scale * six_bits(2 * part + g)),
        minima: [0.0; 2],
    }
}

/// Scale and minimum number `idx` of the eight 6-bit pairs in twelve bytes.
fn six_bit_pair(packed: &[u8], idx: usize) -> (u8, u8) {
    if idx < 4 {
        (packed[idx] & 63, packed[idx + 4] & 63)
    } else {
        (
            packed[idx + 4] & 15 | packed[idx - 4] >> 6 << 4,
            packed[idx + 4] >> 4 | packed[idx] >> 6 << 4,
        )
    }
}

fn q4_k(bytes: &[u8], part: usize) -> Codes {
    let (scale, minimum) = six_bit_pair(&bytes[4..16], part);
    let packed = &bytes[16..144];
    Codes {
        codes: std::array::from_fn(|i| (packed[part / 2 * 32 + i] >> (part % 2 * 4) & 15) as i8),
        scales: [half_at(bytes, 0) * f32::from(scale); 2],
        minima: [-(half_at(bytes, 2) * f32::from(minimum)); 2],
    }
}

fn q5_k(bytes: &[u8], part: usize) -> Codes {
    let (scale, minimum) = six_bit_pair(&bytes[4..16], part);
    let (high, packed) = (&bytes[16..48], &bytes[48..176]);
    Codes {
        codes: std::array::from_fn(|i| {
            let fifth_bit = (high[i] >> part & 1) << 4;
            (packed[part / 2 * 32 + i] >> (part % 2 * 4) & 15 | fifth_bit) as i8
        }),
        scales: [half_at(bytes, 0) * f32::from(scale); 2],
        minima: [-(half_at(bytes, 2) * f32::from(minimum)); 2],
    }
}

fn q6_k(bytes: &[u8], part: usize) -> Codes {
    let (low, high, scales) = (&bytes[0..128], &bytes[128..192], &bytes[192..208]);
    let scale = half_at(bytes, 208);
    let (half, quarter) = (part / 4, part % 4);
    Codes {
        codes: std::array::from_fn(|i| {
            let four = low[64 * half + 32 * (quarter % 2) + i] >> (quarter / 2 * 4) & 15;
            let two = high[32 * half + i] >> (2 * quarter) & 3;
            (four | two << 4) as i8 - 32
        }),
        scales: std::array::from_fn(|g| scale * f32::from(scales[2 * part + g] as i8)),
        minima: [0.0; 2],
    }
}

//! Dequantization of every stored type, plain and slow: the oracle for all repacked layouts.
//!
//! Pure functions over bytes, no unsafe, no SIMD. Layouts are those of the GGUF specification
//! (ggml block structs, little endian). All types but F32, F16 and BF16 store blocks: the
//! "0" types of 32 weights `d * q`, the "1" types `d * q + m`, the K types super-blocks of 256
//! weights whose sub-blocks of 16 or 32 have their own small integer scales.

use crate::dtype::DType;
use half::{bf16, f16};

/// Code book of IQ4_NL: what the 16 codes stand for, times the block's scale.
pub const IQ4_NL_VALUES: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Dequantizes whole blocks.
///
/// # Panics
/// When `bytes.len() / block_bytes * block_len != out.len()` or `bytes` ends within a block: the
/// caller's bug (containers check sizes).
pub fn dequantize(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    let (block_bytes, block_len) = (dtype.block_bytes(), dtype.block_len());
    assert!(
        bytes.len().is_multiple_of(block_bytes),
        "{dtype}: {} bytes end in a block",
        bytes.len()
    );
    assert_eq!(
        bytes.len() / block_bytes * block_len,
        out.len(),
        "{dtype}: sizes differ"
    );
    let decode: fn(&[u8], &mut [f32]) = match dtype {
        DType::F32 => |b, out| out[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        DType::F16 => |b, out| out[0] = half_at(b, 0),
        DType::BF16 => |b, out| out[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        DType::Q4_0 => q4_0,
        DType::Q4_1 => q4_1,
        DType::Q5_0 => q5_0,
        DType::Q5_1 => q5_1,
        DType::Q8_0 => q8_0,
        DType::Q2_K => q2_k,
        DType::Q3_K => q3_k,
        DType::Q4_K => q4_k,
        DType::Q5_K => q5_k,
        DType::Q6_K => q6_k,
        DType::IQ4_NL => iq4_nl,
    };
    for (block, out) in bytes
        .chunks_exact(block_bytes)
        .zip(out.chunks_exact_mut(block_len))
    {
        decode(block, out);
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// d f16 | 16 bytes: low nibbles are weights 0..16, high nibbles 16..32.
fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (j, &byte) in block[2..18].iter().enumerate() {
        out[j] = d * (f32::from(byte & 15) - 8.0);
        out[j + 16] = d * (f32::from(byte >> 4) - 8.0);
    }
}

/// d f16 | m f16 | nibbles as in Q4_0.
fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (j, &byte) in block[4..20].iter().enumerate() {
        out[j] = d * f32::from(byte & 15) + m;
        out[j + 16] = d * f32::from(byte >> 4) + m;
    }
}

/// The 5-bit codes of weights j and j + 16: nibbles plus bit j and j + 16 of a u32.
fn codes_5_bit(high: &[u8], byte: u8, j: usize) -> (f32, f32) {
    let high = u32::from_le_bytes([high[0], high[1], high[2], high[3]]);
    let bit = |index: usize| ((high >> index) & 1) as u8;
    (
        f32::from((byte & 15) | (bit(j) << 4)),
        f32::from((byte >> 4) | (bit(j + 16) << 4)),
    )
}

/// d f16 | fifth bits u32 | nibbles as in Q4_0.
fn q5_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (j, &byte) in block[6..22].iter().enumerate() {
        let (low, high) = codes_5_bit(&block[2..6], byte, j);
        out[j] = d * (low - 16.0);
        out[j + 16] = d * (high - 16.0);
    }
}

/// d f16 | m f16 | fifth bits u32 | nibbles as in Q4_0.
fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (j, &byte) in block[8..24].iter().enumerate() {
        let (low, high) = codes_5_bit(&block[4..8], byte, j);
        out[j] = d * low + m;
        out[j + 16] = d * high + m;
    }
}

/// d f16 | 32 signed bytes.
fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (value, &byte) in out.iter_mut().zip(&block[2..34]) {
        *value = d * f32::from(byte as i8);
    }
}

/// d f16 | 16 bytes of codes into [`IQ4_NL_VALUES`], nibbles as in Q4_0.
fn iq4_nl(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (j, &byte) in block[2..18].iter().enumerate() {
        out[j] = d * f32::from(IQ4_NL_VALUES[usize::from(byte & 15)]);
        out[j + 16] = d * f32::from(IQ4_NL_VALUES[usize::from(byte >> 4)]);
    }
}

/// 16 bytes (low nibble scale, high nibble min) | 64 bytes of 2-bit codes | d f16 | dmin f16.
/// Each half of 128 weights takes 32 bytes; bits 0-1 of them are its first 32 weights, 2-3 the next.
fn q2_k(block: &[u8], out: &mut [f32]) {
    let (scales, codes) = (&block[..16], &block[16..80]);
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for (index, value) in out.iter_mut().enumerate() {
        let scale = scales[index / 16];
        let (half, within) = (index / 128, index % 128);
        let code = (codes[half * 32 + within % 32] >> (2 * (within / 32))) & 3;
        *value = d * f32::from(scale & 15) * f32::from(code) - dmin * f32::from(scale >> 4);
    }
}

/// The 6-bit scale of sub-block `index` (0..16) of Q3_K, minus 32: four low bits in bytes 0..8,
/// two high bits in bytes 8..12.
fn q3_k_scale(packed: &[u8], index: usize) -> i8 {
    let low = if index < 8 {
        packed[index] & 15
    } else {
        packed[index - 8] >> 4
    };
    let high = (packed[8 + index % 4] >> (2 * (index / 4))) & 3;
    (low | (high << 4)) as i8 - 32
}

/// 32 bytes of third bits | 64 bytes of 2-bit codes as in Q2_K | 12 bytes of scales | d f16.
/// A third bit that is 0 takes 4 off the code.
fn q3_k(block: &[u8], out: &mut [f32]) {
    let (third_bits, codes, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let d = half_at(block, 108);
    for (index, value) in out.iter_mut().enumerate() {
        let (half, within) = (index / 128, index % 128);
        let low = (codes[half * 32 + within % 32] >> (2 * (within / 32))) & 3;
        let has_third_bit = (third_bits[index % 32] >> (index / 32)) & 1 == 1;
        let code = if has_third_bit {
            f32::from(low)
        } else {
            f32::from(low) - 4.0
        };
        *value = d * f32::from(q3_k_scale(scales, index / 16)) * code;
    }
}

/// The 6-bit (scale, min) of sub-block `index` (0..8) of Q4_K and Q5_K, packed into 12 bytes.
#[must_use]
pub fn scale_and_min_k4(packed: &[u8], index: usize) -> (u8, u8) {
    if index < 4 {
        (packed[index] & 63, packed[index + 4] & 63)
    } else {
        let scale = (packed[index + 4] & 15) | ((packed[index - 4] >> 6) << 4);
        let min = (packed[index + 4] >> 4) | ((packed[index] >> 6) << 4);
        (scale, min)
    }
}

/// d f16 | dmin f16 | 12 bytes of scales and mins | 128 bytes: each 32 bytes hold 64 weights, low
/// nibbles the first 32.
fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (scales, codes) = (&block[4..16], &block[16..144]);
    for (index, value) in out.iter_mut().enumerate() {
        let (scale, min) = scale_and_min_k4(scales, index / 32);
        let byte = codes[index / 64 * 32 + index % 32];
        let code = if index % 64 < 32 {
            byte & 15
        } else {
            byte >> 4
        };
        *value = d * f32::from(scale) * f32::from(code) - dmin * f32::from(min);
    }
}

/// d f16 | dmin f16 | scales and mins as in Q4_K | 32 bytes of fifth bits (bit i of byte j is
/// weight 32 i + j) | nibbles as in Q4_K.
fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (scales, fifth_bits, codes) = (&block[4..16], &block[16..48], &block[48..176]);
    for (index, value) in out.iter_mut().enumerate() {
        let (scale, min) = scale_and_min_k4(scales, index / 32);
        let byte = codes[index / 64 * 32 + index % 32];
        let low = if index % 64 < 32 {
            byte & 15
        } else {
            byte >> 4
        };
        let code = low | (((fifth_bits[index % 32] >> (index / 32)) & 1) << 4);
        *value = d * f32::from(scale) * f32::from(code) - dmin * f32::from(min);
    }
}

/// 128 bytes of low nibbles | 64 bytes of 2-bit high parts | 16 signed scales | d f16. Each half of
/// 128 weights takes 64 bytes of nibbles (weights 0..64 low, 64..128 high) and 32 of high parts
/// (bits 0-1 are its first 32 weights, 2-3 the next ..); codes are minus 32.
fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half_at(block, 208);
    for (index, value) in out.iter_mut().enumerate() {
        let (half, within) = (index / 128, index % 128);
        let byte = low[half * 64 + within % 64];
        let nibble = if within < 64 { byte & 15 } else { byte >> 4 };
        let top = (high[half * 32 + within % 32] >> (2 * (within / 32))) & 3;
        let code = f32::from(nibble | (top << 4)) - 32.0;
        *value = d * f32::from(scales[index / 16] as i8) * code;
    }
}

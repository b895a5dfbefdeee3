//! Attention against the oracle: head shapes, page and split borders, windows.

use crate::support::*;
use tinyloop::backend::*;
use tinyloop::dtype::DType;

#[test]
fn contexts_around_page_and_split_borders() {
    for n_tokens in [1, 15, 16, 17, 255, 256, 300] {
        let shape = Shape {
            dtype: DType::F32,
            other_dtype: DType::F16,
            ..SMOL
        };
        check_against_reference(&format!("context {n_tokens}"), shape, n_tokens);
    }
}

#[test]
fn head_shapes_and_windows() {
    for (head_dim, n_heads, n_kv_heads, window) in [
        (64, 3, 1, 0),
        (80, 4, 1, 0),
        (128, 2, 2, 7),
        (32, 8, 2, 20),
        (12, 3, 3, 16),
        (20, 10, 2, 1),
    ] {
        for extras in [false, true] {
            let shape = Shape {
                head_dim,
                n_heads,
                n_kv_heads,
                window,
                extras,
                dtype: DType::F32,
                other_dtype: DType::BF16,
                rope: Some(if extras {
                    RopePairs::Halves
                } else {
                    RopePairs::Interleaved
                }),
                ..SMOL
            };
            check_against_reference(
                &format!("heads {head_dim} {n_heads}/{n_kv_heads}"),
                shape,
                40,
            );
        }
    }
}

#[test]
fn a_long_window_crosses_splits() {
    let shape = Shape {
        window: 270,
        dtype: DType::F32,
        other_dtype: DType::F32,
        ..SMOL
    };
    check_against_reference("window 270", shape, 300);
}

#[test]
fn attention_loses_no_precision_to_quantized_inputs() {
    for dtype in [DType::Q4_0, DType::Q4_1, DType::Q8_0] {
        let shape = Shape {
            dtype,
            other_dtype: DType::F32,
            wide_dtype: Some(DType::F32),
            ..SMOL
        };
        check_against_reference(&format!("{dtype} around attention"), shape, 17);
    }
}

#[test]
fn cache_windows_with_and_without_a_kept_beginning() {
    let window = |tokens, n_kept| CacheWindow { tokens, n_kept };
    for (cache_window, layer) in [
        (window(1, 0), 0),
        (window(20, 16), 0),
        (window(7, 48), 100),
        (window(100, 32), 60),
        (window(33, 272), 0),
        (window(270, 16), 0),
        (window(300, 32), 290),
    ] {
        let shape = Shape {
            cache_window,
            window: layer,
            dtype: DType::F32,
            other_dtype: DType::F32,
            ..SMOL
        };
        check_against_reference(&format!("{cache_window:?} in {layer}"), shape, 310);
    }
}

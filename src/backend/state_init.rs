//! The random state that some looped models start from, as a pure function of (seed, position,
//! coordinate): a counter-based generator.
//!
//! Such models are trained with a fresh random state per token and do not mind which one they get;
//! a server does. Drawn from a counter, a position has the same state in every batch and chunk,
//! after a preemption, behind a prefix hit and in every replica. Integer arithmetic up to one last
//! division, so that every device computes the same bits.

/// Standard normal to a good approximation, within -3..=3: the sum of twelve uniform 16-bit
/// numbers, which has the variance of one uniform number times twelve, that is 1.
#[must_use]
pub fn value(seed: u64, position: u32, coordinate: u32) -> f32 {
    let counter = u64::from(position) << 32 | u64::from(coordinate);
    let mut sum = 0;
    for draw in 0..3_u64 {
        let bits = mixed(mixed(seed ^ mixed(counter)).wrapping_add(draw));
        sum += (0..4)
            .map(|part| (bits >> (16 * part)) as u16)
            .map(i64::from)
            .sum::<i64>();
    }
    // Twelve numbers of 0..=65535 have the mean 6 * 65535.
    let centred = (sum - 6 * 65_535) as f32 / 65_536.0;
    centred.clamp(-3.0, 3.0)
}

/// The finalizer of SplitMix64 after its increment: every input bit changes every output bit.
fn mixed(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_mean_zero_and_variance_one_and_do_not_repeat() {
        let (n_positions, n_coordinates) = (64_u32, 512_u32);
        let n = f64::from(n_positions * n_coordinates);
        let (mut sum, mut squares, mut neighbours) = (0.0, 0.0, 0.0);
        for position in 0..n_positions {
            let row: Vec<f64> = (0..n_coordinates)
                .map(|coordinate| f64::from(value(7, position, coordinate)))
                .collect();
            sum += row.iter().sum::<f64>();
            squares += row.iter().map(|x| x * x).sum::<f64>();
            neighbours += row.windows(2).map(|pair| pair[0] * pair[1]).sum::<f64>();
            assert!(row.iter().all(|x| x.abs() <= 3.0));
        }
        // Four standard errors of each.
        assert!((sum / n).abs() < 4.0 / n.sqrt(), "mean {}", sum / n);
        assert!(
            (squares / n - 1.0).abs() < 6.0 / n.sqrt(),
            "variance {}",
            squares / n
        );
        assert!((neighbours / n).abs() < 4.0 / n.sqrt());
    }

    #[test]
    fn every_argument_counts() {
        let here = value(1, 2, 3);
        assert_eq!(here, value(1, 2, 3));
        assert!(here != value(2, 2, 3) && here != value(1, 3, 3) && here != value(1, 2, 4));
        assert!(value(1, 2, 3) != value(1, 3, 2));
    }
}

//! What a row shows after a loop, as pure functions of its own state: the same on every backend up
//! to the rounding of that state, and the same alone and in a batch.
//!
//! Sums are f64 in one order. What is not here: what follows from a number (`model::exit`).

/// `sigmoid(weight · state + bias)`; both (d_model).
#[must_use]
pub fn gate(weight: &[f32], bias: f32, state: &[f32]) -> f32 {
    let products = weight.iter().zip(state);
    let sum: f64 = products.map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
    (1.0 / (1.0 + (-(sum + f64::from(bias))).exp())) as f32
}

/// `|now - before| / |now|`; both (d_model). Not a number for a state of zeros.
#[must_use]
pub fn change(now: &[f32], before: &[f32]) -> f32 {
    let (mut difference, mut norm) = (0.0_f64, 0.0_f64);
    for (now, before) in now.iter().zip(before) {
        let (now, before) = (f64::from(*now), f64::from(*before));
        difference += (now - before) * (now - before);
        norm += now * now;
    }
    (difference / norm).sqrt() as f32
}

/// Kullback-Leibler divergence `D(now || before)` in nats of the distributions that two rows of
/// logits (vocab_size) stand for; never negative.
#[must_use]
pub fn divergence(now: &[f32], before: &[f32]) -> f32 {
    let highest = |logits: &[f32]| logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (now_max, before_max) = (highest(now), highest(before));
    let (mut now_sum, mut before_sum, mut weighted) = (0.0_f64, 0.0_f64, 0.0_f64);
    for (now, before) in now.iter().zip(before) {
        let weight = f64::from((now - now_max).exp());
        now_sum += weight;
        weighted += weight * (f64::from(*now) - f64::from(*before));
        before_sum += f64::from((before - before_max).exp());
    }
    let now_log = f64::from(now_max) + now_sum.ln();
    let before_log = f64::from(before_max) + before_sum.ln();
    let divergence = weighted / now_sum - (now_log - before_log);
    // Rounding may leave a little less than nothing; what is no number stays so.
    if divergence < 0.0 {
        0.0
    } else {
        divergence as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: f32, wanted: f64) {
        let error = (f64::from(found) - wanted).abs();
        assert!(error <= 1e-6 * wanted.abs().max(1e-3), "{found} {wanted}");
    }

    #[test]
    fn signals_are_what_their_names_say() {
        near(
            gate(&[1.0, -2.0], 0.5, &[3.0, 1.0]),
            1.0 / (1.0 + (-1.5_f64).exp()),
        );
        assert_eq!(gate(&[1.0], 0.0, &[200.0]), 1.0);
        assert_eq!(gate(&[1.0], 0.0, &[-1000.0]), 0.0);
        near(change(&[3.0, 4.0], &[3.0, 3.0]), 0.2);
        assert_eq!(change(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert!(change(&[0.0], &[0.0]).is_nan());
    }

    #[test]
    fn divergence_is_that_of_the_distributions() {
        let (p, q) = ([0.5_f64, 0.25, 0.25], [0.25_f64, 0.25, 0.5]);
        let logits = |p: [f64; 3], shift: f64| p.map(|p| (p.ln() + shift) as f32);
        let wanted: f64 = p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum();
        // Logits of this size are rounded to 8e-6.
        let found = divergence(&logits(p, 7.0), &logits(q, -90.0));
        assert!((f64::from(found) - wanted).abs() < 2e-5, "{found} {wanted}");
        assert_eq!(divergence(&logits(p, 3.0), &logits(p, 3.0)), 0.0);
        assert!(divergence(&logits(p, 0.0), &logits(p, 50.0)) < 1e-5);
        assert!(divergence(&[f32::NAN, 1.0], &[0.0, 1.0]).is_nan());
    }
}

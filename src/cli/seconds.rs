//! Lengths of time on the command line: seconds, with a fraction if wanted.

use std::time::Duration;

/// Parses one; for `value_parser`.
///
/// # Errors
/// What is no number of seconds that a wait can have: words, negative numbers, `inf` and `nan`.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text
        .parse()
        .map_err(|_| format!("\"{text}\" is no number of seconds"))?;
    Duration::try_from_secs_f64(number)
        .map_err(|_| format!("{text} seconds are no wait; give a number from 0 on"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_finite_times_from_zero_on_are_taken() {
        assert_eq!(seconds("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(seconds("0"), Ok(Duration::ZERO));
        for bad in ["nan", "inf", "-inf", "-1", "1e300", "", "soon", "1s"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}

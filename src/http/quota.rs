//! Requests and tokens per minute of one key.
//!
//! [`Bucket`] is pure: it is told what time it is. A [`Quota`] holds the two buckets of a key behind
//! one short lock and is shared by all workers that answer that key. Tokens are reserved when a
//! request is admitted, by its prompt and the longest answer it may get, and corrected when the answer
//! has ended; what was reserved and not used is there again at once. What is not here: who asks
//! (`access`), and the limits inside one model's queue (`scheduler`).

use super::errors::{ApiError, ErrorCode};
use crate::config::KeyLimits;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);

/// So many per minute: full at the start, refilled evenly, never above a minute's worth.
#[derive(Clone, Debug)]
pub struct Bucket {
    per_minute: u32,
    /// What is left as of `at`; below 0 where more was used than reserved.
    level: f64,
    at: Instant,
}

/// Why nothing was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Enough is there after this time, if nobody else takes it.
    Wait(Duration),
    /// It is more than a whole minute's worth.
    TooMuch,
}

impl Bucket {
    /// A full one.
    #[must_use]
    pub fn new(per_minute: u32, now: Instant) -> Self {
        Self {
            per_minute,
            level: f64::from(per_minute),
            at: now,
        }
    }

    fn level_at(&self, now: Instant) -> f64 {
        let most = f64::from(self.per_minute);
        let elapsed = now.saturating_duration_since(self.at);
        (self.level + most * elapsed.as_secs_f64() / MINUTE.as_secs_f64()).min(most)
    }

    /// Takes all of it or nothing.
    ///
    /// # Errors
    /// When it would be there.
    pub fn take(&mut self, count: u64, now: Instant) -> Result<(), Refused> {
        if count > u64::from(self.per_minute) {
            return Err(Refused::TooMuch);
        }
        let level = self.level_at(now);
        let missing = count as f64 - level;
        if missing > 0.0 {
            return Err(Refused::Wait(self.time_for(missing)));
        }
        (self.level, self.at) = (-missing, now);
        Ok(())
    }

    /// Corrects what was taken: `used` instead of `reserved`.
    pub fn correct(&mut self, reserved: u64, used: u64, now: Instant) {
        let level = self.level_at(now) + reserved as f64 - used as f64;
        (self.level, self.at) = (level.min(f64::from(self.per_minute)), now);
    }

    /// What could be taken now.
    #[must_use]
    pub fn remaining(&self, now: Instant) -> u64 {
        self.level_at(now).max(0.0) as u64
    }

    /// Until it is full again.
    #[must_use]
    pub fn until_full(&self, now: Instant) -> Duration {
        self.time_for(f64::from(self.per_minute) - self.level_at(now))
    }

    fn time_for(&self, count: f64) -> Duration {
        MINUTE.mul_f64((count / f64::from(self.per_minute.max(1))).max(0.0))
    }
}

/// The buckets of one key; None where it is not limited.
#[derive(Debug)]
struct Buckets {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
}

/// See the module.
#[derive(Debug)]
pub struct Quota {
    /// Guards both; held for arithmetic only.
    buckets: Mutex<Buckets>,
}

/// Tokens taken for a request that has not ended. Dropped without [`Reservation::settle`] it gives
/// all of them back.
#[derive(Debug)]
pub struct Reservation {
    quota: Arc<Quota>,
    reserved: u64,
}

impl Quota {
    /// The buckets that `limits` asks for, full; None where it asks for none.
    #[must_use]
    pub fn new(limits: &KeyLimits, now: Instant) -> Option<Self> {
        let bucket = |per_minute: Option<u32>| per_minute.map(|most| Bucket::new(most, now));
        let requests = bucket(limits.requests_per_minute);
        let tokens = bucket(limits.tokens_per_minute);
        let is_limited = requests.is_some() || tokens.is_some();
        is_limited.then(|| Self {
            buckets: Mutex::new(Buckets { requests, tokens }),
        })
    }

    /// Counts a request.
    ///
    /// # Errors
    /// 429, with the time after which one more is there.
    pub fn count_request(&self, now: Instant) -> Result<(), ApiError> {
        let mut buckets = self.buckets.lock();
        let Some(bucket) = &mut buckets.requests else {
            return Ok(());
        };
        bucket
            .take(1, now)
            .map_err(|why| refusal("requests", bucket, 1, why, now))
    }

    /// Takes tokens for prompts of `prompt_tokens` and answers of at most `answer_tokens`. What is more than
    /// a minute's worth only by its longest answer waits for a full bucket.
    ///
    /// # Errors
    /// 429, with the time after which they are there, or without hope where the prompts alone are too many.
    pub fn reserve(
        self: &Arc<Self>,
        prompt_tokens: u64,
        answer_tokens: u64,
        now: Instant,
    ) -> Result<Option<Reservation>, ApiError> {
        let mut buckets = self.buckets.lock();
        let Some(bucket) = &mut buckets.tokens else {
            return Ok(None);
        };
        let most = u64::from(bucket.per_minute).max(prompt_tokens);
        let reserved = prompt_tokens.saturating_add(answer_tokens).min(most);
        bucket
            .take(reserved, now)
            .map_err(|why| refusal("tokens", bucket, reserved, why, now))?;
        Ok(Some(Reservation {
            quota: Arc::clone(self),
            reserved,
        }))
    }

    /// OpenAI's `x-ratelimit-*` headers of this moment.
    #[must_use]
    pub fn headers(&self, now: Instant) -> Vec<(&'static str, String)> {
        let buckets = self.buckets.lock();
        let names = [
            [
                "x-ratelimit-limit-requests",
                "x-ratelimit-remaining-requests",
                "x-ratelimit-reset-requests",
            ],
            [
                "x-ratelimit-limit-tokens",
                "x-ratelimit-remaining-tokens",
                "x-ratelimit-reset-tokens",
            ],
        ];
        let mut headers = Vec::with_capacity(6);
        for ([limit, remaining, reset], bucket) in
            names.into_iter().zip([&buckets.requests, &buckets.tokens])
        {
            let Some(bucket) = bucket else { continue };
            headers.push((limit, bucket.per_minute.to_string()));
            headers.push((remaining, bucket.remaining(now).to_string()));
            headers.push((reset, short_duration(bucket.until_full(now))));
        }
        headers
    }
}

impl Reservation {
    /// The answer has ended, and so many tokens were used.
    pub fn settle(mut self, used: u64, now: Instant) {
        let reserved = std::mem::take(&mut self.reserved);
        self.correct(reserved, used, now);
    }

    fn correct(&self, reserved: u64, used: u64, now: Instant) {
        if let Some(bucket) = &mut self.quota.buckets.lock().tokens {
            bucket.correct(reserved, used, now);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.reserved > 0 {
            self.correct(self.reserved, 0, Instant::now());
        }
    }
}

fn refusal(kind: &str, bucket: &Bucket, wanted: u64, why: Refused, now: Instant) -> ApiError {
    let (limit, remaining) = (bucket.per_minute, bucket.remaining(now));
    let numbers = vec![
        ("limit_per_minute", f64::from(limit)),
        ("remaining", remaining as f64),
        ("wanted", wanted as f64),
    ];
    let (text, retry_after_s) = match why {
        Refused::Wait(wait) => {
            let seconds = u32::try_from(wait.as_secs()).unwrap_or(u32::MAX);
            let seconds = seconds + u32::from(wait.subsec_nanos() > 0);
            let text = format!(
                "this key may use {limit} {kind} per minute and has {remaining} left; this request needs \
                 {wanted}, which are there in {}",
                short_duration(wait)
            );
            (text, Some(seconds.max(1)))
        }
        Refused::TooMuch => {
            let text = format!(
                "this key may use {limit} {kind} per minute, and this request alone needs {wanted}"
            );
            (text, None)
        }
    };
    ApiError {
        retry_after_s,
        is_hopeless: why == Refused::TooMuch,
        numbers,
        ..ApiError::new(ErrorCode::RateLimitExceeded, text)
    }
}

/// As OpenAI writes it: `120ms`, `1.5s`, `6m0s`. Rounded up to milliseconds.
fn short_duration(duration: Duration) -> String {
    let ms = duration.as_nanos().div_ceil(1_000_000) as u64;
    let seconds = |ms: u64| match (ms / 1000, ms % 1000) {
        (whole, 0) => format!("{whole}s"),
        (whole, rest) => {
            format!("{whole}.{rest:03}")
                .trim_end_matches('0')
                .to_owned()
                + "s"
        }
    };
    match ms {
        0..1000 => format!("{ms}ms"),
        1000..60_000 => seconds(ms),
        _ => format!("{}m{}", ms / 60_000, seconds(ms % 60_000)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{Clock, ManualClock};
    use proptest::prelude::*;

    fn tokens(per_minute: u32, now: Instant) -> Arc<Quota> {
        let limits = KeyLimits {
            tokens_per_minute: Some(per_minute),
            ..KeyLimits::default()
        };
        Arc::new(Quota::new(&limits, now).expect("it is limited"))
    }

    #[test]
    fn a_bucket_refills_evenly_and_says_when_there_is_enough() {
        let clock = ManualClock::new();
        let mut bucket = Bucket::new(60, clock.now());
        assert_eq!(bucket.take(61, clock.now()), Err(Refused::TooMuch));
        assert_eq!(bucket.take(60, clock.now()), Ok(()));
        assert_eq!(bucket.until_full(clock.now()), MINUTE);
        let wait = Refused::Wait(Duration::from_secs(3));
        assert_eq!(bucket.take(3, clock.now()), Err(wait));
        clock.advance(Duration::from_millis(2500));
        assert_eq!(bucket.remaining(clock.now()), 2);
        clock.advance(Duration::from_millis(500));
        assert_eq!(bucket.take(3, clock.now()), Ok(()));
        assert_eq!(bucket.remaining(clock.now()), 0);
        clock.advance(Duration::from_secs(600));
        assert_eq!(
            bucket.remaining(clock.now()),
            60,
            "no more than a minute's worth"
        );
    }

    #[test]
    fn reserved_tokens_are_corrected_when_the_answer_ends() {
        let clock = ManualClock::new();
        let quota = tokens(100, clock.now());
        let left = || quota.headers(clock.now())[1].1.clone();
        let held = quota.reserve(10, 50, clock.now()).expect("there are 100");
        assert_eq!(left(), "40");
        held.expect("limited").settle(15, clock.now());
        assert_eq!(left(), "85");
        // Longer than a minute's worth only by its longest answer: the whole bucket, when it is full.
        let error = quota.reserve(10, 9000, clock.now()).expect_err("not full");
        assert_eq!((error.status(), error.retry_after_s), (429, Some(9)));
        assert_eq!(error.headers()[0], ("retry-after", "9".to_owned()));
        clock.advance(Duration::from_secs(9));
        let held = quota.reserve(10, 9000, clock.now()).expect("full");
        held.expect("limited").settle(130, clock.now());
        assert_eq!(left(), "0", "30 more than there were");
        clock.advance(Duration::from_secs(18));
        assert_eq!(left(), "0");
        clock.advance(Duration::from_secs(6));
        assert_eq!(left(), "10");
        let error = quota.reserve(101, 1, clock.now()).expect_err("never");
        assert!(
            error.is_hopeless && error.retry_after_s.is_none(),
            "{error:?}"
        );
        drop(quota.reserve(1, 1, clock.now()).expect("there are 10"));
        assert!(
            left().parse::<u32>().expect("a number") >= 10,
            "all is back"
        );
    }

    #[test]
    fn headers_have_openais_names_and_durations() {
        let clock = ManualClock::new();
        let limits = KeyLimits {
            requests_per_minute: Some(1),
            ..KeyLimits::default()
        };
        let quota = Quota::new(&limits, clock.now()).expect("limited");
        quota.count_request(clock.now()).expect("the first");
        let error = quota.count_request(clock.now()).expect_err("the second");
        assert_eq!(error.retry_after_s, Some(60));
        let expected = [
            ("x-ratelimit-limit-requests", "1".to_owned()),
            ("x-ratelimit-remaining-requests", "0".to_owned()),
            ("x-ratelimit-reset-requests", "1m0s".to_owned()),
        ];
        assert_eq!(quota.headers(clock.now()), expected);
        assert!(Quota::new(&KeyLimits::default(), clock.now()).is_none());
        for (ms, text) in [
            (0, "0ms"),
            (17, "17ms"),
            (1000, "1s"),
            (1500, "1.5s"),
            (8640, "8.64s"),
            (59_999, "59.999s"),
            (360_000, "6m0s"),
            (61_050, "1m1.05s"),
        ] {
            assert_eq!(short_duration(Duration::from_millis(ms)), text);
        }
    }

    proptest! {
        /// Whatever is asked when: never more than a minute's worth and what has flowed in since; and who
        /// waits as long as it was told gets what it asked.
        #[test]
        fn a_bucket_never_gives_more_than_flowed_in(
            per_minute in 1_u32..1000,
            asks in prop::collection::vec((0_u64..1200, 0_u64..30_000), 1..60),
        ) {
            let clock = ManualClock::new();
            let start = clock.now();
            let mut bucket = Bucket::new(per_minute, start);
            let mut taken = 0;
            for (count, pause_ms) in asks {
                clock.advance(Duration::from_millis(pause_ms));
                match bucket.take(count, clock.now()) {
                    Ok(()) => taken += count,
                    Err(Refused::TooMuch) => prop_assert!(count > u64::from(per_minute)),
                    Err(Refused::Wait(wait)) => {
                        let mut later = bucket.clone();
                        let then = clock.now() + wait + Duration::from_micros(1);
                        prop_assert_eq!(later.take(count, then), Ok(()));
                    }
                }
                let minutes = clock.now().duration_since(start).as_secs_f64() / 60.0;
                prop_assert!(taken as f64 <= f64::from(per_minute) * (1.0 + minutes) + 1e-6);
            }
        }
    }
}

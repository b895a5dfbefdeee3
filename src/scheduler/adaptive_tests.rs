//! The search for the knee against an upstream that has a known one: `knee` jobs at full speed, more share
//! the same speed. Time is made up; jobs have different lengths.

use super::*;
use std::time::Duration;

/// An upstream with a queue of work that never ends before it.
struct Upstream {
    knee: f64,
    /// Jobs beyond so many are refused.
    most: usize,
    /// Tokens left of each job, and its length.
    jobs: Vec<(f64, u64)>,
    now: Instant,
    seed: u64,
}

/// Tokens per second of a job that is not slowed down.
const SPEED: f64 = 50.0;

impl Upstream {
    fn new(knee: f64) -> Self {
        Self {
            knee,
            most: usize::MAX,
            jobs: Vec::new(),
            now: Instant::now(),
            seed: 1,
        }
    }

    fn random_length(&mut self) -> u64 {
        self.seed = self
            .seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        50 + (self.seed >> 33) % 100
    }

    /// Keeps the limit filled until so many jobs have ended; returns the limits seen.
    fn serve(&mut self, adaptive: &mut Adaptive, n_completions: usize) -> Vec<u32> {
        let mut limits = Vec::new();
        for _ in 0..n_completions {
            while self.jobs.len() < adaptive.limit() as usize {
                if self.jobs.len() >= self.most {
                    adaptive.overloaded();
                    break; // its replica pauses
                }
                let length = self.random_length();
                self.jobs.push((length as f64, length));
            }
            self.complete_one(adaptive);
            limits.push(adaptive.limit());
        }
        limits
    }

    fn complete_one(&mut self, adaptive: &mut Adaptive) {
        let speed = SPEED * (self.knee / self.jobs.len() as f64).min(1.0);
        let shortest = self.jobs.iter().map(|job| job.0).fold(f64::MAX, f64::min);
        for job in &mut self.jobs {
            job.0 -= shortest;
        }
        self.now += Duration::from_secs_f64(shortest / speed);
        let index = self.jobs.iter().position(|job| job.0 <= 0.0);
        let n_inflight = self.jobs.len() as u32;
        let (_, length) = self
            .jobs
            .swap_remove(index.expect("the shortest has ended"));
        adaptive.completed(length, n_inflight, self.now);
    }
}

fn mean(limits: &[u32]) -> f64 {
    limits.iter().map(|&limit| f64::from(limit)).sum::<f64>() / limits.len() as f64
}

/// The limit after it had time to settle, averaged over the experiments.
fn settled(upstream: &mut Upstream, adaptive: &mut Adaptive) -> f64 {
    upstream.serve(adaptive, 4000);
    mean(&upstream.serve(adaptive, 4000))
}

#[test]
fn it_finds_the_knee_from_below_and_from_above() {
    for knee in [1.0, 2.0, 5.0, 12.0, 30.0] {
        let mut upstream = Upstream::new(knee);
        let mut adaptive = Adaptive::new(64);
        let from_below = settled(&mut upstream, &mut adaptive);
        let mut from_high = Adaptive::new(64);
        from_high.limit = 64;
        from_high.go(64, Phase::Base);
        let from_above = settled(&mut Upstream::new(knee), &mut from_high);
        for found in [from_below, from_above] {
            let error = (found - knee).abs();
            assert!(error <= 1.0 + 0.2 * knee, "{found} for a knee at {knee}");
        }
    }
}

#[test]
fn it_follows_a_knee_that_moves() {
    let mut upstream = Upstream::new(24.0);
    let mut adaptive = Adaptive::new(100);
    for knee in [24.0, 6.0, 40.0, 3.0, 24.0] {
        upstream.knee = knee;
        let found = settled(&mut upstream, &mut adaptive);
        let error = (found - knee).abs();
        assert!(error <= 1.0 + 0.2 * knee, "{found} for a knee at {knee}");
    }
}

#[test]
fn it_stays_within_one_and_the_maximum() {
    let mut upstream = Upstream::new(50.0);
    let mut adaptive = Adaptive::new(7);
    let limits = upstream.serve(&mut adaptive, 2000);
    assert_eq!(limits.iter().max(), Some(&7));
    assert!(mean(&limits[1000..]) > 6.0);
    let mut upstream = Upstream::new(0.1);
    let limits = upstream.serve(&mut adaptive, 2000);
    assert_eq!(limits.iter().min(), Some(&1));
    adaptive.restart(3);
    assert!(adaptive.limit() <= 3);
    for _ in 0..100 {
        adaptive.overloaded();
        assert!(adaptive.limit() >= 1, "it never starves");
    }
    adaptive.restart(0);
    assert_eq!(adaptive.limit(), 1);
}

#[test]
fn an_upstream_that_refuses_is_used_up_to_its_limit() {
    let mut upstream = Upstream::new(1e9); // no latency tells
    upstream.most = 10;
    let mut adaptive = Adaptive::new(64);
    upstream.serve(&mut adaptive, 2000);
    let limits = upstream.serve(&mut adaptive, 4000);
    let found = mean(&limits);
    assert!((7.0..=11.5).contains(&found), "{found}");
    assert!(limits.iter().all(|&limit| limit <= 20));
}

#[test]
fn an_idle_model_keeps_what_it_found() {
    let mut upstream = Upstream::new(8.0);
    let mut adaptive = Adaptive::new(64);
    upstream.serve(&mut adaptive, 3000);
    let before = adaptive.limit();
    for ms in 0..1000 {
        let now = upstream.now + Duration::from_millis(ms);
        adaptive.completed(100, 1, now);
    }
    assert!(before > 1);
    assert_eq!(adaptive.limit(), before);
}

impl Upstream {
    /// Keeps the limit filled for so many seconds with jobs of minutes, looking at them twice a second; the
    /// limits seen, one per look. A job brings nothing for its first two seconds.
    fn serve_long(&mut self, adaptive: &mut Adaptive, seconds: u32) -> Vec<u32> {
        const LOOK_S: f64 = 0.5;
        let (mut limits, mut n_ended_tokens) = (Vec::new(), 0.0);
        for _ in 0..2 * seconds {
            while self.jobs.len() < adaptive.limit() as usize {
                let length = 60 * self.random_length(); // a minute to three, at full speed
                self.jobs.push((length as f64 + 2.0 * SPEED, length));
            }
            let speed = SPEED * (self.knee / self.jobs.len() as f64).min(1.0);
            self.now += Duration::from_secs_f64(LOOK_S);
            let mut n_jobs = self.jobs.len() as u32;
            for job in &mut self.jobs {
                job.0 -= speed * LOOK_S;
            }
            for job in self.jobs.extract_if(.., |job| job.0 <= 0.0) {
                adaptive.completed(job.1, n_jobs, self.now);
                n_jobs -= 1;
                n_ended_tokens += job.1 as f64;
            }
            let brought = self.jobs.iter().map(|job| job.1 as f64 - job.0);
            let brought: Vec<f64> = brought.filter(|n| *n > 0.0).collect();
            let glance = Glance {
                n_jobs,
                n_begun: brought.len() as u32,
                n_tokens: (n_ended_tokens + brought.iter().sum::<f64>()) as u64,
            };
            // As the driver does: free places are filled before the next look.
            if self.jobs.len() >= adaptive.limit() as usize {
                adaptive.progressed(glance, self.now);
            }
            limits.push(adaptive.limit());
        }
        limits
    }
}

/// Of requests that take minutes not even one need end for the first step, nor some dozens for the climb.
#[test]
fn the_climb_happens_with_long_requests_too() {
    for knee in [4.0, 12.0, 30.0] {
        let mut upstream = Upstream::new(knee);
        let mut adaptive = Adaptive::new(64);
        let limits = upstream.serve_long(&mut adaptive, 30);
        assert!(limits.iter().any(|&limit| limit > 1), "a step in 30 s");
        let limits = upstream.serve_long(&mut adaptive, 150);
        let most = limits.iter().max().expect("some");
        assert!(f64::from(*most) >= 0.8 * knee, "{most} for {knee} in 3 min");
        upstream.serve_long(&mut adaptive, 1200);
        let found = mean(&upstream.serve_long(&mut adaptive, 2400));
        let error = (found - knee).abs();
        assert!(error <= 1.5 + 0.3 * knee, "{found} for a knee at {knee}");
    }
}

#[test]
fn long_requests_that_do_not_fill_the_limit_change_nothing() {
    let mut adaptive = Adaptive::new(64);
    let start = Instant::now();
    adaptive.limit = 8;
    adaptive.go(8, Phase::Base);
    for seconds in 0..600_u32 {
        let glance = Glance {
            n_jobs: 3,
            n_begun: 3,
            n_tokens: u64::from(seconds) * 1000,
        };
        adaptive.progressed(glance, start + Duration::from_secs(seconds.into()));
    }
    assert_eq!(adaptive.limit(), 8);
}

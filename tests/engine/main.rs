//! The engine against itself: whatever happens around a sequence (neighbours, chunks, cache hits,
//! preemption, cancels, other depths), it must give the tokens and log-probabilities that it gives
//! alone, bit for bit. Everything runs on tiny random models and the reference backend; most tests
//! call `Engine::step` by hand, so that each quantum is under control.

mod arbiter;
mod batching;
mod constraint;
mod dense;
mod embeddings;
mod encoders;
mod exits;
mod faults;
mod generation;
mod looped;
mod parking;
mod prefix;
mod random;
mod steered;
mod support;
mod window;

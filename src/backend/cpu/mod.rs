//! The CPU backend. (stub: being written)

//! The request scheduler. (stub: being written)

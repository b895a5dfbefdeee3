//! The data plane's connection layer. (stub: being written)

//! The `tinyloop` binary: calls the library's command line. (stub: being written)
fn main() {}

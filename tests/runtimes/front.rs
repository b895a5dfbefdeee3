//! The whole way: clients of a `tinyloop serve` whose models other programs run.

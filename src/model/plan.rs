//! Segments and virtual layers: the only file that knows loops. (stub)

/// How a model's segments run and where their KV lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Blocks before the loop, `[start, end)` of the file's blocks.
    pub prelude: std::ops::Range<u32>,
    /// Blocks of the loop.
    pub core: std::ops::Range<u32>,
    /// Blocks after the loop.
    pub coda: std::ops::Range<u32>,
    /// Loops a request gets when it asks for none; 1 for ordinary models.
    pub default_loops: u32,
    /// Most loops a request may ask for.
    pub max_loops: u32,
}

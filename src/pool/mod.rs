//! The models this server has. (stub: being written)

//! GGUF files: what a sound one gives back, what is said about a faulty one, and that no bytes at
//! all make the reader panic, read outside the file or allocate without measure.

#[path = "../common/gguf_writer.rs"]
mod gguf_writer;

mod allocation;
mod faults;
mod mutants;
mod on_disk;
mod sound;
mod support;

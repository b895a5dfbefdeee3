//! The `tinyloop` binary: everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    tinyloop::heap::configure();
    tinyloop::cli::main()
}

//! The program `plimsoll`; everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Jailed helpers are this program under another first argument. They must come up before any thread, allocation-heavy
    // parser or runtime exists.
    plimsoll::cli::main(std::env::args_os()).into()
}

//! The program `plimsoll`; everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Jailed helpers and the launcher are this program under another first argument. They must come up before any
    // thread, parser or runtime exists.
    plimsoll::internal_entry().unwrap_or_else(|| plimsoll::cli::main(std::env::args_os()).into())
}

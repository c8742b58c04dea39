//! The `plimsoll` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(code) = plimsoll::backend::jail::internal_entry(plimsoll::INTERNAL_ENTRIES) {
        return code;
    }
    ExitCode::SUCCESS
}

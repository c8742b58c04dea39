//! `plimsoll completions SHELL`.

use clap::Args;
use clap_complete::Shell;

use super::failure::Failure;
use super::output::Log;
use crate::exit::Exit;

/// Arguments.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    pub shell: Shell,
}

/// Prints the script.
pub fn completions(args: &CompletionsArgs) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut super::command(), "plimsoll", &mut script);
    Log::data().text(&String::from_utf8_lossy(&script));
    Ok(Exit::Passed)
}

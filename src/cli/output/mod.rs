//! What people see: the live log, the result lines, and where each of them goes.
//!
//! Data goes to standard output, everything else to standard error. One exception: the runner of GitHub Actions reads the
//! two streams apart and mixes their lines up, and a guest's text must stay between the lines that guard it; there the
//! log goes to standard output as well.
//!
//! A reader that went away (a closed pipe) stops the printing, never the run.

use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;

use crate::env::{Env, Var};
use crate::text::LogTarget;

pub mod github;
pub mod live;
pub mod result;
pub mod style;

pub use style::Style;

/// Who reads the log.
#[must_use]
pub fn log_target(env: &Env) -> LogTarget {
    if env.is_true(Var::GithubActions) {
        LogTarget::GitHub
    } else if env.is_true(Var::GitlabCi) {
        LogTarget::GitLab
    } else {
        LogTarget::Plain
    }
}

/// Whether a person watches a stream that can show more than plain lines.
#[must_use]
pub fn is_interactive(env: &Env, stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && !env.in_ci() && env.text(Var::Term) != Some("dumb")
}

/// Where lines of the log go.
pub struct Log {
    out: Box<dyn Write + Send>,
    gone: bool,
    /// It is what the command was asked for, so that losing it is a fault.
    data: bool,
}

/// Why data could not be written, if it could not; a reader that went away is no fault.
static LOST: OnceLock<io::Error> = OnceLock::new();

/// What became of the data on standard output.
#[must_use]
pub fn lost() -> Option<&'static io::Error> {
    LOST.get()
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log").field("gone", &self.gone).finish_non_exhaustive()
    }
}

impl Log {
    /// Standard error, or standard output under GitHub.
    #[must_use]
    pub fn for_target(target: LogTarget) -> Self {
        match target {
            LogTarget::GitHub => Self::to(io::stdout()),
            LogTarget::Plain | LogTarget::GitLab => Self::to(io::stderr()),
        }
    }

    /// Standard output.
    #[must_use]
    pub fn data() -> Self {
        Self { data: true, ..Self::to(io::stdout()) }
    }

    /// Anything else.
    pub fn to(out: impl Write + Send + 'static) -> Self {
        Self { out: Box::new(out), gone: false, data: false }
    }

    /// Prints a line, unless the reader is gone.
    pub fn line(&mut self, line: &str) {
        self.text(&format!("{line}\n"));
    }

    /// Prints text as it is.
    pub fn text(&mut self, text: &str) {
        if self.gone {
            return;
        }
        if let Err(error) = self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush()) {
            self.gone = true;
            if self.data && error.kind() != io::ErrorKind::BrokenPipe {
                let _ = LOST.set(error);
            }
        }
    }
}

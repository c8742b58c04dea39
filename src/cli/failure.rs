//! Errors as a person reads them: `error: …`, its causes, and one `help:` line.
//!
//! This is the only place that prints an error. In a job of GitHub's, each also becomes an annotation, at its file and
//! line where it has them.

use std::error::Error;
use std::path::{Path, PathBuf};

use crate::env::{Env, Var};
use crate::exit::Exit;
use crate::spec::{PolicyRefusal, SpecError};
use crate::text::{LogTarget, Untrusted};

/// Longest message shown, bytes. Messages repeat at most a few words of a file; this is a second bound.
const MAX_MESSAGE: usize = 4096;
/// Most causes shown.
const MAX_CAUSES: usize = 8;

/// Why a command ends without having done its work.
#[derive(Debug)]
pub struct Failure {
    /// What the process exits with.
    pub exit: Exit,
    /// The message, and its causes after it.
    messages: Vec<String>,
    /// What to do, one line.
    help: Option<String>,
    /// File and line, where the fault is in a file.
    place: Option<(PathBuf, Option<usize>)>,
}

impl Failure {
    /// A failure with a message of our own.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, messages: vec![message.into()], help: None, place: None }
    }

    /// A command that was not understood.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// From an error with its causes.
    pub fn from_error(exit: Exit, error: &(dyn Error + 'static)) -> Self {
        let mut messages: Vec<String> = Vec::new();
        let mut next = Some(error);
        while let Some(error) = next.filter(|_| messages.len() < MAX_CAUSES) {
            let message = error.to_string();
            // Some errors repeat their cause in their own text.
            if !messages.last().is_some_and(|before| before.ends_with(&message)) {
                messages.push(message);
            }
            next = error.source();
        }
        Self { exit, messages, help: None, place: None }
    }

    /// Adds what to do.
    #[must_use]
    pub fn with_help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// The message and its causes, in one line.
    #[must_use]
    pub fn message(&self) -> String {
        self.messages.join(": ")
    }

    /// What to do.
    #[must_use]
    pub fn help(&self) -> Option<&str> {
        self.help.as_deref()
    }

    /// The lines for people.
    #[must_use]
    pub fn lines(&self, target: LogTarget) -> Vec<String> {
        let clean = |text: &str| Untrusted::new(text).for_log_line(target, MAX_MESSAGE);
        let labels = std::iter::once("error").chain(std::iter::repeat("  caused by"));
        let mut lines: Vec<_> =
            labels.zip(&self.messages).map(|(label, message)| format!("{label}: {}", clean(message))).collect();
        lines.extend(self.help.as_deref().map(|help| format!("help: {}", clean(help))));
        lines
    }

    /// The annotation for GitHub.
    #[must_use]
    pub fn annotation(&self, workspace: Option<&Path>) -> String {
        annotation(
            &self.message(),
            self.help.as_deref(),
            self.place.as_ref().map(|(f, l)| (f.as_path(), *l)),
            workspace,
        )
    }

    /// Prints the failure to standard error, or to standard output where GitHub's runner would mix the two up.
    pub fn print(&self, env: &Env) {
        let target = super::output::log_target(env);
        let mut log = super::output::Log::for_target(target);
        for line in self.lines(target) {
            log.line(&line);
        }
        if target == LogTarget::GitHub {
            log.line(&self.annotation(env.path(Var::GithubWorkspace).as_deref()));
        }
    }
}

/// An `::error` line: the message with its help, at a file of the checkout if it is in one.
#[must_use]
pub fn annotation(
    message: &str,
    help: Option<&str>,
    place: Option<(&Path, Option<usize>)>,
    workspace: Option<&Path>,
) -> String {
    let mut properties = vec!["title=plimsoll".to_owned()];
    if let Some((file, line)) = place {
        let shown = workspace.and_then(|w| file.strip_prefix(w).ok()).unwrap_or(file);
        properties.push(format!("file={}", Untrusted::new(&*shown.to_string_lossy()).for_workflow_property(512)));
        properties.extend(line.map(|line| format!("line={line}")));
    }
    let text = match help {
        Some(help) => format!("{message}\nhelp: {help}"),
        None => message.to_owned(),
    };
    format!("::error {}::{}", properties.join(","), Untrusted::new(text).for_workflow_command(MAX_MESSAGE))
}

/// A `::notice` or `::warning` line without a place.
#[must_use]
pub fn command(level: &str, message: &str) -> String {
    format!("::{level} title=plimsoll::{}", Untrusted::new(message).for_workflow_command(MAX_MESSAGE))
}

impl From<SpecError> for Failure {
    fn from(error: SpecError) -> Self {
        let mut failure = Self::from_error(Exit::Usage, &error);
        failure.help = error.help();
        failure.place = error.place().and_then(|p| p.file().map(|f| (f.to_owned(), p.line())));
        failure
    }
}

impl From<PolicyRefusal> for Failure {
    fn from(refusal: PolicyRefusal) -> Self {
        let mut failure = Self::from_error(Exit::Refused, &refusal);
        failure.help = refusal.help();
        failure
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("failed to read {0}")]
    struct Outer(&'static str, #[source] std::io::Error);

    #[test]
    fn causes_follow_and_help_is_last() {
        let error = Outer("a.yml", std::io::Error::other("disk on fire"));
        let failure = Failure::from_error(Exit::Internal, &error).with_help("call somebody");
        assert_eq!(
            failure.lines(LogTarget::Plain),
            ["error: failed to read a.yml", "  caused by: disk on fire", "help: call somebody"]
        );
    }

    #[test]
    fn an_annotation_stays_one_command_whatever_the_message_holds() {
        let hostile = "x\n::set-env name=A::b\r\n%0A";
        let line =
            annotation(hostile, Some("y"), Some((Path::new("/w/a,line=1::b.yml"), Some(3))), Some(Path::new("/w")));
        assert!(!line.contains('\n') && !line.contains('\r'), "{line}");
        assert!(line.starts_with("::error title=plimsoll,file=a%2Cline=1%3A%3Ab.yml,line=3::x%0A"), "{line}");
        assert!(line.contains("%250A"), "{line}");
    }
}

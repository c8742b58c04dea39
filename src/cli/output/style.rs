//! Colour, where somebody sees it.

use std::io::IsTerminal;

use crate::env::{Env, Var};
use crate::report::Verdict;

/// How to paint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Style {
    colour: bool,
}

impl Style {
    /// No colour.
    pub const PLAIN: Style = Style { colour: false };

    /// Colour if a person watches the stream and did not say no.
    #[must_use]
    pub fn of(env: &Env, stream: &impl IsTerminal) -> Self {
        Self { colour: super::is_interactive(env, stream) && env.os(Var::NoColor).is_none() }
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// What matters most.
    #[must_use]
    pub fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    /// What matters least.
    #[must_use]
    pub fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    /// Good news.
    #[must_use]
    pub fn good(self, text: &str) -> String {
        self.paint("32", text)
    }

    /// News to look at.
    #[must_use]
    pub fn warn(self, text: &str) -> String {
        self.paint("33", text)
    }

    /// Bad news.
    #[must_use]
    pub fn bad(self, text: &str) -> String {
        self.paint("31", text)
    }

    /// Painted as a verdict deserves.
    #[must_use]
    pub fn verdict(self, verdict: Verdict, text: &str) -> String {
        match verdict {
            Verdict::Passed => self.paint("1;32", text),
            Verdict::Failed | Verdict::Refused | Verdict::Error => self.paint("1;31", text),
            Verdict::Cancelled | Verdict::Skipped => self.paint("1;33", text),
        }
    }
}

/// The sign in front of a verdict; the word always stands beside it.
#[must_use]
pub const fn sign(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "✓",
        Verdict::Failed | Verdict::Error => "✗",
        Verdict::Refused => "⊘",
        Verdict::Cancelled | Verdict::Skipped => "–",
    }
}

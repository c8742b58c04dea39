//! Guest text on its way into a log that people and runners read line by line.

use super::clean::Cleaner;

/// A line that is longer than this is shown in parts.
const MAX_LINE: usize = 16 * 1024;

/// Who reads the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum LogTarget {
    /// A person.
    #[default]
    Plain,
    /// The Actions runner (and its kin: act, Forgejo), which obeys `::command::` and `##[command]`.
    GitHub,
    /// GitLab, which folds between `section_start:` and `section_end:`.
    GitLab,
}

/// Makes a clean line mean nothing to the log's reader. A backslash shows where something was taken apart.
pub(super) fn neutralise(mut line: String, target: LogTarget) -> String {
    match target {
        LogTarget::Plain => {}
        LogTarget::GitHub => {
            // The runner looks for `::` after trimming white space, and for `##[` anywhere in the line.
            let start = line.len() - line.trim_start().len();
            if line[start..].starts_with("::") {
                line.insert(start, '\\');
            }
            if line.contains("##[") {
                line = line.replace("##[", "##\\[");
            }
        }
        LogTarget::GitLab => {
            for word in ["section_start", "section_end"] {
                if line.contains(word) {
                    line = line.replace(&format!("{word}:"), &format!("{word}\\:"));
                }
            }
        }
    }
    line
}

/// Filters one stream of guest output for a log, chunk by chunk.
///
/// Keeps what is not a whole line yet (at most [`MAX_LINE`] bytes of it) until the rest comes, so that no marker can be put
/// together from two chunks. One filter per stream: what one stream left half-done means nothing in another.
#[derive(Debug, Default)]
pub struct LogFilter {
    target: LogTarget,
    cleaner: Cleaner,
    line: String,
}

impl LogFilter {
    /// A filter for one stream.
    #[must_use]
    pub fn new(target: LogTarget) -> Self {
        Self { target, ..Self::default() }
    }

    /// Takes a chunk; gives the lines that are complete with it, without their ends.
    pub fn push(&mut self, chunk: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        // In pieces, so that a huge chunk is not held twice.
        for piece in chunk.chunks(MAX_LINE) {
            self.cleaner.push(piece, &mut self.line);
            self.split(&mut lines);
        }
        lines
    }

    /// The stream is over: what is left of it, if anything is.
    pub fn finish(&mut self) -> Option<String> {
        self.cleaner.finish(&mut self.line);
        let rest = std::mem::take(&mut self.line);
        (!rest.is_empty()).then(|| neutralise(rest, self.target))
    }

    fn split(&mut self, lines: &mut Vec<String>) {
        let text = std::mem::take(&mut self.line);
        let mut rest = text.as_str();
        while let Some((line, after)) = rest.split_once('\n') {
            let mut line = line.to_owned();
            self.parts(&mut line, lines);
            lines.push(neutralise(line, self.target));
            rest = after;
        }
        let mut rest = rest.to_owned();
        self.parts(&mut rest, lines);
        self.line = rest;
    }

    /// Cuts parts off a line that is too long.
    fn parts(&self, line: &mut String, lines: &mut Vec<String>) {
        while line.len() > MAX_LINE {
            let rest = line.split_off(line.floor_char_boundary(MAX_LINE));
            lines.push(neutralise(std::mem::replace(line, rest), self.target));
        }
    }
}

/// Stops the Actions runner from obeying commands while guest output is printed.
///
/// The token is random, so that the guest cannot end it; it is made fresh for each stretch of output.
pub struct StopCommands {
    token: String,
}

impl std::fmt::Debug for StopCommands {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StopCommands(***)")
    }
}

impl StopCommands {
    /// A guard with a fresh token.
    ///
    /// # Errors
    /// If the system has no randomness; then guest output must not be printed under GitHub at all.
    pub fn new() -> Result<Self, getrandom::Error> {
        let mut bytes = [0u8; 24];
        getrandom::fill(&mut bytes)?;
        Ok(Self { token: format!("plimsoll-{}", hex::encode(bytes)) })
    }

    /// The line to print before guest output.
    #[must_use]
    pub fn begin(&self) -> String {
        format!("::stop-commands::{}", self.token)
    }

    /// The line to print after it; at the beginning of a line.
    #[must_use]
    pub fn end(self) -> String {
        format!("::{}::", self.token)
    }
}

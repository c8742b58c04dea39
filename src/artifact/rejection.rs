//! Why an artifact was not accepted: the member, the rule it broke, and words for a person.
//!
//! Main types: [`Rejection`] (the artifact's fault, exit code 13) and [`Error`] (that, or a fault of this host).
//! Member names come from whoever made the artifact. They are escaped and cut by [`shown`] before they enter a
//! `Rejection`, so its text is one line without control, bidi or zero-width characters; markup is still the
//! concern of whoever renders it.

use std::{fmt, io};

use serde::{Deserialize, Serialize};

/// Longest member name or foreign text, in characters, that a rejection repeats.
const SHOWN_CHARS: usize = 160;

/// The rule that an artifact broke. The words on the wire are stable (kebab-case).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// The digest of the input is not the one that was asked for.
    Sha256,
    /// A kind of file that is recognised, but not one that is unpacked.
    Format,
    /// The archive's structure or a checksum is wrong.
    Corrupt,
    /// The archive ends before its own end marker.
    Truncated,
    /// Bytes that belong to no member, where readers disagree about what the archive holds.
    TrailingData,
    /// Two places in the archive describe one member differently.
    Disagreement,
    /// Two members share bytes of the archive.
    Overlap,
    /// The member is encrypted.
    Encrypted,
    /// A compression method that is not supported.
    Method,
    /// A name that is absolute, climbs with `..`, is empty, or is not text.
    Path,
    /// A member whose path goes through something that is no directory.
    ThroughLink,
    /// Two members under one name, of different kinds or where readers disagree which one counts.
    Duplicate,
    /// Two names that differ only by case or Unicode normalisation.
    NameCollision,
    /// A device, FIFO, socket or another kind that is never unpacked.
    Kind,
    /// A symbolic link that leaves the tree.
    Symlink,
    /// A hard link to something that is no regular member unpacked before it.
    Hardlink,
    /// A sparse map that is not ordered, overlaps, or doesn't fit its file.
    Sparse,
    /// More bytes than the budget.
    BudgetBytes,
    /// More members than the budget.
    BudgetFiles,
    /// A path deeper than the budget.
    BudgetDepth,
    /// A name or path longer than the budget.
    BudgetName,
    /// The input expands by more than the budget's ratio.
    BudgetRatio,
    /// The input changed while it was read.
    Changed,
    /// There is nothing at the artifact's path.
    Missing,
    /// A file of a directory artifact that can't be read.
    Unreadable,
    /// The unpacking took longer than its deadline.
    Deadline,
}

impl Rule {
    /// What a user can do about it, where something can be done.
    pub fn help(self) -> Option<&'static str> {
        Some(match self {
            Rule::Sha256 => "the artifact is not the one this step names: correct `sha256` or fetch the right file",
            Rule::Format => "pack the artifact as zip, tar, tar.gz, tar.zst or tar.xz, or give a directory",
            Rule::Encrypted | Rule::Method => "pack the zip without encryption, with deflate or zstd",
            Rule::Symlink => {
                "make the link relative and keep its target inside the artifact, or leave it out (a Python venv: `--copies`)"
            }
            Rule::NameCollision => "rename one of the two",
            Rule::BudgetBytes | Rule::BudgetFiles | Rule::BudgetDepth | Rule::BudgetName | Rule::BudgetRatio => {
                "give only the part of the tree that the step needs"
            }
            Rule::TrailingData | Rule::Disagreement | Rule::Overlap | Rule::Duplicate => {
                "pack it anew, in one go, with an ordinary tool"
            }
            Rule::Truncated | Rule::Corrupt => "the file is damaged or was cut short: build or download it again",
            Rule::Kind => "leave the member out, or point `artifact` at a subdirectory",
            Rule::Missing => "correct `artifact`; in a step file its path is relative to the file",
            Rule::Unreadable => "make it readable for the user that runs plimsoll, or leave it out",
            Rule::Path | Rule::ThroughLink | Rule::Hardlink | Rule::Sparse | Rule::Changed | Rule::Deadline => {
                return None;
            }
        })
    }

    /// The stable word for this rule.
    pub fn id(self) -> &'static str {
        match self {
            Rule::Missing => "missing",
            Rule::Sha256 => "sha256",
            Rule::Format => "format",
            Rule::Corrupt => "corrupt",
            Rule::Truncated => "truncated",
            Rule::TrailingData => "trailing-data",
            Rule::Disagreement => "disagreement",
            Rule::Overlap => "overlap",
            Rule::Encrypted => "encrypted",
            Rule::Method => "method",
            Rule::Path => "path",
            Rule::ThroughLink => "through-link",
            Rule::Duplicate => "duplicate",
            Rule::NameCollision => "name-collision",
            Rule::Kind => "kind",
            Rule::Symlink => "symlink",
            Rule::Hardlink => "hardlink",
            Rule::Sparse => "sparse",
            Rule::BudgetBytes => "budget-bytes",
            Rule::BudgetFiles => "budget-files",
            Rule::BudgetDepth => "budget-depth",
            Rule::BudgetName => "budget-name",
            Rule::BudgetRatio => "budget-ratio",
            Rule::Changed => "changed",
            Rule::Unreadable => "unreadable",
            Rule::Deadline => "deadline",
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

/// The artifact is not accepted; nothing of it is left in the destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rejection {
    /// The member at fault, escaped; none when the fault is the archive's as a whole.
    pub member: Option<String>,
    /// The rule it broke.
    pub rule: Rule,
    /// A lowercase fragment for people.
    pub message: String,
}

impl Rejection {
    /// A rejection without a member yet; see [`Rejection::at`].
    pub fn new(rule: Rule, message: impl Into<String>) -> Self {
        Rejection { member: None, rule, message: message.into() }
    }

    /// Names the member, unless a deeper place already did.
    #[must_use]
    pub fn at(mut self, member: &[u8]) -> Self {
        if self.member.is_none() {
            self.member = Some(shown(member));
        }
        self
    }

    /// The same text with everything escaped again: for a rejection that came from a less trusted process.
    #[must_use]
    pub fn escaped(self) -> Self {
        Rejection {
            member: self.member.map(|member| shown(member.as_bytes())),
            rule: self.rule,
            message: cut(&self.message, 1024),
        }
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.member {
            Some(member) => write!(f, "member `{member}`: {} (rule {})", self.message, self.rule),
            None => write!(f, "{} (rule {})", self.message, self.rule),
        }
    }
}

impl std::error::Error for Rejection {}

/// What ends an unpacking early.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The artifact's fault.
    #[error("artifact rejected: {0}")]
    Rejected(#[from] Rejection),
    /// This host's fault: a full disk, a helper that couldn't start.
    #[error("failed to {action}")]
    Failed {
        /// Completes "failed to …".
        action: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// A fault of this host.
    pub fn failed(action: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Error::Failed { action: action.into(), source: source.into() }
    }

    /// Sorts an error that came up through a chain of decoders: a rejection that a layer raised, a fault of
    /// the system (it carries an errno), an early end, or damaged data.
    pub fn from_read(error: io::Error) -> Self {
        if error.raw_os_error().is_some() {
            return Error::failed("read the artifact", error);
        }
        if error.get_ref().is_some_and(|inner| inner.is::<Rejection>()) {
            return match error.into_inner().map(|inner| inner.downcast::<Rejection>()) {
                Some(Ok(rejection)) => Error::Rejected(*rejection),
                _ => Error::Rejected(Rejection::new(Rule::Corrupt, "unreadable")),
            };
        }
        if error.kind() == io::ErrorKind::UnexpectedEof {
            return Error::Rejected(Rejection::new(Rule::Truncated, "the archive is cut short"));
        }
        Error::Rejected(Rejection::new(Rule::Corrupt, format!("damaged data: {}", cut(&error.to_string(), 200))))
    }

    /// Names the member of a rejection, unless a deeper place already did.
    #[must_use]
    pub fn at(self, member: &[u8]) -> Self {
        match self {
            Error::Rejected(rejection) => Error::Rejected(rejection.at(member)),
            failed => failed,
        }
    }
}

impl From<Rejection> for io::Error {
    /// Carries a rejection through a `Read` chain; [`Error::from_read`] takes it out again.
    fn from(rejection: Rejection) -> Self {
        io::Error::other(rejection)
    }
}

/// Foreign bytes as one short line: control, bidi, zero-width and undecodable characters escaped, long ones cut
/// in the middle.
pub fn shown(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        text.push_str(&escape(chunk.valid()));
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    cut(&text, SHOWN_CHARS)
}

/// `char::escape_debug` without its escaping of quotes and backslashes that are already part of an escape.
fn escape(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut out, c| {
        match c {
            '\'' | '"' | '\\' => out.push(c),
            c => out.extend(c.escape_debug()),
        }
        out
    })
}

fn cut(text: &str, limit: usize) -> String {
    let text = escape(text);
    let chars = text.chars().count();
    if chars <= limit {
        return text;
    }
    let head: String = text.chars().take(limit / 2).collect();
    let tail: String = text.chars().skip(chars - limit / 2).collect();
    format!("{head}…{tail}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_become_one_plain_line() {
        assert_eq!(shown("ordinary/naïve file.txt".as_bytes()), "ordinary/naïve file.txt");
        assert_eq!(shown(b"a\x1b[31m\nb"), "a\\u{1b}[31m\\nb");
        assert_eq!(shown("a\u{202e}gpj.exe\u{200b}".as_bytes()), "a\\u{202e}gpj.exe\\u{200b}");
        assert_eq!(shown(b"caf\xe9"), "caf\\xe9");
        let long = shown(&[b'x'; 5000]);
        assert!(long.chars().count() <= SHOWN_CHARS + 1 && long.contains('…'), "{long}");
    }

    #[test]
    fn errors_through_readers_keep_their_meaning() {
        let rejection = Rejection::new(Rule::BudgetBytes, "too much");
        assert!(matches!(Error::from_read(rejection.clone().into()), Error::Rejected(r) if r == rejection));
        let eof = io::Error::from(io::ErrorKind::UnexpectedEof);
        assert!(matches!(Error::from_read(eof), Error::Rejected(r) if r.rule == Rule::Truncated));
        let disk = io::Error::from_raw_os_error(5);
        assert!(matches!(Error::from_read(disk), Error::Failed { .. }));
    }

    #[test]
    fn the_first_member_named_stays() {
        let rejection = Rejection::new(Rule::Path, "x").at(b"inner").at(b"outer");
        assert_eq!(rejection.to_string(), "member `inner`: x (rule path)");
    }

    #[test]
    fn ids_match_the_wire() {
        for rule in [Rule::Sha256, Rule::ThroughLink, Rule::BudgetRatio, Rule::TrailingData, Rule::NameCollision] {
            assert_eq!(serde_json::to_string(&rule).unwrap(), format!("\"{}\"", rule.id()));
        }
    }
}

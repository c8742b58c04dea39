//! Where a value came from: a key of a file, or a flag. Every error and every step carries one.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, open};

use super::error::SpecError;
use super::raw::yaml;

/// Longest text of a user's that a message repeats, in characters.
const SHOWN: usize = 80;

/// One step of a [`KeyPath`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Segment {
    /// A key of a mapping.
    Key(String),
    /// An item of a list, from 0.
    Index(usize),
}

/// The way from a document's root to a value, shown as `steps[0].sandbox.memory`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct KeyPath(Vec<Segment>);

impl KeyPath {
    /// The document itself.
    #[must_use]
    pub fn root() -> KeyPath {
        KeyPath(Vec::new())
    }

    /// The path of a key below this one; dots separate several.
    #[must_use]
    pub fn keys(&self, keys: &str) -> KeyPath {
        keys.split('.').fold(self.clone(), |path, key| path.key(key))
    }

    /// The path of one key below this one, whatever characters it has.
    #[must_use]
    pub fn key(&self, key: &str) -> KeyPath {
        let mut path = self.clone();
        path.0.push(Segment::Key(key.to_owned()));
        path
    }

    /// The path of an item below this one.
    #[must_use]
    pub fn item(&self, index: usize) -> KeyPath {
        let mut path = self.clone();
        path.0.push(Segment::Index(index));
        path
    }

    /// Root first.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.0
    }
}

impl From<Vec<Segment>> for KeyPath {
    fn from(segments: Vec<Segment>) -> Self {
        KeyPath(segments)
    }
}

impl fmt::Display for KeyPath {
    /// The middle of a path deeper than any real key is left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let skipped = if self.0.len() > 12 { 6..self.0.len() - 4 } else { 0..0 };
        for (position, segment) in self.0.iter().enumerate() {
            if skipped.contains(&position) {
                if position == skipped.start {
                    f.write_str(".…")?;
                }
                continue;
            }
            match segment {
                Segment::Index(index) => write!(f, "[{index}]")?,
                Segment::Key(key) => {
                    if position > 0 {
                        f.write_str(".")?;
                    }
                    f.write_str(&shown(key))?;
                }
            }
        }
        Ok(())
    }
}

/// Whether a message points at a key or at what stands behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spot {
    /// The key itself.
    Key,
    /// Its value.
    Value,
}

/// A file that was read whole.
#[derive(Debug, PartialEq, Eq)]
pub struct Source {
    /// Path as the user gave it.
    pub file: PathBuf,
    /// Its bytes, which are UTF-8, without a byte order mark.
    pub text: String,
}

impl Source {
    /// Reads a regular file of at most [`yaml::MAX_BYTES`].
    ///
    /// # Errors
    /// When it can't be read, is no regular file, is too long, or is not UTF-8. A link is none: it comes with the pull request,
    /// and what it leads to, such as a file of credentials, would be quoted in the error.
    pub fn read(file: &Path) -> Result<Arc<Source>, SpecError> {
        let unreadable = |source| SpecError::Unreadable { file: file.to_owned(), source };
        // Asked before opening, since opening a named pipe waits; and again after, since it may have changed.
        if !std::fs::symlink_metadata(file).map_err(unreadable)?.is_file() {
            return Err(SpecError::NotAFile { file: file.to_owned() });
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let handle = open(file, flags, Mode::empty()).map_err(|e| unreadable(e.into()))?;
        let handle = std::fs::File::from(handle);
        if !handle.metadata().map_err(unreadable)?.is_file() {
            return Err(SpecError::NotAFile { file: file.to_owned() });
        }
        let mut bytes = Vec::new();
        handle.take(yaml::MAX_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        Source::from_bytes(file, bytes)
    }

    /// The same checks for bytes already read.
    ///
    /// # Errors
    /// When they are too many, or not UTF-8.
    pub fn from_bytes(file: &Path, bytes: Vec<u8>) -> Result<Arc<Source>, SpecError> {
        if bytes.len() as u64 > yaml::MAX_BYTES {
            return Err(SpecError::TooLong { file: file.to_owned(), limit: yaml::MAX_BYTES });
        }
        let text = String::from_utf8(bytes).map_err(|error| {
            let good = error.utf8_error().valid_up_to();
            let line = 1 + error.as_bytes().iter().take(good).filter(|b| **b == b'\n').count();
            SpecError::NotUtf8 { file: file.to_owned(), line }
        })?;
        // Editors on Windows begin files with a byte order mark, which the YAML library takes for content.
        let text = text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text);
        Ok(Arc::new(Source { file: file.to_owned(), text }))
    }
}

/// Where a value was written. Cheap to keep: lines are looked up when a message needs them.
#[derive(Clone, PartialEq, Eq)]
pub enum Place {
    /// In a file.
    File {
        /// The file.
        source: Arc<Source>,
        /// The key.
        path: KeyPath,
        /// Key or value.
        spot: Spot,
    },
    /// On the command line, by this flag.
    Flag(&'static str),
}

impl Place {
    /// A key's value in a file.
    #[must_use]
    pub fn value(source: &Arc<Source>, path: KeyPath) -> Place {
        Place::File { source: Arc::clone(source), path, spot: Spot::Value }
    }

    /// A key in a file.
    #[must_use]
    pub fn key(source: &Arc<Source>, path: KeyPath) -> Place {
        Place::File { source: Arc::clone(source), path, spot: Spot::Key }
    }

    /// The place of an item, when this is a list in a file.
    #[must_use]
    pub fn item(&self, index: usize) -> Place {
        match self {
            Place::File { source, path, .. } => Place::value(source, path.item(index)),
            flag @ Place::Flag(_) => flag.clone(),
        }
    }

    /// The place of keys below, when this is a mapping in a file.
    #[must_use]
    pub fn below(&self, keys: &str) -> Place {
        match self {
            Place::File { source, path, .. } => Place::value(source, path.keys(keys)),
            flag @ Place::Flag(_) => flag.clone(),
        }
    }

    /// The file, when there is one.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        match self {
            Place::File { source, .. } => Some(&source.file),
            Place::Flag(_) => None,
        }
    }

    /// Line and column, from 1, when this is in a file. Parses the file again.
    #[must_use]
    pub fn line_column(&self) -> Option<(usize, usize)> {
        match self {
            Place::File { source, path, spot } => yaml::locate(&source.text, path, *spot),
            Place::Flag(_) => None,
        }
    }

    /// Line, from 1, when this is in a file. Parses the file again.
    #[must_use]
    pub fn line(&self) -> Option<usize> {
        self.line_column().map(|(line, _)| line)
    }
}

impl fmt::Display for Place {
    /// `plimsoll.yml:5:17: steps[0].sandbox.memory`, or the flag.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Flag(flag) => f.write_str(flag),
            Place::File { source, path, .. } => {
                write!(f, "{}", shown_path(&source.file))?;
                if let Some((line, column)) = self.line_column() {
                    write!(f, ":{line}:{column}")?;
                }
                if path.segments().is_empty() { Ok(()) } else { write!(f, ": {path}") }
            }
        }
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Place({self})")
    }
}

/// Text of a user's for a message: one line, no control or invisible characters, and not too long.
#[must_use]
pub fn shown(text: &str) -> String {
    shown_up_to(text, SHOWN)
}

/// The same with room for `most` characters.
#[must_use]
pub fn shown_up_to(text: &str, most: usize) -> String {
    let mut out = String::new();
    for (count, c) in text.chars().enumerate() {
        if count == most {
            out.push('…');
            break;
        }
        // Letters of any script pass; what can hide, reorder or move the cursor does not.
        if c.is_ascii_graphic() || c == ' ' || c.is_alphanumeric() {
            out.push(c);
        } else {
            out.extend(c.escape_default());
        }
    }
    out
}

/// A path for a message, see [`shown`]; paths are kept longer.
#[must_use]
pub fn shown_path(path: &Path) -> String {
    path.to_string_lossy().chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// The word among `known` that is most like `word`, when one is like it at all.
#[must_use]
pub fn nearest<'k>(word: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    if word.chars().count() > SHOWN {
        return None;
    }
    let folded = word.to_lowercase().replace('_', "-");
    known
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&folded, &candidate.to_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.chars().count() / 3)
        .min_by_key(|(distance, candidate)| (*distance, !candidate.starts_with(&folded)))
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_finds_slips_and_leaves_strangers() {
        let keys = ["memory", "minimum-isolation", "run", "timeout-minutes"];
        assert_eq!(nearest("memroy", keys), Some("memory"));
        assert_eq!(nearest("minimum_isolation", keys), Some("minimum-isolation"));
        assert_eq!(nearest("Memory", keys), Some("memory"));
        assert_eq!(nearest("timeout-minute", keys), Some("timeout-minutes"));
        assert_eq!(nearest("banana", keys), None);
        assert_eq!(nearest(&"m".repeat(100_000), keys), None);
    }

    #[test]
    fn shown_text_cannot_move_the_cursor_or_break_the_line() {
        assert_eq!(shown("a\u{1b}[2Jb\n::error::"), "a\\u{1b}[2Jb\\n::error::");
        assert_eq!(shown("abc\u{202e}def"), "abc\\u{202e}def");
        assert_eq!(shown("größe 大"), "größe 大");
        assert!(shown(&"x".repeat(500)).chars().count() <= SHOWN + 1);
    }

    #[test]
    fn a_key_path_reads_like_code() {
        let path = KeyPath::root().key("steps").item(0).keys("sandbox.memory");
        assert_eq!(path.to_string(), "steps[0].sandbox.memory");
        let deep = (0..100).fold(KeyPath::root(), |path, level| path.key(&level.to_string()));
        assert_eq!(deep.to_string(), "0.1.2.3.4.5.….96.97.98.99");
    }
}

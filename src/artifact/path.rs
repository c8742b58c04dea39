//! Names that an artifact may use.
//!
//! Main type: [`MemberPath`], a relative path made of checked components; nothing else in `artifact` reaches the
//! file system. Its constructor is the only place where the bytes of a name are judged:
//!
//! - UTF-8 only. A name that is no text can't be compared for case and normalisation, nor reported.
//! - No `..` anywhere (also where it would stay inside), not absolute, no NUL, within the [`Budget`].
//! - `.` components and doubled slashes are dropped, as every tar does; a slash at the end says *directory*.
//! - A backslash is an ordinary character, as Linux sees it (systemd units need it), except in a zip, where readers
//!   disagree about whether it separates: there it is refused.

use std::borrow::Cow;

use unicode_normalization::{UnicodeNormalization, is_nfd_quick};

use super::budget::Budget;
use super::rejection::{Rejection, Rule};

/// Whose rules a name was written by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// tar and directories: a backslash is an ordinary character.
    Unix,
    /// zip: a backslash is refused.
    Zip,
}

/// A relative path of checked components, joined by `/`. Empty means the root of the artifact.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberPath {
    text: String,
    directory: bool,
}

impl MemberPath {
    /// The root of the artifact.
    pub fn root() -> Self {
        MemberPath { text: String::new(), directory: true }
    }

    /// Checks a name as an archive or directory spells it.
    ///
    /// # Errors
    /// [`Rule::Path`], [`Rule::BudgetName`] or [`Rule::BudgetDepth`]; the member is named by the raw bytes.
    pub fn parse(raw: &[u8], dialect: Dialect, budget: &Budget) -> Result<Self, Rejection> {
        Self::check(raw, dialect, budget).map_err(|rejection| rejection.at(raw))
    }

    fn check(raw: &[u8], dialect: Dialect, budget: &Budget) -> Result<Self, Rejection> {
        let refuse = |message: &str| Err(Rejection::new(Rule::Path, message));
        // Before anything is copied: a hostile name may be megabytes long.
        if raw.len() > budget.path_bytes as usize {
            let message = format!("a path of {} bytes; {} are allowed", raw.len(), budget.path_bytes);
            return Err(Rejection::new(Rule::BudgetName, message));
        }
        let Ok(name) = std::str::from_utf8(raw) else {
            return refuse("the name is not UTF-8");
        };
        if name.is_empty() {
            return refuse("the name is empty");
        }
        if name.contains('\0') {
            return refuse("the name contains a NUL byte");
        }
        if name.starts_with('/') {
            return refuse("the path is absolute");
        }
        if dialect == Dialect::Zip && name.contains('\\') {
            return refuse("the name contains a backslash, which some readers take for a separator");
        }
        let mut text = String::with_capacity(name.len());
        let mut depth = 0;
        for component in name.split('/') {
            match component {
                "" | "." => continue,
                ".." => return refuse("the path contains `..`"),
                _ => {}
            }
            if component.len() > budget.name_bytes as usize {
                let message = format!("a name of {} bytes; {} are allowed", component.len(), budget.name_bytes);
                return Err(Rejection::new(Rule::BudgetName, message));
            }
            depth += 1;
            if depth > budget.depth {
                return Err(Rejection::new(Rule::BudgetDepth, format!("deeper than {} directories", budget.depth)));
            }
            if !text.is_empty() {
                text.push('/');
            }
            text.push_str(component);
        }
        let directory = text.is_empty() || name.ends_with('/') || name.ends_with("/.");
        Ok(MemberPath { text, directory })
    }

    /// The path below a directory: for walking one. The name is a single component.
    pub fn join(&self, name: &[u8], budget: &Budget) -> Result<Self, Rejection> {
        let mut raw = self.text.clone().into_bytes();
        if !raw.is_empty() {
            raw.push(b'/');
        }
        raw.extend_from_slice(name);
        Self::parse(&raw, Dialect::Unix, budget)
    }

    /// The components, outermost first.
    pub fn components(&self) -> impl Iterator<Item = &str> {
        self.text.split('/').filter(|component| !component.is_empty())
    }

    /// All components but the last, and the last; none for the root.
    pub fn split(&self) -> Option<(&str, &str)> {
        match self.text.rsplit_once('/') {
            Some(split) => Some(split),
            None if self.text.is_empty() => None,
            None => Some(("", &self.text)),
        }
    }

    /// Whether the name ended in a slash (or is the root), which only a directory's may.
    pub fn is_directory(&self) -> bool {
        self.directory
    }

    /// The components joined by `/`. For reports and digests, not for opening anything.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

/// What a name is compared by: two names with one key are the same file on a file system that ignores case or
/// normalisation (macOS, Windows, an ext4 with casefold).
///
/// Decomposed (NFD), then each character lower- and upper-cased, then decomposed again. That errs towards seeing a
/// collision: dotless `ı` meets `i`, and `ß` meets `ss`.
pub fn fold(name: &str) -> Cow<'_, str> {
    if name.is_ascii() {
        return if name.bytes().any(|b| b.is_ascii_lowercase()) {
            Cow::Owned(name.to_ascii_uppercase())
        } else {
            Cow::Borrowed(name)
        };
    }
    let folded: String = name.nfd().flat_map(char::to_lowercase).flat_map(char::to_uppercase).collect();
    match is_nfd_quick(folded.chars()) {
        unicode_normalization::IsNormalized::Yes => Cow::Owned(folded),
        _ => Cow::Owned(folded.nfd().collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str) -> Result<MemberPath, Rule> {
        MemberPath::parse(name.as_bytes(), Dialect::Unix, &Budget::default()).map_err(|rejection| rejection.rule)
    }

    #[test]
    fn ordinary_names_pass_and_are_tidied() {
        for (name, tidy, directory) in [
            ("a", "a", false),
            ("./a/b", "a/b", false),
            ("a//b/", "a/b", true),
            ("a/./b/.", "a/b", true),
            ("./", "", true),
            ("..a/b..", "..a/b..", false),
            ("...", "...", false),
            ("with space/naïve/日本", "with space/naïve/日本", false),
            ("unit\\x2dname.service", "unit\\x2dname.service", false),
            ("new\nline", "new\nline", false),
        ] {
            let path = parse(name).unwrap();
            assert_eq!((path.as_str(), path.is_directory()), (tidy, directory), "{name:?}");
        }
    }

    #[test]
    fn names_that_leave_or_confuse_are_refused() {
        for name in ["", "/etc/passwd", "//a", "../a", "a/../b", "a/..", "..", "a\0b", "../out_backup/x"] {
            assert_eq!(parse(name), Err(Rule::Path), "{name:?}");
        }
        let raw = MemberPath::parse(b"caf\xe9", Dialect::Unix, &Budget::default()).unwrap_err();
        assert_eq!((raw.rule, raw.member.as_deref()), (Rule::Path, Some("caf\\xe9")));
        let zip = |name: &[u8]| MemberPath::parse(name, Dialect::Zip, &Budget::default());
        assert_eq!(zip(b"a\\..\\b").unwrap_err().rule, Rule::Path);
        zip(b"a/b").unwrap();
    }

    #[test]
    fn length_and_depth_are_limits_not_panics() {
        let budget = Budget::default();
        assert_eq!(parse(&"x".repeat(255)).map(|p| p.as_str().len()), Ok(255));
        assert_eq!(parse(&"x".repeat(256)), Err(Rule::BudgetName));
        assert_eq!(parse(&"x/".repeat(3000)), Err(Rule::BudgetName));
        assert!(parse(&vec!["x"; budget.depth as usize].join("/")).is_ok());
        assert_eq!(parse(&vec!["x"; budget.depth as usize + 1].join("/")), Err(Rule::BudgetDepth));
    }

    #[test]
    fn names_fold_together_as_case_blind_file_systems_see_them() {
        for (a, b) in [
            ("README", "readme"),
            ("caf\u{e9}", "cafe\u{301}"),
            ("CAFÉ", "cafe\u{301}"),
            ("straße", "STRASSE"),
            ("\u{1e9e}", "ß"),
            ("ΣΑΣ", "σας"),
            ("\u{212a}", "k"),
            ("\u{17f}", "S"),
            ("\u{1c4}", "\u{1c6}"),
            ("\u{390}", "\u{1fd3}"),
        ] {
            assert_eq!(fold(a), fold(b), "{a} {b}");
        }
        for (a, b) in [("a", "b"), ("é", "e"), ("ä", "a"), ("日", "本"), ("а", "a")] {
            assert_ne!(fold(a), fold(b), "{a} {b}");
        }
    }
}

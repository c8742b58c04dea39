//! Engine versions with known vulnerabilities.
//!
//! The version is a label: a listed release's, or what the executable prints. That is good enough for a warning about an
//! engine that was identified otherwise; an engine that lies about its version has other ways to be hostile.

use super::fact::{EngineKind, Fact};

/// A published vulnerability of an engine.
#[derive(Debug, Clone, Copy)]
pub struct Advisory {
    /// Its name.
    pub id: &'static str,
    /// Which engine.
    pub engine: EngineKind,
    /// What it is, in a few words.
    pub what: &'static str,
    /// Versions that have it: from the first, up to and without the second.
    pub affected: &'static [(&'static str, &'static str)],
    /// An option without which it does not show, if that is so. We use none of these.
    pub only_with: Option<&'static str>,
    /// Where it is published.
    pub source: &'static str,
}

/// What is known. Add a row with its source.
pub const ADVISORIES: &[Advisory] = &[
    Advisory {
        id: "CVE-2026-1386",
        engine: EngineKind::Firecracker,
        what: "the jailer follows symbolic links in a directory that others may write to",
        affected: &[("0.0.0", "1.13.2"), ("1.14.0", "1.14.1")],
        only_with: None,
        source: "https://github.com/firecracker-microvm/firecracker/security/advisories",
    },
    Advisory {
        id: "CVE-2026-5747",
        engine: EngineKind::Firecracker,
        what: "memory of the VMM may be written out of bounds by the virtio PCI transport",
        affected: &[("1.13.0", "1.14.4"), ("1.15.0", "1.15.1")],
        only_with: Some("--enable-pci"),
        source: "https://github.com/firecracker-microvm/firecracker/security/advisories",
    },
];

/// Facts about what is known of this version. With `refuse`, those that apply to us forbid the engine.
#[must_use]
pub fn known(engine: EngineKind, version: &str, refuse: bool) -> Vec<Fact> {
    let Some(version) = parse(version) else { return Vec::new() };
    let has = |(from, fixed): &(&str, &str)| parse(from) <= Some(version) && Some(version) < parse(fixed);
    ADVISORIES
        .iter()
        .filter(|a| a.engine == engine && a.affected.iter().any(has))
        .map(|a| Fact::Advisory {
            engine,
            version: format!("{}.{}.{}", version.0, version.1, version.2),
            id: a.id.to_owned(),
            what: a.only_with.map_or(a.what.to_owned(), |option| {
                format!("{}; only with {option}, which is never used here", a.what)
            }),
            applies: a.only_with.is_none(),
            refused: refuse && a.only_with.is_none(),
        })
        .collect()
}

/// The three numbers of a version; whatever follows the last is ignored.
fn parse(version: &str) -> Option<(u32, u32, u32)> {
    let mut parts = version.trim_start_matches('v').splitn(3, '.');
    let mut number = || {
        let part = parts.next()?;
        let digits = part.len() - part.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        part[..digits].parse().ok()
    };
    Some((number()?, number()?, number()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(version: &str) -> Vec<(String, bool)> {
        let all = known(EngineKind::Firecracker, version, true).into_iter();
        all.map(|fact| match fact {
            Fact::Advisory { id, refused, .. } => (id, refused),
            other => panic!("{other:?}"),
        })
        .collect()
    }

    #[test]
    fn versions_are_compared_by_number_and_only_what_applies_is_refused() {
        let jailer = || ("CVE-2026-1386".to_owned(), true);
        let pci = || ("CVE-2026-5747".to_owned(), false);
        assert_eq!(ids("1.12.1"), [jailer()]);
        assert_eq!(ids("v1.13.1"), [jailer(), pci()]);
        assert_eq!(ids("1.13.2"), [pci()]);
        assert_eq!(ids("1.14.0-dev"), [jailer(), pci()]);
        assert_eq!(ids("1.14.3"), [pci()]);
        assert_eq!(ids("1.14.4"), []);
        assert_eq!(ids("1.15.0"), [pci()]);
        assert_eq!(ids("1.16.0"), []);
        assert_eq!(ids("unknown"), []);
        assert_eq!(known(EngineKind::Runsc, "1.12.1", true), []);
    }

    #[test]
    fn every_row_has_a_source_and_ranges_that_make_sense() {
        for row in ADVISORIES {
            assert!(row.source.starts_with("https://") && !row.affected.is_empty(), "{}", row.id);
            assert!(row.affected.iter().all(|(from, fixed)| parse(from) < parse(fixed) && parse(from).is_some()));
        }
    }
}

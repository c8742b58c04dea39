//! How an engine's executable is identified: by digest, or by where it lies.
//!
//! The digest is the one read through `/proc/<pid>/exe` of the observed process, so it is about what runs. A path is
//! only the second best: it shows who could have put the executable there. What an engine prints about itself is never
//! looked at.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::fact::{EngineKind, Identity};

/// A release whose digest is known.
#[derive(Debug, Clone, Copy)]
pub struct Release {
    /// Which engine.
    pub engine: EngineKind,
    /// SHA-256, lowercase hex.
    pub sha256: &'static str,
    /// Version.
    pub version: &'static str,
    /// Where the digest comes from.
    pub source: &'static str,
}

/// Releases whose digests were taken from their makers. Add a row with its source; never one that was only computed
/// from a file at hand.
pub const RELEASES: &[Release] = &[
    Release {
        engine: EngineKind::Runsc,
        sha256: "a6756a39353dfac7aeab4d3f9205341e4a714600991c7928d747b93d50f9cfaf",
        version: "0.0~20240729.0",
        source: "/usr/bin/runsc of the Debian package runsc 0.0~20240729.0-4~bpo12+2, amd64, bookworm-backports",
    },
    Release {
        engine: EngineKind::Runsc,
        sha256: "de98831af671d537a66cd36b4ae1d797e03f9d265375162ab2221a9a33c2592c",
        version: "0.0~20221219.0",
        source: "/usr/bin/runsc of the Debian package runsc 0.0~20221219.0-2+b3, amd64, bookworm",
    },
];

/// Identifies the executable with this digest, which was started from `path`.
#[must_use]
pub fn identify(engine: EngineKind, path: &Path, sha256: &str, trusted: &BTreeSet<String>) -> Identity {
    if let Some(release) = RELEASES.iter().find(|r| r.engine == engine && r.sha256 == sha256) {
        return Identity::Release { version: release.version.to_owned() };
    }
    if trusted.contains(sha256) {
        return Identity::Operator;
    }
    match root_owned(path) {
        Ok(()) => Identity::RootOwned,
        Err(reason) => Identity::Unidentified { reason: format!("its digest is not listed, and {reason}") },
    }
}

/// Whether only root can have put `path` there: it and every directory above it belong to root and nobody else can write
/// to them, along the path as given and along the one that symbolic links lead to.
///
/// # Errors
/// The first fault, in words.
pub fn root_owned(path: &Path) -> Result<(), String> {
    let unreadable = |e: io::Error| format!("{} cannot be looked at ({e})", path.display());
    let given = std::path::absolute(path).map_err(unreadable)?;
    let real = path.canonicalize().map_err(unreadable)?;
    for place in given.ancestors().chain(real.ancestors()) {
        let found = std::fs::symlink_metadata(place).map_err(unreadable)?;
        faultless(place, &found)?;
    }
    Ok(())
}

fn faultless(place: &Path, found: &Metadata) -> Result<(), String> {
    if found.uid() != 0 {
        return Err(format!("{} belongs to uid {}", place.display(), found.uid()));
    }
    // The mode of a symbolic link means nothing; who may replace it is its directory's to say.
    if found.is_symlink() {
        return Ok(());
    }
    if found.mode() & 0o002 != 0 {
        return Err(format!("everybody can write to {}", place.display()));
    }
    if found.mode() & 0o020 != 0 && found.gid() != 0 {
        return Err(format!("group {} can write to {}", found.gid(), place.display()));
    }
    Ok(())
}

/// The runner's own executable, for the worker that it starts from itself: what it is called, not what it is.
///
/// # Errors
/// If there is no `/proc`.
pub fn own_path() -> io::Result<PathBuf> {
    std::fs::read_link("/proc/self/exe")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listed_digest_wins_over_the_path() {
        let trusted = BTreeSet::from(["ab".to_owned()]);
        let identify = |digest| identify(EngineKind::Runsc, Path::new("/tmp/runsc"), digest, &trusted);
        assert_eq!(identify("ab"), Identity::Operator);
        assert!(matches!(identify("cd"), Identity::Unidentified { .. }));
    }

    #[test]
    fn a_file_below_a_directory_that_all_can_write_is_not_identified() {
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        let file = dir.path().join("runsc");
        std::fs::write(&file, "").unwrap();
        assert!(root_owned(&file).is_err());
        // Nor is a link to it from a better place, nor one from there to a better file.
        let link = dir.path().join("sh");
        std::os::unix::fs::symlink("/bin/sh", &link).unwrap();
        assert!(root_owned(&link).is_err());
        assert!(root_owned(Path::new("/nonexistent/runsc")).is_err());
    }

    #[test]
    fn the_shell_of_the_system_is_root_owned() {
        assert_eq!(root_owned(Path::new("/bin/sh")), Ok(()));
    }
}

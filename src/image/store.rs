//! Unpacked images in the cache, and the disks made of them.
//!
//! Main type: [`Stored`]. A tree is kept under the digest of what it was unpacked from and serves gVisor as it is; [`disk`]
//! makes of it the squashfs that a microVM gets, kept under the same digest. How something is unpacked is the caller's, since
//! that takes a jail.

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::cache::{Cache, CacheError, Entry};
use super::squashfs::{PackError, pack};
use crate::artifact::{Digest, Error as ArtifactError};

/// Counts what is done with the same input: entries of another number are not used.
const FORMAT: u32 = 1;
const TREE: &str = "tree";
const DISK: &str = "disk";

/// Why there is no tree or disk.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It can't be kept.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// It can't be unpacked.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// It can't be packed.
    #[error("failed to make a disk of the image")]
    Pack(#[from] PackError),
}

/// An unpacked image in the cache, which stays there while this is held.
#[derive(Debug, Clone)]
pub struct Stored {
    key: String,
    entry: Entry,
}

impl Stored {
    /// The tree. Its directories can be written by everybody, but nobody else gets there.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.entry.path().join(TREE)
    }

    /// Whether this run unpacked it.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.entry.fresh
    }
}

/// The tree of what has that digest; `unpack` fills the empty directory that it is given, if it is not there yet. `how` says
/// what the digest is of and how it is unpacked.
///
/// # Errors
/// As [`StoreError`] says.
pub fn tree(
    cache: &Cache,
    how: &str,
    digest: Digest,
    unpack: impl FnOnce(&File) -> Result<(), ArtifactError>,
) -> Result<Stored, StoreError> {
    let key = Digest::of(format!("image {FORMAT} {how} {digest}").as_bytes()).to_string();
    let entry = cache.entry("image", &key, |directory| {
        let path = directory.join(TREE);
        let tree = open(&path).map_err(|source| CacheError::Io { action: "make", path, source })?;
        Ok::<_, StoreError>(unpack(&tree)?)
    })?;
    Ok(Stored { key, entry })
}

/// A directory that the jailed helper, which has another uid, can write.
fn open(path: &Path) -> std::io::Result<File> {
    DirBuilder::new().create(path)?;
    fs::set_permissions(path, PermissionsExt::from_mode(0o777))?;
    File::open(path)
}

/// The squashfs of a tree, mode 0444; it stays while the entry is held.
///
/// # Errors
/// As [`StoreError`] says.
pub fn disk(cache: &Cache, stored: &Stored) -> Result<(PathBuf, Entry), StoreError> {
    let entry = cache.entry("disk", &stored.key, |directory| {
        pack(&stored.path(), &directory.join(DISK))?;
        Ok::<_, StoreError>(())
    })?;
    Ok((entry.path().join(DISK), entry))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_and_its_disk_are_made_once_for_a_digest() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let digest = Digest::of(b"image");
        let fill = |_: &File| {
            fs::write(dir.path().join("unpacked"), "").unwrap();
            Ok(())
        };
        let first = tree(&cache, "test", digest, fill).unwrap();
        let again = tree(&cache, "test", digest, |_| panic!("it is there")).unwrap();
        assert!(first.is_fresh() && !again.is_fresh() && first.path() == again.path());
        let other = tree(&cache, "another way", digest, |_| Ok(())).unwrap();
        assert_ne!(other.path(), first.path());
        let (disk_path, entry) = disk(&cache, &first).unwrap();
        assert!(entry.fresh && !disk(&cache, &again).unwrap().1.fresh);
        assert!(fs::read(disk_path).unwrap().starts_with(b"hsqs"));
        let failed = tree(&cache, "test", Digest::of(b"x"), |_| {
            Err(ArtifactError::failed("do it", std::io::Error::from(std::io::ErrorKind::Other)))
        });
        assert!(matches!(failed, Err(StoreError::Artifact(_))));
    }
}

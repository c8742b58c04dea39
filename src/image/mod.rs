//! Images: the root file system that a boundary shows its program.
//!
//! [`Image`] is where one comes from, checked; [`rootfs`] turns it into the entries that a launcher builds a root
//! directory of its own from. Nothing here is executed: an image's content is the guest's, and its top level
//! is only listed, so that the boundary's own directories (`/proc`, `/workspace`, …) never have to exist in it.
//!
//! For a microVM, [`kernel`] makes a bootable kernel and [`initramfs`] what it starts with, out of what this host's
//! distribution installed. What is made once and used often is in the [`cache`].

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

pub mod cache;
pub mod initramfs;
pub mod kernel;
pub mod oci;
pub mod rootfs;
pub mod seal;
pub mod squashfs;
pub mod store;
pub mod user;

pub use cache::Cache;
pub use rootfs::{Entry, Rootfs};

/// The world-readable toolchain part of the runner's own tree; see [`rootfs`].
pub const HOST: &str = "host";

/// A usable image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// As the step names it: `host`, `dir:…`, `tar:…`.
    pub reference: String,
    /// Directory that holds it; `None` means the runner's own toolchain.
    pub root: Option<PathBuf>,
    /// SHA-256 of what it was unpacked from, lowercase hex, where there is such a thing.
    pub digest: Option<String>,
}

/// Why a directory cannot be an image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// It is missing or no directory.
    #[error("{0} is no directory")]
    NoDirectory(PathBuf),
    /// It is the root of the host, or holds it.
    #[error("{0} is the host's own root directory; `image: host` shows the part of it that is meant to be shown")]
    HostRoot(PathBuf),
    /// There is nothing to run in it.
    #[error("{0} holds neither `bin` nor `usr/bin`")]
    Empty(PathBuf),
    /// It cannot be looked at.
    #[error("failed to look at {path}")]
    Io {
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl Image {
    /// The runner's own toolchain.
    #[must_use]
    pub fn host() -> Self {
        Self { reference: HOST.to_owned(), root: None, digest: None }
    }

    /// A directory tree (`dir:`), or one that an archive was unpacked to (`tar:`), of which `digest` is the archive's.
    ///
    /// # Errors
    /// As [`ImageError`] says.
    pub fn directory(reference: &str, path: &Path, digest: Option<String>) -> Result<Self, ImageError> {
        let io = |source| ImageError::Io { path: path.to_owned(), source };
        let root = match path.canonicalize() {
            Ok(root) if root.is_dir() => root,
            Ok(_) => return Err(ImageError::NoDirectory(path.to_owned())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(ImageError::NoDirectory(path.to_owned())),
            Err(e) => return Err(io(e)),
        };
        let (here, host) = (fs::metadata(&root).map_err(io)?, fs::metadata("/").map_err(io)?);
        if (here.dev(), here.ino()) == (host.dev(), host.ino()) {
            return Err(ImageError::HostRoot(path.to_owned()));
        }
        // `bin` may be an absolute link, which means something only inside; so it is not followed.
        if fs::symlink_metadata(root.join("bin")).is_err() && !root.join("usr/bin").is_dir() {
            return Err(ImageError::Empty(path.to_owned()));
        }
        Ok(Self { reference: reference.to_owned(), root: Some(root), digest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_root_is_no_image_however_it_is_named() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("link")).unwrap();
        for path in [Path::new("/"), Path::new("/usr/.."), &dir.path().join("link")] {
            assert!(matches!(Image::directory("dir:x", path, None), Err(ImageError::HostRoot(_))), "{path:?}");
        }
    }

    #[test]
    fn a_directory_with_programs_is_an_image_and_one_without_is_not() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(Image::directory("dir:x", dir.path(), None), Err(ImageError::Empty(_))));
        assert!(matches!(Image::directory("dir:x", &dir.path().join("no"), None), Err(ImageError::NoDirectory(_))));
        std::os::unix::fs::symlink("/nowhere", dir.path().join("bin")).unwrap();
        assert_eq!(Image::directory("dir:x", dir.path(), None).unwrap().reference, "dir:x");
    }
}

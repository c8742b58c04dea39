//! A tree that somebody else made, for root to read out of: whatever links are in it, they lead nowhere else.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Dir, FileType, Mode, OFlags, open};
use rustix::io::Errno;

use super::SetupError;
use super::source::SourceError;
use crate::artifact::beneath::{DIRECTORY, entry_kind, rooted};

/// A directory whose links are followed as if it were the root directory.
#[derive(Debug)]
pub struct Tree {
    root: OwnedFd,
    /// What it is called in errors.
    pub name: String,
}

impl Tree {
    /// Opens one.
    ///
    /// # Errors
    /// If it is no directory, or can't be opened.
    pub fn open(path: &Path, name: String) -> Result<Self, SetupError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = open(path, flags, Mode::empty()).map_err(|e| SetupError::io("open", path)(e.into()))?;
        Ok(Self { root, name })
    }

    /// A regular file of it, at most `most` bytes; `None` where there is none at that path.
    ///
    /// # Errors
    /// If it is longer, or can't be read.
    pub fn read(&self, path: &Path, most: u64) -> Result<Option<(Metadata, Vec<u8>)>, SourceError> {
        let io = |source| SourceError::Io { path: Path::new(&self.name).join(path), source };
        // Opening a FIFO must not wait for its other end.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match rooted(self.root.as_fd(), path, flags) {
            Ok(fd) => File::from(fd),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
            Err(e) => return Err(io(e.into())),
        };
        let meta = file.metadata().map_err(io)?;
        if !meta.is_file() {
            return Ok(None);
        }
        let mut content = Vec::new();
        file.take(most + 1).read_to_end(&mut content).map_err(io)?;
        if content.len() as u64 > most {
            return Err(SourceError::Large { name: Path::new(&self.name).join(path).display().to_string(), most });
        }
        Ok(Some((meta, content)))
    }

    /// Names in a directory of it, and what each is.
    ///
    /// # Errors
    /// If there is no such directory, or it can't be listed.
    pub fn names(&self, path: &Path) -> io::Result<Vec<(String, FileType)>> {
        let fd = rooted(self.root.as_fd(), path, DIRECTORY.difference(OFlags::NOFOLLOW))?;
        let mut names = Vec::new();
        for entry in Dir::read_from(&fd)? {
            let entry = entry?;
            if let Ok(name) = entry.file_name().to_str().map(str::to_owned)
                && !matches!(name.as_str(), "." | "..")
            {
                names.push((name, entry_kind(fd.as_fd(), &entry)?));
            }
        }
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_lead_nowhere_else() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(outside.path().join("secret"), "secret").unwrap();
        fs::create_dir(dir.path().join("real")).unwrap();
        fs::write(dir.path().join("real/file"), "content").unwrap();
        for (name, target) in [
            ("absolute", outside.path().join("secret")),
            (
                "climbs",
                Path::new("../../../../../../..").join(outside.path().strip_prefix("/").unwrap()).join("secret"),
            ),
            ("elsewhere", outside.path().to_owned()),
            ("process", "/proc/self/environ".into()),
            ("inside", "/real/file".into()),
            ("directory", "real".into()),
        ] {
            symlink(target, dir.path().join(name)).unwrap();
        }
        let tree = Tree::open(dir.path(), "it".to_owned()).unwrap();
        let read = |path: &str| tree.read(Path::new(path), 10).unwrap().map(|(_, content)| content);
        for path in ["absolute", "climbs", "elsewhere/secret", "process", "../secret", "real", "missing"] {
            assert_eq!(read(path), None, "{path}");
        }
        assert!(tree.names(Path::new("elsewhere")).is_err());
        // As they would in the machine that the tree is the root of.
        for path in ["real/file", "inside", "directory/file"] {
            assert_eq!(read(path).unwrap(), b"content", "{path}");
        }
        assert_eq!(tree.names(Path::new("directory")).unwrap(), [("file".to_owned(), FileType::RegularFile)]);
        assert!(matches!(tree.read(Path::new("inside"), 6), Err(SourceError::Large { .. })));
    }
}

//! Reading a file only if nobody but root can have written it.
//!
//! The path is walked from `/` one component at a time, each opened relative to the one before and without following
//! links; a symbolic link is resolved here, so that what it goes through is checked as well. Every directory, every link
//! and the file itself must be root's, and no group or others may write them (a POSIX ACL that lets somebody write shows
//! in the group bits). The file that was checked is the file that is read.
//!
//! Under a user namespace that does not map every uid to itself, owners mean nothing (the job may own "root"), so owners
//! are not compared and the caller reports the policy as unverified; everything else is checked all the same.

use std::path::{Path, PathBuf};

use super::PolicyRefusal;

/// What ownership is compared with.
#[derive(Debug, Clone)]
pub struct Surroundings {
    /// The uid that must own everything; `None` when owners mean nothing.
    owner: Option<u32>,
    /// Where the walk begins: `/`, but for tests.
    root: PathBuf,
}

impl Surroundings {
    /// Looks at this process's user namespace.
    #[must_use]
    pub fn of_this_process() -> Surroundings {
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        Surroundings { owner: is_identity(&map).then_some(0), root: PathBuf::from("/") }
    }

    /// Whether owners can be compared.
    #[must_use]
    pub fn verifies(&self) -> bool {
        self.owner.is_some()
    }

    #[cfg(test)]
    pub(super) fn for_test(root: &Path, owner: Option<u32>) -> Surroundings {
        Surroundings { owner, root: root.to_owned() }
    }
}

/// Whether a `uid_map` (user_namespaces(7)) maps every uid to itself, as the initial namespace's does.
pub(super) fn is_identity(map: &str) -> bool {
    let mut lines = map.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    lines.next().is_some_and(|first| first == ["0", "0", "4294967295"]) && lines.next().is_none()
}

/// The file's bytes, or `None` when there is no such file.
///
/// # Errors
/// When something is there and can't be read or trusted.
#[cfg(target_os = "linux")]
pub(super) fn read(file: &Path, around: &Surroundings) -> Result<Option<Vec<u8>>, PolicyRefusal> {
    walk::Walk::new(file, around)?.finish()
}

/// Other systems run nothing behind a boundary; `check` still shows what the policy says.
#[cfg(not(target_os = "linux"))]
pub(super) fn read(file: &Path, _: &Surroundings) -> Result<Option<Vec<u8>>, PolicyRefusal> {
    match std::fs::read(file) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PolicyRefusal::Unreadable { file: file.to_owned(), source }),
    }
}

#[cfg(target_os = "linux")]
mod walk {
    use std::collections::VecDeque;
    use std::ffi::{OsStr, OsString};
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::OwnedFd;
    use std::os::unix::ffi::OsStrExt;
    use std::path::{Component, Path, PathBuf};

    use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, open, openat, readlinkat};
    use rustix::io::Errno;

    use super::super::super::raw::yaml::MAX_BYTES;
    use super::{PolicyRefusal, Surroundings};

    /// As many links as the kernel follows (path_resolution(7)).
    const MAX_LINKS: usize = 40;

    pub(super) struct Walk<'w> {
        file: &'w Path,
        around: &'w Surroundings,
        /// Directories entered, with their paths; the last is where the walk stands.
        stack: Vec<(OwnedFd, PathBuf)>,
        rest: VecDeque<OsString>,
        links: usize,
        /// The first fault met. It counts only when the file exists: without a policy there is nothing to distrust.
        fault: Option<String>,
    }

    impl<'w> Walk<'w> {
        pub(super) fn new(file: &'w Path, around: &'w Surroundings) -> Result<Walk<'w>, PolicyRefusal> {
            let rest = names(file).collect();
            let mut walk = Walk { file, around, stack: Vec::new(), rest, links: 0, fault: None };
            walk.restart()?;
            Ok(walk)
        }

        fn restart(&mut self) -> Result<(), PolicyRefusal> {
            let root = open(&self.around.root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
            let root = root.map_err(|error| self.unreadable(error))?;
            let stat = fstat(&root).map_err(|error| self.unreadable(error))?;
            self.check(&stat, Path::new("/"), true);
            self.stack = vec![(root, PathBuf::from("/"))];
            Ok(())
        }

        pub(super) fn finish(mut self) -> Result<Option<Vec<u8>>, PolicyRefusal> {
            while let Some(name) = self.rest.pop_front() {
                if name == ".." {
                    if self.stack.len() > 1 {
                        self.stack.pop();
                    }
                    continue;
                }
                let Some((directory, path)) = self.stack.last() else { break };
                let path = path.join(&name);
                let found =
                    match openat(directory, &name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()) {
                        Ok(found) => found,
                        // A link that leads nowhere is no absence: somebody wanted a policy here.
                        Err(Errno::NOENT) if self.links == 0 => return Ok(None),
                        Err(error) => return Err(self.unreadable(error)),
                    };
                let stat = fstat(&found).map_err(|error| self.unreadable(error))?;
                match FileType::from_raw_mode(stat.st_mode) {
                    FileType::Symlink => {
                        self.check(&stat, &path, false);
                        self.follow(&found)?;
                    }
                    FileType::Directory if !self.rest.is_empty() => {
                        self.check(&stat, &path, true);
                        self.stack.push((found, path));
                    }
                    FileType::RegularFile if self.rest.is_empty() => {
                        self.check(&stat, &path, true);
                        return self.read(&name, &stat).map(Some);
                    }
                    _ => return Err(self.untrusted(format!("{} is not a regular file", path.display()))),
                }
            }
            Err(self.untrusted("it is not a regular file".to_owned()))
        }

        fn follow(&mut self, link: &OwnedFd) -> Result<(), PolicyRefusal> {
            self.links += 1;
            if self.links > MAX_LINKS {
                return Err(self.unreadable(Errno::LOOP));
            }
            // An empty path reads the link that the descriptor is (readlinkat(2), since Linux 2.6.39).
            let target = readlinkat(link, c"", Vec::new()).map_err(|error| self.unreadable(error))?;
            let target = Path::new(OsStr::from_bytes(target.as_bytes()));
            if target.is_absolute() {
                self.restart()?;
            }
            for name in names(target).collect::<Vec<_>>().into_iter().rev() {
                self.rest.push_front(name);
            }
            Ok(())
        }

        /// Reads the file that was looked at, and no other.
        fn read(&self, name: &OsStr, checked: &Stat) -> Result<Vec<u8>, PolicyRefusal> {
            if let Some(fault) = &self.fault {
                return Err(self.untrusted(fault.clone()));
            }
            let Some((directory, _)) = self.stack.last() else { return Err(self.unreadable(Errno::NOENT)) };
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let opened = openat(directory, name, flags, Mode::empty()).map_err(|error| self.unreadable(error))?;
            let stat = fstat(&opened).map_err(|error| self.unreadable(error))?;
            if (stat.st_dev, stat.st_ino) != (checked.st_dev, checked.st_ino) {
                return Err(self.untrusted("it was replaced while it was read".to_owned()));
            }
            let mut bytes = Vec::new();
            let unreadable = |source| PolicyRefusal::Unreadable { file: self.file.to_owned(), source };
            File::from(opened).take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
            Ok(bytes)
        }

        fn check(&mut self, stat: &Stat, path: &Path, modes: bool) {
            let fault = if self.around.owner.is_some_and(|owner| stat.st_uid != owner) {
                Some(format!("{} belongs to uid {}, not to root", path.display(), stat.st_uid))
            } else if modes && stat.st_mode & 0o022 != 0 {
                Some(format!("{} can be written by others (mode {:04o})", path.display(), stat.st_mode & 0o7777))
            } else {
                None
            };
            if self.fault.is_none() {
                self.fault = fault;
            }
        }

        fn unreadable(&self, error: Errno) -> PolicyRefusal {
            PolicyRefusal::Unreadable { file: self.file.to_owned(), source: error.into() }
        }

        fn untrusted(&self, reason: String) -> PolicyRefusal {
            PolicyRefusal::Untrusted { file: self.file.to_owned(), reason }
        }
    }

    /// Names and `..`, without the root and `.`.
    fn names(path: &Path) -> impl Iterator<Item = OsString> + '_ {
        path.components().filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
        })
    }
}

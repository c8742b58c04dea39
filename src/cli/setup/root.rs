//! Files below a root: that of this machine, or of an image that is being built.
//!
//! Paths are resolved as if that directory were `/`, so that a link in an image does not lead out of it. A file is written
//! beside its place and renamed into it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FlockOperation, Mode, OFlags, RawMode, ResolveFlags, fchmod, fstat, fsync, mkdirat, openat, openat2,
    renameat, unlinkat,
};
use rustix::io::Errno;

use crate::cli::failure::Failure;
use crate::exit::Exit;
use crate::lock::Lock;

/// Largest file that is read back.
const MAX_BYTES: u64 = 1024 * 1024;

/// Where files are set up.
pub(super) struct Root {
    path: PathBuf,
    fd: OwnedFd,
    /// Nothing is changed.
    dry: bool,
}

/// What became of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    Made,
    Replaced,
    Unchanged,
}

impl Root {
    pub(super) fn open(path: &Path, dry: bool) -> Result<Self, Failure> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = openat(CWD, path, flags, Mode::empty())
            .map_err(|e| failed("open", path, e.into()).with_help("name a directory that exists with --root"))?;
        Ok(Self { path: path.to_owned(), fd, dry })
    }

    pub(super) const fn is_dry(&self) -> bool {
        self.dry
    }

    /// A path as it is on this machine, for messages. `path` has no slash at its beginning.
    pub(super) fn shown(&self, path: &str) -> PathBuf {
        self.path.join(path)
    }

    /// Opens something below, as `flags` say.
    pub(super) fn at(&self, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        openat2(&self.fd, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)
    }

    /// The directory, made if need be. `None` only when it is absent and nothing may be changed.
    pub(super) fn directory(&self, path: &str) -> Result<Option<Directory>, Failure> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let fd = match self.at(path, flags) {
            Ok(fd) => fd,
            Err(Errno::NOENT) if self.dry => return Ok(None),
            Err(Errno::NOENT) => {
                let (above, name) = path.rsplit_once('/').unwrap_or((".", path));
                let above = if above == "." { None } else { self.directory(above)? };
                let made = match &above {
                    Some(above) => mkdirat(&above.fd, name, Mode::from_raw_mode(0o755)),
                    None => mkdirat(&self.fd, name, Mode::from_raw_mode(0o755)),
                };
                match made {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(e) => return Err(failed("make", &self.shown(path), e.into())),
                }
                self.at(path, flags).map_err(|e| failed("open", &self.shown(path), e.into()))?
            }
            Err(e) => return Err(failed("open", &self.shown(path), e.into())),
        };
        let directory = Directory { fd, path: self.shown(path) };
        directory.check()?;
        Ok(Some(directory))
    }

    /// Writes a file unless it has that content already.
    pub(super) fn write(&self, path: &str, bytes: &[u8], mode: RawMode) -> Result<Change, Failure> {
        let Some((above, name)) = path.rsplit_once('/') else { return Ok(Change::Unchanged) };
        let Some(directory) = self.directory(above)? else { return Ok(Change::Made) };
        let change = match directory.read(name)? {
            Some(old) if old == bytes => return Ok(Change::Unchanged),
            Some(_) => Change::Replaced,
            None => Change::Made,
        };
        if !self.dry {
            directory.write(name, bytes, mode)?;
        }
        Ok(change)
    }
}

/// A directory that is open.
pub(super) struct Directory {
    fd: OwnedFd,
    path: PathBuf,
}

impl Directory {
    /// Root's directories have to be root's: who can write one could put other units and keys into it.
    fn check(&self) -> Result<(), Failure> {
        let stat = fstat(&self.fd).map_err(|e| failed("look at", &self.path, e.into()))?;
        let own = stat.st_uid == rustix::process::geteuid().as_raw() || stat.st_uid == 0;
        if own && stat.st_mode & 0o022 == 0 {
            return Ok(());
        }
        let path = self.path.display();
        Err(Failure::new(
            Exit::Internal,
            format!("{path} can be written by others than its owner, or is another user's"),
        )
        .with_help(format!("look at what is in it, then `chown root:root {path} && chmod go-w {path}`")))
    }

    /// Nobody else sets up the same until what it returns is dropped.
    pub(super) fn lock(&self) -> Result<Lock<BorrowedFd<'_>>, Failure> {
        Lock::of(self.fd.as_fd(), FlockOperation::LockExclusive).map_err(|e| failed("lock", &self.path, e.into()))
    }

    pub(super) fn shown(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// A path that leads to a file in this very directory, whatever its name leads to by now.
    pub(super) fn exact(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.fd.as_raw_fd())).join(name)
    }

    pub(super) fn read(&self, name: &str) -> Result<Option<Vec<u8>>, Failure> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = match openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(e) => return Err(failed("read", &self.shown(name), e.into())),
        };
        let mut bytes = Vec::new();
        File::from(fd).take(MAX_BYTES).read_to_end(&mut bytes).map_err(|e| failed("read", &self.shown(name), e))?;
        Ok(Some(bytes))
    }

    pub(super) fn write(&self, name: &str, bytes: &[u8], mode: RawMode) -> Result<(), Failure> {
        let fresh = format!(".{name}.new");
        let write = || -> io::Result<()> {
            self.remove(&fresh)?;
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let fd = openat(&self.fd, &fresh, flags, Mode::from_raw_mode(0o600))?;
            let mut file = File::from(fd);
            let done = file.write_all(bytes).and_then(|()| {
                // Whatever the umask.
                fchmod(&file, Mode::from_raw_mode(mode))?;
                file.sync_all()?;
                renameat(&self.fd, &fresh, &self.fd, name)?;
                Ok(fsync(&self.fd)?)
            });
            if done.is_err() {
                let _ = self.remove(&fresh);
            }
            done
        };
        write().map_err(|e| failed("write", &self.shown(name), e))
    }

    pub(super) fn remove(&self, name: &str) -> Result<(), Errno> {
        match unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Opens a regular file for destruction: what it holds is overwritten by [`destroy`] after something else has its name.
    pub(super) fn doomed(&self, name: &str) -> Result<Option<File>, Failure> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => Ok(Some(File::from(fd))),
            Err(Errno::NOENT) => Ok(None),
            Err(e) => Err(failed("open", &self.shown(name), e.into())),
        }
    }
}

/// Overwrites a file in place and empties it. Where a file system or a disk writes elsewhere instead, as some do, the old blocks
/// are free and no more than that.
pub(super) fn destroy(mut file: File) -> io::Result<()> {
    let length = usize::try_from(file.metadata()?.len().min(MAX_BYTES)).unwrap_or(0);
    file.write_all(&vec![0; length])?;
    file.sync_all()?;
    file.set_len(0)?;
    file.sync_all()
}

pub(super) fn failed(action: &str, path: &Path, source: io::Error) -> Failure {
    let refused = source.kind() == io::ErrorKind::PermissionDenied;
    let failure = Failure::new(Exit::Internal, format!("failed to {action} {}: {source}", path.display()));
    if refused { failure.with_help("run it as root: `sudo plimsoll setup service`") } else { failure }
}

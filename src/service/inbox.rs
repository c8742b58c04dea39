//! What a client sent, in a private directory: from descriptors to files that nobody else can change.
//!
//! A descriptor may be anything: a FIFO that never ends, a file of a file system that its owner answers for, a handle that
//! gives no right to read. So each is looked at first ([`check`]): a regular file, opened for reading, on a file system whose
//! answers don't come from a user's process. Then a file's bytes are copied once, and a tree is unpacked by the jailed
//! helper; everything later reads the copy, by a path of our own.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, OFlags};

use super::request::{Kind, Request, Sent};
use crate::artifact::helper::{make_destination, unpack_in_helper};
use crate::artifact::{Budget, Error as ArtifactError, Purpose, unpack};
use crate::image::oci::registry::Name;
use crate::run::unpacker;
use crate::spec::{ArtifactSource, ImageSource, Kernel, Step};

/// How long all of it may take.
const DEADLINE: Duration = Duration::from_secs(600);
/// Copied at a time, bytes.
const CHUNK: usize = 1 << 20;

/// Why something that was sent can't be used.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// The descriptor.
    #[error("what was sent as `{name}` {why}")]
    Descriptor {
        /// What the client calls it.
        name: String,
        /// Why.
        why: String,
    },
    /// The tree in it.
    #[error("what was sent as `{name}` can't be unpacked")]
    Tree {
        /// What the client calls it.
        name: String,
        /// Why.
        #[source]
        source: ArtifactError,
    },
    /// The copy.
    #[error("failed to copy what was sent as `{name}`")]
    Copy {
        /// What the client calls it.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl Unusable {
    /// Whether it is the client's fault.
    #[must_use]
    pub const fn is_theirs(&self) -> bool {
        matches!(self, Self::Descriptor { .. } | Self::Tree { source: ArtifactError::Rejected(_), .. })
    }
}

/// The steps with paths of ours, and which of them stand for which of the client's.
#[derive(Debug)]
pub struct Received {
    /// Ready to run.
    pub steps: Vec<Step>,
    /// Our path, and what the client calls it; longer paths first.
    pub names: Vec<(String, String)>,
}

/// Takes in everything that the steps read. Blocks.
///
/// # Errors
/// As [`Unusable`] says; what was copied stays for whoever removes the directory.
pub fn receive(
    request: &Request,
    steps: &[Step],
    fds: &[OwnedFd],
    into: &Path,
    stop: &AtomicBool,
) -> Result<Received, Unusable> {
    let mut inbox = Inbox { fds, into, stop, until: Instant::now() + DEADLINE, known: HashMap::new() };
    let mut names = Vec::new();
    let mut ready = steps.to_vec();
    for (step, sent) in ready.iter_mut().zip(&request.steps) {
        if let Some(file) = &sent.artifact {
            let ours = inbox.take(file, Purpose::Artifact)?;
            match &mut step.artifact {
                ArtifactSource::Path(path) | ArtifactSource::PathWithDigest { path, .. } => {
                    names.push(renamed(path, ours))
                }
                forge @ (ArtifactSource::GitHub { .. } | ArtifactSource::GitLab { .. }) => {
                    names.push((ours.display().to_string(), forge.to_string()));
                    *forge = ArtifactSource::Path(ours);
                }
            }
        }
        if let Some(file) = &sent.image {
            let purpose = match &step.image {
                Some(ImageSource::Dir(_)) => Purpose::RootFs,
                _ => Purpose::Artifact,
            };
            let ours = inbox.take(file, purpose)?;
            match &mut step.image {
                Some(
                    ImageSource::Dir(path)
                    | ImageSource::Tar(path)
                    | ImageSource::DockerArchive(path)
                    | ImageSource::OciLayout { path, .. },
                ) => names.push(renamed(path, ours)),
                Some(ImageSource::Registry(reference)) => {
                    let reference = std::mem::take(reference);
                    // A digest in the name binds, whoever pulled it.
                    let named = Name::parse(&reference).ok().and_then(|name| name.digest());
                    step.image_digest = step.image_digest.or(named);
                    let layout = ImageSource::OciLayout { path: ours.clone(), tag: None };
                    names.push((layout.to_string(), reference.clone()));
                    names.push((ours.display().to_string(), reference));
                    step.image = Some(layout);
                }
                None | Some(ImageSource::Host) => {}
            }
        }
        // As an image's tree: a mount shows what is there, `.git` and links that lead out of it included.
        for (mount, file) in step.mounts.iter_mut().zip(&sent.mounts) {
            let ours = inbox.take(file, Purpose::RootFs)?;
            mount.sent_as = Some(mount.path.clone());
            names.push(renamed(&mut mount.path, ours));
        }
        if let (Some(file), Kernel::Path { path, .. }) = (&sent.kernel, &mut step.kernel) {
            names.push(renamed(path, inbox.take(file, Purpose::Artifact)?));
        }
    }
    names.sort_by_key(|(ours, _)| std::cmp::Reverse(ours.len()));
    names.dedup();
    Ok(Received { steps: ready, names })
}

fn renamed(path: &mut PathBuf, ours: PathBuf) -> (String, String) {
    let theirs = std::mem::replace(path, ours.clone());
    (ours.display().to_string(), theirs.display().to_string())
}

struct Inbox<'a> {
    fds: &'a [OwnedFd],
    into: &'a Path,
    stop: &'a AtomicBool,
    until: Instant,
    /// Several steps may read the same.
    known: HashMap<(u32, Kind, bool), PathBuf>,
}

impl Inbox<'_> {
    fn take(&mut self, sent: &Sent, purpose: Purpose) -> Result<PathBuf, Unusable> {
        let key = (sent.fd, sent.kind, purpose == Purpose::RootFs);
        if let Some(path) = self.known.get(&key) {
            return Ok(path.clone());
        }
        let name = crate::spec::place::shown(&sent.name);
        let refused = |why: &str| Unusable::Descriptor { name: name.clone(), why: why.to_owned() };
        let fd = usize::try_from(sent.fd).ok().and_then(|n| self.fds.get(n));
        let fd = fd.ok_or_else(|| refused("did not come along"))?;
        check(fd).map_err(refused)?;
        let copy = |source| Unusable::Copy { name: name.clone(), source };
        let file = File::from(fd.try_clone().map_err(copy)?);
        let place = self.into.join(self.known.len().to_string());
        DirBuilder::new().mode(0o700).create(&place).map_err(copy)?;
        let path = place.join(&sent.name);
        match sent.kind {
            Kind::File => self.copy(&file, &path).map_err(copy)?,
            Kind::Tree => {
                let destination = make_destination(&path).map_err(copy)?;
                let request = unpack::Request {
                    file_name: "tree".to_owned(),
                    executable: false,
                    purpose,
                    budget: Budget::default(),
                    sha256: None,
                };
                let left = self.until.saturating_duration_since(Instant::now());
                unpack_in_helper(&file, destination.as_fd(), &request, left, self.stop, unpacker::start)
                    .map_err(|source| Unusable::Tree { name: name.clone(), source })?;
                if purpose == Purpose::RootFs {
                    // Shown as it is, and written by nobody.
                    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).map_err(copy)?;
                }
            }
        }
        self.known.insert(key, path.clone());
        Ok(path)
    }

    /// Copies as many bytes as the file has now, without moving the offset that the client shares.
    fn copy(&self, from: &File, path: &Path) -> io::Result<()> {
        let meta = from.metadata()?;
        if meta.len() > Budget::default().bytes {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is larger than any artifact may be"));
        }
        // Whoever runs inside has another uid; the directory above keeps others out.
        let mode = if meta.mode() & 0o111 == 0 { 0o644 } else { 0o755 };
        let mut to = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        to.set_permissions(fs::Permissions::from_mode(mode))?;
        let mut buffer = vec![0; CHUNK];
        let mut at = 0;
        while at < meta.len() {
            if self.stop.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            if Instant::now() > self.until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let want = buffer.len().min(usize::try_from(meta.len() - at).unwrap_or(usize::MAX));
            let read = from.read_at(&mut buffer[..want], at)?;
            if read == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it became shorter meanwhile"));
            }
            to.write_all(&buffer[..read])?;
            at += read as u64;
        }
        Ok(())
    }
}

/// Whether a descriptor gives its sender's right to read a regular file, and reading it ends. Asks nothing of a file
/// system that a process answers for.
///
/// # Errors
/// What is wrong with it, as the end of a sentence.
pub fn check(fd: &OwnedFd) -> Result<(), &'static str> {
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|_| "is no open file")?;
    if flags.contains(OFlags::PATH) || !matches!(flags & OFlags::RWMODE, OFlags::RDONLY | OFlags::RDWR) {
        return Err("was not opened for reading");
    }
    let system = rustix::fs::fstatfs(fd).map_err(|_| "is on no file system that can be asked")?;
    if UNANSWERABLE.contains(&system.f_type) {
        return Err("is on a file system that a process or the kernel makes up (FUSE, /proc, /sys, …)");
    }
    let stat = rustix::fs::fstat(fd).map_err(|_| "can't be looked at")?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err("is no regular file");
    }
    Ok(())
}

/// Whether a descriptor's file system is one whose files a service does not take.
#[must_use]
pub fn is_made_up(fd: impl AsFd) -> bool {
    rustix::fs::fstatfs(fd).is_ok_and(|system| UNANSWERABLE.contains(&system.f_type))
}

/// Whether it is a FUSE file system: a client copies such files before it sends them.
#[must_use]
pub fn is_fuse(fd: impl AsFd) -> bool {
    rustix::fs::fstatfs(fd).is_ok_and(|system| system.f_type == FUSE)
}

/// A file system of a user's process.
const FUSE: rustix::fs::FsWord = 0x6573_5546;

/// File systems whose files are answered for by a user's process, or made up while they are read; from the kernel's
/// `include/uapi/linux/magic.h` and the file systems' own headers.
const UNANSWERABLE: [rustix::fs::FsWord; 11] = [
    FUSE,
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x6367_7270, // cgroup2
    0x0027_e0eb, // cgroup
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x1cd1,      // devpts
    0x5049_5045, // pipes
    0x534f_434b, // sockets
    0x0187,      // autofs
];

#[cfg(test)]
mod tests {
    use super::*;

    fn fd(file: impl Into<OwnedFd>) -> OwnedFd {
        file.into()
    }

    #[test]
    fn only_a_readable_regular_file_will_do() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        fs::write(&path, "x").unwrap();
        check(&fd(File::open(&path).unwrap())).unwrap();
        check(&fd(tempfile::tempfile().unwrap())).unwrap();
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        let handle = rustix::fs::open(&path, OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        let hostile: [(&str, OwnedFd); 9] = [
            ("a handle without rights", handle),
            ("written only", fd(File::options().write(true).open(&path).unwrap())),
            ("a FIFO that never ends", fd(File::options().read(true).write(true).open(&fifo).unwrap())),
            ("a directory", fd(File::open(dir.path()).unwrap())),
            ("an endless device", fd(File::open("/dev/zero").unwrap())),
            ("made up by the kernel", fd(File::open("/proc/self/environ").unwrap())),
            ("the service's own memory", fd(File::open("/proc/self/mem").unwrap())),
            ("a socket", fd(std::os::unix::net::UnixStream::pair().unwrap().0)),
            ("a pipe", fd(std::io::pipe().unwrap().0)),
        ];
        for (what, fd) in hostile {
            assert!(check(&fd).is_err(), "{what}");
        }
    }

    #[test]
    fn a_copy_is_whole_and_ours_and_can_be_stopped() {
        let (dir, sent) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = sent.path().join("tool");
        fs::write(&path, vec![9; CHUNK + 17]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let fds = [fd(File::open(&path).unwrap())];
        let stop = AtomicBool::new(false);
        let mut inbox =
            Inbox { fds: &fds, into: dir.path(), stop: &stop, until: Instant::now() + DEADLINE, known: HashMap::new() };
        let file = Sent { fd: 0, kind: Kind::File, name: "tool".to_owned() };
        let copy = inbox.take(&file, Purpose::Artifact).unwrap();
        assert_eq!(fs::read(&copy).unwrap(), fs::read(&path).unwrap());
        assert_eq!(fs::metadata(&copy).unwrap().mode() & 0o777, 0o755);
        assert_eq!(inbox.take(&file, Purpose::Artifact).unwrap(), copy, "taken once");
        stop.store(true, Ordering::Relaxed);
        assert!(inbox.take(&file, Purpose::RootFs).is_err());
        assert!(inbox.take(&Sent { fd: 5, ..file }, Purpose::Artifact).is_err());
    }
}

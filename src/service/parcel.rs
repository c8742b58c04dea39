//! What goes with a request: descriptors of everything that its steps name, opened with the caller's own rights.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use rustix::fs::{FileType, Mode, OFlags};

use super::client::Ask;
use super::gather::Gathered;
use super::inbox;
use super::pack::{self, PackError};
use super::protocol::{MAX_FDS, MAX_REQUEST};
use super::request::{Kind, Request, Sent, SentStep};
use crate::artifact::{FileId, Purpose};
use crate::exit::Exit;
use crate::spec::{ArtifactSource, ImageSource, Kernel, Step, wire};

/// Why something that a step names can't be sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// It can't be opened or read.
    #[error("{path} can't be read")]
    Unreadable {
        /// What.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is none of the user's files, but says things of this process and its host.
    #[error("{path} is made up by the kernel, and may say things of this job")]
    MadeUp {
        /// What.
        path: PathBuf,
    },
    /// It is nothing that is sent.
    #[error("{path} is neither a file nor a directory")]
    Kind {
        /// What.
        path: PathBuf,
    },
    /// A directory in which something can't be sent.
    #[error("{path} can't be sent")]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: PackError,
    },
    /// There is no room for what has to be copied or fetched first.
    #[error("failed to write in the temporary directory {dir}")]
    Temporary {
        /// Where.
        dir: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is on another machine and does not come from there.
    #[error("{message}")]
    Missing {
        /// The exit code.
        exit: Exit,
        /// `artifact` or `image`.
        stage: &'static str,
        /// The stable word.
        reason: &'static str,
        /// A lowercase fragment.
        message: String,
        /// What to do.
        help: String,
    },
    /// Too much at once.
    #[error("the steps name more than {MAX_FDS} files and directories, or are longer than {MAX_REQUEST} bytes")]
    TooMuch,
}

/// What goes with a request, once each.
pub(super) struct Parcel<'a> {
    ask: &'a Ask,
    gathered: &'a Gathered,
    stop: &'a AtomicBool,
    exclude: Vec<FileId>,
    fds: Vec<OwnedFd>,
    /// By path and purpose: which descriptor, and what it holds.
    known: BTreeMap<(PathBuf, bool), (u32, Kind)>,
}

impl<'a> Parcel<'a> {
    /// Opens and packs it all; ends early when `stop` is set.
    pub(super) fn of(
        ask: &'a Ask,
        gathered: &'a Gathered,
        stop: &'a AtomicBool,
    ) -> Result<(Request, Vec<OwnedFd>), SendError> {
        let exclude =
            ask.exclude.iter().filter_map(|path| File::open(path).ok()).filter_map(|dir| FileId::of(dir).ok());
        let mut parcel =
            Parcel { ask, gathered, stop, exclude: exclude.collect(), fds: Vec::new(), known: BTreeMap::new() };
        let mut steps = Vec::new();
        for step in &ask.steps {
            steps.push(parcel.step(step)?);
        }
        let request = Request {
            steps,
            jobs: u16::try_from(ask.jobs).unwrap_or(u16::MAX),
            platform: ask.platform.clone(),
            ci: ask.ci.clone(),
            runner: ask.runner.clone(),
        };
        Ok((request, parcel.fds))
    }

    fn step(&mut self, step: &Step) -> Result<SentStep, SendError> {
        let gathered = self.gathered;
        let artifact = match &step.artifact {
            ArtifactSource::Path(path) | ArtifactSource::PathWithDigest { path, .. } => Some(path.as_path()),
            forge @ (ArtifactSource::GitHub { .. } | ArtifactSource::GitLab { .. }) => gathered.artifact(forge),
        };
        let artifact = artifact.map(|path| self.add(path, Purpose::Artifact)).transpose()?;
        let image = match &step.image {
            None | Some(ImageSource::Host) => None,
            Some(ImageSource::Registry(reference)) => {
                let layout = gathered.image(reference, step.image_digest);
                layout.map(|path| self.add(path, Purpose::Artifact)).transpose()?
            }
            Some(ImageSource::Dir(path)) => Some(self.add(path, Purpose::RootFs)?),
            Some(ImageSource::Tar(path) | ImageSource::DockerArchive(path) | ImageSource::OciLayout { path, .. }) => {
                Some(self.add(path, Purpose::Artifact)?)
            }
        };
        let kernel = match &step.kernel {
            Kernel::Distro => None,
            Kernel::Path { path, .. } => Some(self.add(path, Purpose::Artifact)?),
        };
        // A mount shows what is there, as an image does.
        let mounts = step.mounts.iter().map(|mount| self.add(&mount.path, Purpose::RootFs));
        let mounts = mounts.collect::<Result<_, _>>()?;
        let index = u32::try_from(step.index).unwrap_or(u32::MAX);
        Ok(SentStep { index, step: wire::to_raw(step), artifact, image, kernel, mounts })
    }

    fn add(&mut self, path: &Path, purpose: Purpose) -> Result<Sent, SendError> {
        let key = (path.to_owned(), purpose == Purpose::RootFs);
        let (fd, kind) = match self.known.get(&key) {
            Some(known) => *known,
            None => {
                if self.fds.len() == MAX_FDS {
                    return Err(SendError::TooMuch);
                }
                let (fd, kind) = self.open(path, purpose)?;
                self.fds.push(fd);
                let number = u32::try_from(self.fds.len() - 1).unwrap_or(u32::MAX);
                self.known.insert(key, (number, kind));
                (number, kind)
            }
        };
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(Sent { fd, kind, name: name.unwrap_or_else(|| "artifact".to_owned()) })
    }

    fn open(&self, path: &Path, purpose: Purpose) -> Result<(OwnedFd, Kind), SendError> {
        let unreadable = |source: io::Error| SendError::Unreadable { path: path.to_owned(), source };
        let temporary = |source: io::Error| SendError::Temporary { dir: self.ask.temp.clone(), source };
        // NONBLOCK: it may be a FIFO.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| unreadable(e.into()))?;
        let stat = rustix::fs::fstat(&fd).map_err(|e| unreadable(e.into()))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile if inbox::is_fuse(&fd) => {
                // The service takes no file that a process answers for; a copy is as good.
                let mut copy = pack::unnamed(&self.ask.temp).map_err(temporary)?;
                let size = u64::try_from(stat.st_size).unwrap_or(0);
                io::copy(&mut File::from(fd).take(size), &mut copy).map_err(unreadable)?;
                if stat.st_mode & 0o111 != 0 {
                    rustix::fs::fchmod(&copy, Mode::RWXU).map_err(|e| unreadable(e.into()))?;
                }
                Ok((copy.into(), Kind::File))
            }
            // What the kernel makes up says things of this process: `/proc/self/environ` holds the job's secrets.
            FileType::RegularFile if inbox::is_made_up(&fd) => Err(SendError::MadeUp { path: path.to_owned() }),
            FileType::RegularFile => Ok((fd, Kind::File)),
            FileType::Directory => match pack::pack(fd.as_fd(), purpose, &self.exclude, &self.ask.temp, self.stop) {
                Ok(packed) => Ok((packed.into(), Kind::Tree)),
                Err(PackError::Write(source)) => Err(temporary(source)),
                Err(source) => Err(SendError::Directory { path: path.to_owned(), source }),
            },
            _ => Err(SendError::Kind { path: path.to_owned() }),
        }
    }
}

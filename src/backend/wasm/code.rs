//! The guest's program on the runner's side: its file, and the memory file in which compiled code is handed over.
//!
//! Both are bytes here, hashed and copied; nothing of them is parsed. Trusts: nothing in them.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, memfd_create, open};
use sha2::{Digest, Sha256};

/// How much is read and hashed at once, bytes: what stays in the processor's cache.
const PIECE: usize = 256 << 10;

/// A WebAssembly program that a step names, as an open file.
#[derive(Debug, Clone)]
pub struct ModuleFile {
    file: Arc<File>,
    bytes: u64,
}

impl ModuleFile {
    /// The program in a regular file.
    ///
    /// # Errors
    /// If its size cannot be read.
    pub fn new(file: File) -> io::Result<Self> {
        let bytes = file.metadata()?.len();
        Ok(Self { file: Arc::new(file), bytes })
    }

    /// A program that is in memory already.
    ///
    /// # Errors
    /// If there is no memory for a copy.
    pub fn of_bytes(bytes: &[u8]) -> io::Result<Self> {
        let mut file = File::from(memory_file("plimsoll-module")?);
        file.write_all(bytes)?;
        Self::new(file)
    }

    /// Size, bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Its SHA-256.
    pub(super) fn sha256(&self) -> io::Result<[u8; 32]> {
        let (mut hasher, mut piece, mut at) = (Sha256::new(), vec![0u8; PIECE], 0);
        loop {
            match self.file.read_at(&mut piece, at) {
                Ok(0) => return Ok(hasher.finalize().into()),
                Ok(n) => {
                    hasher.update(&piece[..n]);
                    at += n as u64;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// All of it, and not a byte more than it had at first.
    pub(super) fn read(&self) -> io::Result<Vec<u8>> {
        let size = usize::try_from(self.bytes).map_err(io::Error::other)?;
        let mut code = vec![0u8; size];
        self.file.read_exact_at(&mut code, 0)?;
        Ok(code)
    }
}

/// A memory file that a worker can read and the runner fills: empty when the worker is jailed, unchangeable from when it
/// is told to look.
#[derive(Debug)]
pub(super) struct Handover(File);

impl Handover {
    /// An empty one, and the worker's read-only descriptor of it.
    pub(super) fn new() -> io::Result<(Self, OwnedFd)> {
        let file = memory_file("plimsoll-code")?;
        // Opened again, since a copy of the descriptor could write.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let reader = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok((Self(File::from(file)), reader))
    }

    /// Where to write.
    pub(super) const fn file(&self) -> &File {
        &self.0
    }

    /// Nobody can change it any more, the runner included.
    pub(super) fn seal(&self) -> io::Result<()> {
        let all = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        Ok(fcntl_add_seals(&self.0, all)?)
    }
}

/// What a worker was handed, whole.
pub(super) fn read_handed_over(mut file: &File) -> io::Result<Vec<u8>> {
    let mut code = vec![0u8; usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?];
    file.read_exact(&mut code)?;
    Ok(code)
}

fn memory_file(name: &str) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Nobody executes it as a program; some hosts insist that this is said, and older kernels do not know the word.
    memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL).or_else(|_| memfd_create(name, flags)).map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_hashed_and_read_without_moving_a_shared_position() {
        let module = ModuleFile::of_bytes(b"module").unwrap();
        for _ in 0..2 {
            assert_eq!(module.sha256().unwrap(), <[u8; 32]>::from(Sha256::digest(b"module")));
            assert_eq!(module.read().unwrap(), b"module");
        }
        assert_eq!(module.bytes(), 6);
    }

    #[test]
    fn a_module_that_shrank_is_no_shorter_program() {
        let file = tempfile::tempfile().unwrap();
        (&file).write_all(b"whole").unwrap();
        let module = ModuleFile::new(file.try_clone().unwrap()).unwrap();
        file.set_len(2).unwrap();
        assert!(module.read().is_err());
    }

    #[test]
    fn what_is_handed_over_can_be_written_by_the_runner_only_and_by_nobody_once_sealed() {
        let (handover, reader) = Handover::new().unwrap();
        let reader = File::from(reader);
        assert!((&reader).write_all(b"x").is_err(), "the worker's descriptor");
        handover.file().write_all(b"code").unwrap();
        handover.seal().unwrap();
        assert!(handover.file().write_all(b"more").is_err());
        assert!(handover.file().set_len(0).is_err());
        assert_eq!(read_handed_over(&reader).unwrap(), b"code");
    }
}

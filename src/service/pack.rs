//! A directory as one file, to be sent: a tar in a temporary file without a name.
//!
//! This is the client's side, with the caller's own rights; nothing in the directory is parsed, and no link is followed.
//! What an artifact never carries ([`crate::artifact::directory`]) is left out here already, so that a checkout's token does
//! not even leave the job. The same directory gives the same bytes: names in order, no times, no owners.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::artifact::beneath::confined;
use crate::artifact::{FileId, Purpose};

/// Size of a tar's blocks, bytes.
const BLOCK: usize = 512;
/// Deepest nesting; the receiver allows no more.
const MAX_DEPTH: usize = 64;
/// Bytes read at a time.
const CHUNK: usize = 256 * 1024;

/// Why a directory can't be sent.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// Something in it.
    #[error("`{path}` {why}")]
    Member {
        /// Below the directory.
        path: String,
        /// Why.
        why: String,
    },
    /// The file that it goes into.
    #[error("failed to write the copy of it")]
    Write(#[from] io::Error),
    /// Nobody wants it any more.
    #[error("was stopped")]
    Stopped,
}

/// Packs the directory into a file that has no name, in `temp`; ends early when `stop` is set.
///
/// # Errors
/// As [`PackError`] says.
pub fn pack(
    directory: BorrowedFd<'_>,
    purpose: Purpose,
    exclude: &[FileId],
    temp: &Path,
    stop: &AtomicBool,
) -> Result<File, PackError> {
    let file = unnamed(temp)?;
    let mut packer = Packer { tar: BufWriter::with_capacity(1 << 20, &file), purpose, exclude, stop };
    let root = open(directory, b".", OFlags::DIRECTORY).map_err(|e| member(b".", e.to_string()))?;
    packer.directory(&root, &mut Vec::new(), 0)?;
    packer.tar.write_all(&[0; 2 * BLOCK])?;
    packer.tar.flush()?;
    drop(packer);
    Ok(file)
}

/// A file without a name; where the file system has no such thing, one that loses its name at once.
///
/// # Errors
/// If it can't be made.
pub fn unnamed(dir: &Path) -> io::Result<File> {
    let mode = Mode::RUSR | Mode::WUSR;
    match rustix::fs::open(dir, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode) {
        Ok(fd) => Ok(fd.into()),
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => tempfile::tempfile_in(dir),
        Err(error) => Err(error.into()),
    }
}

struct Packer<'a, W> {
    tar: W,
    purpose: Purpose,
    exclude: &'a [FileId],
    stop: &'a AtomicBool,
}

fn member(path: &[u8], why: impl Into<String>) -> PackError {
    PackError::Member { path: crate::artifact::rejection::shown(path), why: why.into() }
}

fn open(at: BorrowedFd<'_>, name: &[u8], flags: OFlags) -> rustix::io::Result<OwnedFd> {
    // NONBLOCK: it may have become a FIFO.
    let flags = flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    confined(at, name, flags, Mode::empty())
}

impl<W: Write> Packer<'_, W> {
    fn go_on(&self) -> Result<(), PackError> {
        if self.stop.load(Ordering::Relaxed) { Err(PackError::Stopped) } else { Ok(()) }
    }

    fn directory(&mut self, fd: &OwnedFd, path: &mut Vec<u8>, depth: usize) -> Result<(), PackError> {
        if depth > MAX_DEPTH {
            return Err(member(path, format!("is more than {MAX_DEPTH} directories deep")));
        }
        let unreadable = |path: &[u8], e: Errno| member(path, format!("can't be read: {}", io::Error::from(e)));
        let mut names = Vec::new();
        for entry in Dir::read_from(fd).map_err(|e| unreadable(path, e))? {
            let entry = entry.map_err(|e| unreadable(path, e))?;
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                names.push(name.to_vec());
            }
        }
        names.sort();
        for name in names {
            let length = path.len();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(&name);
            self.entry(fd.as_fd(), &name, path, depth)?;
            path.truncate(length);
        }
        Ok(())
    }

    fn entry(&mut self, at: BorrowedFd<'_>, name: &[u8], path: &mut Vec<u8>, depth: usize) -> Result<(), PackError> {
        self.go_on()?;
        let artifact = self.purpose == Purpose::Artifact;
        if artifact && name.eq_ignore_ascii_case(b".git") {
            return Ok(());
        }
        let failed = |path: &[u8], e: Errno| member(path, format!("can't be read: {}", io::Error::from(e)));
        let stat = rustix::fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW).map_err(|e| failed(path, e))?;
        if self.exclude.contains(&FileId::from(&stat)) {
            return Ok(());
        }
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let fd = open(at, name, OFlags::DIRECTORY).map_err(|e| failed(path, e))?;
                path.push(b'/');
                self.header(path, b'5', 0o755, 0, b"")?;
                path.pop();
                self.directory(&fd, path, depth + 1)
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(at, name, Vec::new()).map_err(|e| failed(path, e))?;
                Ok(self.header(path, b'2', 0o777, 0, target.to_bytes())?)
            }
            FileType::RegularFile => {
                let fd = open(at, name, OFlags::empty()).map_err(|e| failed(path, e))?;
                self.file(fd, path)
            }
            // An image's devices and sockets are nothing that a boundary shows.
            _ if !artifact => Ok(()),
            _ => Err(member(path, "is a socket, FIFO or device, which is never copied")),
        }
    }

    fn file(&mut self, fd: OwnedFd, path: &[u8]) -> Result<(), PackError> {
        let stat = rustix::fs::fstat(&fd).map_err(|e| member(path, e.to_string()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(member(path, "became something else while it was copied"));
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let mode = if stat.st_mode & 0o111 == 0 { 0o644 } else { 0o755 };
        self.header(path, b'0', mode, size, b"")?;
        let mut input = File::from(fd).take(size);
        let mut chunk = vec![0; CHUNK];
        while input.limit() > 0 {
            self.go_on()?;
            match input.read(&mut chunk) {
                Ok(0) => return Err(member(path, "became shorter while it was copied")),
                Ok(length) => self.tar.write_all(&chunk[..length])?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(member(path, format!("can't be read: {e}"))),
            }
        }
        Ok(self.pad(size)?)
    }

    /// A ustar header (POSIX.1-2008, pax), with a pax header before it for what does not fit.
    fn header(&mut self, path: &[u8], kind: u8, mode: u32, size: u64, target: &[u8]) -> io::Result<()> {
        let mut records = Vec::new();
        if path.len() > 100 {
            record(&mut records, "path", path);
        }
        if target.len() > 100 {
            record(&mut records, "linkpath", target);
        }
        if size > 0o777_7777_7777 {
            record(&mut records, "size", size.to_string().as_bytes());
        }
        if !records.is_empty() {
            let length = records.len() as u64;
            self.tar.write_all(&block(b"pax", b'x', 0o644, length, b""))?;
            self.tar.write_all(&records)?;
            self.pad(length)?;
        }
        self.tar.write_all(&block(path, kind, mode, size, target))
    }

    fn pad(&mut self, size: u64) -> io::Result<()> {
        let over = usize::try_from(size % BLOCK as u64).unwrap_or(0);
        if over == 0 { Ok(()) } else { self.tar.write_all(&[0; BLOCK][over..]) }
    }
}

/// A pax record: its own length in decimal, a space, `key=value`, a line feed.
fn record(records: &mut Vec<u8>, key: &str, value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest;
    while length.to_string().len() + rest > length {
        length += 1;
    }
    records.extend_from_slice(format!("{length} {key}=").as_bytes());
    records.extend_from_slice(value);
    records.push(b'\n');
}

fn block(path: &[u8], kind: u8, mode: u32, size: u64, target: &[u8]) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &path[..path.len().min(100)]);
    put(100, format!("{mode:07o}").as_bytes());
    put(108, b"0000000");
    put(116, b"0000000");
    put(124, format!("{:011o}", size.min(0o777_7777_7777)).as_bytes());
    put(136, b"00000000000");
    put(148, b"        ");
    put(156, &[kind]);
    put(157, &target[..target.len().min(100)]);
    put(257, b"ustar\x0000");
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::io::Seek;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn packed(dir: &Path, exclude: &[FileId]) -> Result<Vec<u8>, PackError> {
        let temp = tempfile::tempdir().unwrap();
        let go_on = AtomicBool::new(false);
        let mut file = pack(File::open(dir).unwrap().as_fd(), Purpose::Artifact, exclude, temp.path(), &go_on)?;
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 0, "the file has no name");
        let mut bytes = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut bytes).unwrap();
        Ok(bytes)
    }

    #[test]
    fn another_reader_finds_what_was_packed() {
        let dir = tempfile::tempdir().unwrap();
        let long = "a".repeat(90);
        fs::create_dir_all(dir.path().join(&long).join("deep/.git")).unwrap();
        fs::create_dir(dir.path().join("report")).unwrap();
        fs::write(dir.path().join(&long).join("deep/file"), vec![7; 1000]).unwrap();
        fs::write(dir.path().join(&long).join("deep/.git/config"), "token").unwrap();
        fs::write(dir.path().join("report/report.json"), "{}").unwrap();
        fs::write(dir.path().join("run.sh"), "").unwrap();
        fs::set_permissions(dir.path().join("run.sh"), fs::Permissions::from_mode(0o751)).unwrap();
        symlink("b".repeat(150), dir.path().join("link")).unwrap();
        let exclude = [FileId::of(File::open(dir.path().join("report")).unwrap()).unwrap()];
        let bytes = packed(dir.path(), &exclude).unwrap();
        let mut archive = tar::Archive::new(bytes.as_slice());
        let mut found = BTreeMap::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            let link = entry.link_name().unwrap().map(|l| l.display().to_string().len());
            let path = entry.path().unwrap().display().to_string();
            found.insert(path, (entry.header().mode().unwrap(), content.len(), link));
        }
        let expected = BTreeMap::from([
            (format!("{long}/"), (0o755, 0, None)),
            (format!("{long}/deep/"), (0o755, 0, None)),
            (format!("{long}/deep/file"), (0o644, 1000, None)),
            ("link".to_owned(), (0o777, 0, Some(150))),
            ("run.sh".to_owned(), (0o755, 0, None)),
        ]);
        let trimmed = |map: BTreeMap<String, (u32, usize, Option<usize>)>| -> BTreeMap<String, _> {
            map.into_iter().map(|(path, rest)| (path.trim_end_matches('/').to_owned(), rest)).collect()
        };
        assert_eq!(trimmed(found), trimmed(expected));
        assert_eq!(bytes, packed(dir.path(), &exclude).unwrap(), "the same bytes again");
    }

    #[test]
    fn it_ends_early_and_tells_a_full_disk_from_a_bad_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "x").unwrap();
        let open = File::open(dir.path()).unwrap();
        let pack = |temp: &str, stop| {
            pack(open.as_fd(), Purpose::Artifact, &[], Path::new(temp), &AtomicBool::new(stop)).unwrap_err()
        };
        assert!(matches!(pack("/tmp", true), PackError::Stopped));
        assert!(matches!(pack("/nowhere", false), PackError::Write(_)));
    }

    #[test]
    fn what_an_artifact_never_has_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("sock")).unwrap();
        let error = packed(dir.path(), &[]).unwrap_err().to_string();
        assert!(error.contains("sock") && error.contains("never copied"), "{error}");
    }

    #[test]
    fn a_record_says_its_own_length() {
        for length in [1, 90, 91, 92, 93, 989, 990, 991] {
            let mut records = Vec::new();
            record(&mut records, "path", &vec![b'x'; length]);
            let said: usize = std::str::from_utf8(&records).unwrap().split(' ').next().unwrap().parse().unwrap();
            assert_eq!(said, records.len());
        }
    }
}

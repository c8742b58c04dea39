//! `/proc/<pid>` read through one directory descriptor, so that every fact is about the same process.
//!
//! The descriptor keeps pointing at the process it was opened for: when that process is gone, reads fail with `ESRCH`
//! even if its pid is in use again (proc(5)). A pidfd, alive before and after, says that nothing was missed.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{AtFlags, Dir, Mode, OFlags, openat, readlinkat, statat};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use sha2::{Digest, Sha256};

/// No file below `/proc/<pid>` that we read is longer; a process cannot make the runner read without end.
const MAX_FILE: u64 = 4 * 1024 * 1024;

/// One process, held.
#[derive(Debug)]
pub struct ProcDir {
    pid: u32,
    dir: OwnedFd,
    pidfd: OwnedFd,
}

/// `device:inode`, the identity of a file.
pub type FileId = (u64, u64);

/// What `status` says of one thread.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    fields: BTreeMap<String, String>,
}

impl Status {
    pub(super) fn parse(text: &str) -> Self {
        let fields = text
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(key, value)| (key.to_owned(), value.trim().to_owned()))
            .collect();
        Self { fields }
    }

    /// A field's text.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.fields.get(key).map(String::as_str)
    }

    /// A field as numbers, empty if it is absent or something else.
    #[must_use]
    pub fn numbers(&self, key: &str) -> Vec<u32> {
        let parse = |text: &str| text.split_whitespace().map(str::parse).collect::<Result<Vec<u32>, _>>().ok();
        self.get(key).and_then(parse).unwrap_or_default()
    }

    /// A field as one hexadecimal mask.
    #[must_use]
    pub fn mask(&self, key: &str) -> Option<u64> {
        self.get(key).and_then(|text| u64::from_str_radix(text, 16).ok())
    }
}

/// One line of `mountinfo` (proc_pid_mountinfo(5)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Mount id.
    pub id: u64,
    /// `major:minor` of the file system.
    pub device: String,
    /// Directory of the file system that is mounted.
    pub root: String,
    /// Where, relative to the process's root.
    pub point: String,
    /// Per-mount options, such as `ro,nosuid`.
    pub options: String,
    /// File system type.
    pub kind: String,
}

impl Mount {
    fn parse(line: &str) -> Option<Self> {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ');
        let id = left.next()?.parse().ok()?;
        let device = left.nth(1)?.to_owned();
        let root = unescape(left.next()?);
        let point = unescape(left.next()?);
        let options = left.next()?.to_owned();
        Some(Self { id, device, root, point, options, kind: right.split(' ').next()?.to_owned() })
    }

    /// Whether the mount itself is read-only.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.options.split(',').any(|o| o == "ro")
    }
}

/// The four characters that mountinfo writes in octal.
fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

/// One open descriptor of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Descriptor {
    /// Number.
    pub number: u32,
    /// What the link says, such as `pipe:[123]` or a path.
    pub link: String,
    /// `mnt_id` of `fdinfo`, if there is one.
    pub mount: Option<u64>,
}

impl ProcDir {
    /// Holds the process `pid`.
    ///
    /// # Errors
    /// If there is no such process or `/proc` does not show it.
    pub fn open(pid: u32) -> io::Result<Self> {
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        let pidfd = pidfd_open(raw, PidfdFlags::empty())?;
        let dir = openat(
            rustix::fs::CWD,
            format!("/proc/{pid}"),
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let held = Self { pid, dir, pidfd };
        if held.alive() { Ok(held) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
    }

    /// The runner itself.
    ///
    /// # Errors
    /// If `/proc` is not mounted.
    pub fn own() -> io::Result<Self> {
        Self::open(std::process::id())
    }

    /// Process id, in the runner's pid namespace.
    #[must_use]
    pub const fn pid(&self) -> u32 {
        self.pid
    }

    /// The pidfd, for signals and waiting.
    #[must_use]
    pub const fn pidfd(&self) -> &OwnedFd {
        &self.pidfd
    }

    /// Whether the process still runs (a zombie does not).
    #[must_use]
    pub fn alive(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0))
    }

    fn file(&self, path: &str) -> io::Result<File> {
        Ok(File::from(openat(&self.dir, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?))
    }

    /// A file's text, bounded.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn text(&self, path: &str) -> io::Result<String> {
        let mut bytes = Vec::new();
        self.file(path)?.take(MAX_FILE).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// A file's bytes, bounded.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn bytes(&self, path: &str) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.file(path)?.take(MAX_FILE).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Where a link points.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn link(&self, path: &str) -> io::Result<String> {
        let target = readlinkat(&self.dir, path, Vec::new())?;
        Ok(OsStr::from_bytes(target.as_bytes()).to_string_lossy().into_owned())
    }

    /// Identity of the file that a (magic) link leads to.
    ///
    /// # Errors
    /// If it cannot be followed.
    pub fn file_id(&self, path: &str) -> io::Result<FileId> {
        let stat = statat(&self.dir, path, AtFlags::empty())?;
        Ok((stat.st_dev, stat.st_ino))
    }

    /// SHA-256 of the executable, read through `exe`.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn exe_sha256(&self) -> io::Result<String> {
        executable_sha256(&self.file("exe")?)
    }

    /// Names in a directory, sorted as numbers where they are numbers.
    fn entries(&self, path: &str) -> io::Result<Vec<u32>> {
        let dir = openat(&self.dir, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let mut numbers = Vec::new();
        for entry in Dir::read_from(dir.as_fd())? {
            if let Ok(number) = entry?.file_name().to_string_lossy().parse() {
                numbers.push(number);
            }
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// `status` of the process.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn status(&self) -> io::Result<Status> {
        Ok(Status::parse(&self.text("status")?))
    }

    /// `status` of every thread. A thread that ends meanwhile is left out.
    ///
    /// # Errors
    /// If the list cannot be read.
    pub fn threads(&self) -> io::Result<Vec<Status>> {
        let mut threads = Vec::new();
        for tid in self.entries("task")? {
            match self.text(&format!("task/{tid}/status")) {
                Ok(text) => threads.push(Status::parse(&text)),
                Err(e) if gone(&e) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(threads)
    }

    /// Start time in clock ticks since boot and parent pid (fields 22 and 4 of `stat`).
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn start_and_parent(&self) -> io::Result<(u64, u32)> {
        let text = self.text("stat")?;
        // The command name is in parentheses and may hold anything, so count from its end.
        let rest = text.rsplit_once(')').map_or("", |(_, rest)| rest);
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let field = |n: usize| fields.get(n - 3).and_then(|f| f.parse::<u64>().ok());
        match (field(22), field(4)) {
            (Some(start), Some(parent)) => Ok((start, u32::try_from(parent).unwrap_or(0))),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "unexpected format of stat")),
        }
    }

    /// Time that the process's threads spent running a virtual CPU, clock ticks (field 43 of each thread's `stat`).
    ///
    /// # Errors
    /// If the list of threads cannot be read.
    pub fn guest_ticks(&self) -> io::Result<u64> {
        let mut ticks = 0;
        for tid in self.entries("task")? {
            let Ok(text) = self.text(&format!("task/{tid}/stat")) else { continue };
            let rest = text.rsplit_once(')').map_or("", |(_, rest)| rest);
            ticks += rest.split_whitespace().nth(43 - 3).and_then(|f| f.parse::<u64>().ok()).unwrap_or(0);
        }
        Ok(ticks)
    }

    /// Mounts of the process's namespace.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn mounts(&self) -> io::Result<Vec<Mount>> {
        Ok(self.text("mountinfo")?.lines().filter_map(Mount::parse).collect())
    }

    /// Open descriptors. One that is closed meanwhile is left out.
    ///
    /// # Errors
    /// If they may not be read.
    pub fn descriptors(&self) -> io::Result<Vec<Descriptor>> {
        let mut all = Vec::new();
        for number in self.entries("fd")? {
            let link = match self.link(&format!("fd/{number}")) {
                Ok(link) => link,
                Err(e) if gone(&e) => continue,
                Err(e) => return Err(e),
            };
            let mount = self.text(&format!("fdinfo/{number}")).ok().and_then(|text| {
                text.lines().find_map(|l| l.strip_prefix("mnt_id:")).and_then(|id| id.trim().parse().ok())
            });
            all.push(Descriptor { number, link, mount });
        }
        Ok(all)
    }

    /// Names of network interfaces in the process's namespace, sorted.
    ///
    /// # Errors
    /// If `net/dev` cannot be read.
    pub fn interfaces(&self) -> io::Result<Vec<String>> {
        let text = self.text("net/dev")?;
        let mut names: Vec<_> =
            text.lines().skip(2).filter_map(|l| l.split_once(':')).map(|(name, _)| name.trim().to_owned()).collect();
        names.sort();
        Ok(names)
    }
}

/// Whether an error says that a process, thread or descriptor went away.
#[must_use]
pub fn gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// SHA-256 of what is left in a reader, lowercase hex.
///
/// # Errors
/// If reading fails.
pub fn hash(from: &mut impl Read) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 256 * 1024];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(hex::encode(hasher.finalize())),
            Ok(n) => hasher.update(&buffer[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// SHA-256 of a whole executable file, lowercase hex; its position is left alone.
///
/// A digest is remembered for the inode with this size and these times: an engine's executable is looked at several times
/// in a run, and tens of megabytes take longer to hash than all other facts to read. The kernel lets nobody write to a
/// file while it is executed, and a write at any other time changes `ctime`, which nobody can set.
///
/// # Errors
/// If it cannot be read.
pub fn executable_sha256(file: &File) -> io::Result<String> {
    type Version = (u64, u64, u64, (i64, i64), (i64, i64));
    static KNOWN: Mutex<BTreeMap<Version, String>> = Mutex::new(BTreeMap::new());
    let version = |file: &File| -> io::Result<Version> {
        let m = file.metadata()?;
        Ok((m.dev(), m.ino(), m.len(), (m.mtime(), m.mtime_nsec()), (m.ctime(), m.ctime_nsec())))
    };
    let before = version(file)?;
    // Held while hashing: whoever wants the same digest meanwhile waits for it instead of computing it too.
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(digest) = known.get(&before) {
        return Ok(digest.clone());
    }
    let digest = hash(&mut At { file, offset: 0 })?;
    if version(file)? == before {
        known.insert(before, digest.clone());
    }
    Ok(digest)
}

/// Reads a shared file without moving its position.
struct At<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read_at(buffer, self.offset)?;
        self.offset += n as u64;
        Ok(n)
    }
}

/// `device:inode` as reports write it.
#[must_use]
pub fn file_id_text((device, inode): FileId) -> String {
    format!("{device}:{inode}")
}

/// Every process that `/proc` shows.
///
/// # Errors
/// If `/proc` cannot be listed.
pub fn all_pids() -> io::Result<Vec<u32>> {
    let mut pids = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        if let Ok(pid) = entry?.file_name().to_string_lossy().parse() {
            pids.push(pid);
        }
    }
    Ok(pids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_line_is_read_with_its_escapes() {
        let line = "36 35 98:0 /mnt1 /mnt\\0402 ro,noatime master:1 - ext3 /dev/root rw,errors=continue";
        let mount = Mount::parse(line).unwrap();
        assert_eq!((mount.id, mount.device.as_str(), mount.point.as_str()), (36, "98:0", "/mnt 2"));
        assert!(mount.read_only());
        assert_eq!(mount.kind, "ext3");
        assert!(Mount::parse("nonsense").is_none());
    }

    #[test]
    fn our_own_process_can_be_read_and_a_missing_one_not() {
        let own = ProcDir::own().unwrap();
        assert!(own.alive());
        assert!(own.start_and_parent().unwrap().0 > 0);
        assert!(!own.threads().unwrap().is_empty());
        assert!(own.descriptors().unwrap().iter().any(|d| d.number == 2));
        assert_eq!(own.exe_sha256().unwrap().len(), 64);
        assert!(ProcDir::open(u32::MAX).is_err());
    }

    #[test]
    fn a_changed_executable_has_another_digest() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        let digest = || executable_sha256(&File::open(&path).unwrap()).unwrap();
        std::fs::write(&path, "one").unwrap();
        let one = digest();
        assert_eq!(one, hex::encode(Sha256::digest("one")));
        assert_eq!(one, digest(), "remembered");
        // The same size, in place: only the times tell.
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::write(&path, "two").unwrap();
        assert_eq!(digest(), hex::encode(Sha256::digest("two")));
    }

    #[test]
    fn a_process_that_ended_is_not_alive_and_its_facts_cannot_be_read() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let held = ProcDir::open(child.id()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!held.alive());
        assert!(held.status().is_err());
    }
}

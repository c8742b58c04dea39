//! Compiled code, kept between runs.
//!
//! An entry belongs to one module under one configuration: its key is a digest of both. The runner stores what a jailed
//! worker compiled and copies it for the next worker; it never looks into it. An entry that is not whole, not ours, or
//! somebody else's to write is removed and made again.
//!
//! Trusts: the directory's owner. A worker that was taken over while it compiled a module can leave bad code for that
//! same module, which then runs where the module itself would: inside a jail. Entries appear by rename, so a reader sees
//! a whole one or none; several runners and a runner that is killed are no problem.

use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW, fstat, futimens, open, openat,
    renameat, statat, unlinkat,
};
use rustix::process::geteuid;
use sha2::{Digest, Sha256};

use crate::artifact::beneath::DIRECTORY;
use crate::env::Env;

/// First bytes of an entry; the number is the format's.
const MAGIC: &[u8; 16] = b"plimsoll-code-1\n";
/// Magic, key, digest of the content, its length.
const HEADER: usize = 16 + 32 + 32 + 8;
/// How much is read and hashed at once, bytes: what stays in the processor's cache.
const PIECE: usize = 256 << 10;
/// Largest entry, bytes.
const MAX_ENTRY: u64 = 400 << 20;
/// Size of the whole cache, bytes; the entries used longest ago go first.
const MAX_TOTAL: u64 = 2 << 30;
/// A file that is being written is left alone for this long, seconds; after that its writer is taken for dead.
const UNFINISHED: i64 = 3600;
const ENTRY: &str = ".code";
const UNFINISHED_ENTRY: &str = ".new";

/// What an entry is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key([u8; 32]);

impl Key {
    /// The key of the module with this digest under a configuration.
    #[must_use]
    pub fn new(module: &[u8; 32], fingerprint: &[u8; 32]) -> Self {
        Self(Sha256::new().chain_update(MAGIC).chain_update(module).chain_update(fingerprint).finalize().into())
    }

    fn file(&self) -> String {
        format!("{}{ENTRY}", hex::encode(self.0))
    }
}

/// The directory of entries, checked and held open.
#[derive(Debug)]
pub struct Cache {
    directory: OwnedFd,
    max_total: u64,
}

/// Where the cache of this user is.
#[must_use]
pub fn place(env: &Env) -> Option<PathBuf> {
    crate::image::cache::base(env).map(|base| base.join("wasm"))
}

impl Cache {
    /// Opens the cache at `path`, which is made if need be.
    ///
    /// # Errors
    /// If it cannot be made, belongs to somebody else, or can be written by others.
    pub fn at(path: &Path) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        let directory = open(path, DIRECTORY, Mode::empty())?;
        if !ours(&fstat(&directory)?) {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("{} belongs to somebody else or can be written by others", path.display()),
            ));
        }
        Ok(Self { directory, max_total: MAX_TOTAL })
    }

    /// Writes the code stored under a key to an empty file; says whether there was some. An entry that is damaged or not
    /// ours is removed, and the file is empty again.
    pub fn load(&self, key: &Key, into: &File) -> bool {
        match self.copy(key, into) {
            Ok(()) => true,
            Err(e) => {
                if e.kind() != io::ErrorKind::NotFound {
                    tracing::debug!(key = key.file(), error = %e, "dropping an entry of the code cache");
                    self.remove(key);
                }
                let _ = into.set_len(0);
                false
            }
        }
    }

    /// What is written is what was hashed: each piece is read once.
    fn copy(&self, key: &Key, mut into: &File) -> io::Result<()> {
        let invalid = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mut file = File::from(openat(&self.directory, key.file(), flags, Mode::empty())?);
        let stat = fstat(&file)?;
        if !FileType::from_raw_mode(stat.st_mode).is_file() || !ours(&stat) {
            return Err(invalid("not a file that only we can write"));
        }
        if u64::try_from(stat.st_size).unwrap_or(0) > MAX_ENTRY + HEADER as u64 {
            return Err(invalid("too large"));
        }
        let mut header = [0u8; HEADER];
        file.read_exact(&mut header)?;
        let (mut hasher, mut length) = (Sha256::new(), 0u64);
        let mut piece = vec![0u8; PIECE];
        loop {
            let n = match file.read(&mut piece) {
                Ok(0) => break,
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            length += n as u64;
            if length > MAX_ENTRY {
                return Err(invalid("too large"));
            }
            hasher.update(&piece[..n]);
            into.write_all(&piece[..n])?;
        }
        if header != Self::header(key, &hasher.finalize().into(), length) {
            return Err(invalid("damaged"));
        }
        // Used now: it goes last when room is needed.
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let _ = futimens(&file, &Timestamps { last_access: now, last_modification: now });
        Ok(())
    }

    fn header(key: &Key, digest: &[u8; 32], length: u64) -> [u8; HEADER] {
        let mut header = [0u8; HEADER];
        header[..16].copy_from_slice(MAGIC);
        header[16..48].copy_from_slice(&key.0);
        header[48..80].copy_from_slice(digest);
        header[80..].copy_from_slice(&length.to_le_bytes());
        header
    }

    /// Drops an entry.
    pub fn remove(&self, key: &Key) {
        let _ = unlinkat(&self.directory, key.file(), AtFlags::empty());
    }

    /// Begins an entry, to be filled piece by piece.
    ///
    /// # Errors
    /// If no file can be made.
    pub fn begin(&self, key: Key) -> io::Result<Entry> {
        let mut random = [0u8; 8];
        getrandom::fill(&mut random).map_err(|e| io::Error::other(e.to_string()))?;
        let name = format!("{}{UNFINISHED_ENTRY}", hex::encode(random));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(openat(&self.directory, &name, flags, Mode::from_raw_mode(0o600))?);
        let directory = self.directory.try_clone()?;
        file.write_all(&[0u8; HEADER])?;
        Ok(Entry { directory, name, file, key, digest: Sha256::new(), bytes: 0, max_total: self.max_total })
    }
}

/// Whether a file is ours alone to write.
fn ours(stat: &Stat) -> bool {
    stat.st_uid == geteuid().as_raw() && stat.st_mode & 0o022 == 0
}

/// An entry being written; gone unless it is finished.
#[derive(Debug)]
pub struct Entry {
    directory: OwnedFd,
    name: String,
    file: File,
    key: Key,
    digest: Sha256,
    bytes: u64,
    max_total: u64,
}

impl Entry {
    /// Appends a piece.
    ///
    /// # Errors
    /// If it cannot be written, or the entry gets too large.
    pub fn write(&mut self, piece: &[u8]) -> io::Result<()> {
        self.bytes += piece.len() as u64;
        if self.bytes > MAX_ENTRY {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "compiled code is too large to keep"));
        }
        self.digest.update(piece);
        self.file.write_all(piece)
    }

    /// Makes the entry visible, and makes room for it.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn finish(self) -> io::Result<()> {
        let digest = self.digest.clone().finalize().into();
        self.file.write_all_at(&Cache::header(&self.key, &digest, self.bytes), 0)?;
        renameat(&self.directory, &self.name, &self.directory, self.key.file())?;
        make_room(&self.directory, self.max_total, &self.key.file())
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // Under its final name it has another name by now.
        let _ = unlinkat(&self.directory, &self.name, AtFlags::empty());
    }
}

/// Removes what dead writers left, and the entries used longest ago until the rest fits.
fn make_room(directory: &OwnedFd, max_total: u64, keep: &str) -> io::Result<()> {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
    let mut entries = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(stat) = statat(directory, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) else { continue };
        if name.ends_with(UNFINISHED_ENTRY) && now - stat.st_mtime > UNFINISHED {
            let _ = unlinkat(directory, name.as_str(), AtFlags::empty());
        } else if name.ends_with(ENTRY) {
            entries.push((stat.st_mtime, stat.st_mtime_nsec, u64::try_from(stat.st_size).unwrap_or(0), name));
        }
    }
    entries.sort();
    let mut total: u64 = entries.iter().map(|e| e.2).sum();
    for (_, _, size, name) in entries.into_iter().filter(|e| e.3 != keep) {
        if total <= max_total {
            break;
        }
        let _ = unlinkat(directory, name.as_str(), AtFlags::empty());
        total -= size;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Seek;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn key(module: &[u8]) -> Key {
        Key::new(&Sha256::digest(module).into(), &[7; 32])
    }

    fn load(cache: &Cache, key: &Key) -> Option<Vec<u8>> {
        let mut into = tempfile::tempfile().unwrap();
        let found = cache.load(key, &into);
        let mut code = Vec::new();
        into.rewind().unwrap();
        into.read_to_end(&mut code).unwrap();
        assert!(found || code.is_empty(), "what does not count is not left behind");
        found.then_some(code)
    }

    fn put(cache: &Cache, module: &[u8], code: &[u8]) {
        let mut entry = cache.begin(key(module)).unwrap();
        for piece in code.chunks(3) {
            entry.write(piece).unwrap();
        }
        entry.finish().unwrap();
    }

    #[test]
    fn what_was_stored_comes_back_under_its_own_key_only() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(&dir.path().join("made/on/the/way")).unwrap();
        put(&cache, b"module", b"compiled code");
        assert_eq!(load(&cache, &key(b"module")).unwrap(), b"compiled code");
        assert_eq!(load(&cache, &key(b"another module")), None);
        assert_eq!(load(&cache, &Key::new(&Sha256::digest(b"module").into(), &[8; 32])), None, "another configuration");
    }

    #[test]
    fn an_entry_with_any_bit_flipped_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        put(&cache, b"m", b"code");
        let file = dir.path().join(key(b"m").file());
        let whole = std::fs::read(&file).unwrap();
        for byte in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[byte] ^= 1 << (byte % 8);
            std::fs::write(&file, &damaged).unwrap();
            assert_eq!(load(&cache, &key(b"m")), None, "byte {byte}");
            assert!(!file.exists(), "byte {byte}");
        }
        for length in [0, 1, HEADER - 1, HEADER, whole.len() - 1] {
            std::fs::write(&file, &whole[..length]).unwrap();
            assert_eq!(load(&cache, &key(b"m")), None, "cut to {length}");
        }
        std::fs::write(&file, &whole).unwrap();
        assert_eq!(load(&cache, &key(b"m")).unwrap(), b"code");
    }

    #[test]
    fn the_entry_of_another_module_under_this_name_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        put(&cache, b"evil", b"evil code");
        std::fs::rename(dir.path().join(key(b"evil").file()), dir.path().join(key(b"good").file())).unwrap();
        assert_eq!(load(&cache, &key(b"good")), None);
    }

    #[test]
    fn links_and_files_that_others_can_write_are_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(&dir.path().join("c")).unwrap();
        put(&cache, b"m", b"code");
        let file = dir.path().join("c").join(key(b"m").file());
        let elsewhere = dir.path().join("elsewhere");
        std::fs::rename(&file, &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &file).unwrap();
        assert_eq!(load(&cache, &key(b"m")), None);
        std::fs::copy(&elsewhere, &file).unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o666)).unwrap();
        assert_eq!(load(&cache, &key(b"m")), None);
    }

    #[test]
    fn a_directory_that_others_can_write_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
        assert!(Cache::at(dir.path()).is_err());
        let link = dir.path().join("link");
        let real = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(real.path(), &link).unwrap();
        assert!(Cache::at(&link).is_err());
    }

    #[test]
    fn an_entry_that_is_not_finished_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let mut entry = cache.begin(key(b"m")).unwrap();
        entry.write(b"half").unwrap();
        drop(entry);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_entries_used_longest_ago_make_room_and_dead_writers_files_go() {
        let dir = tempfile::tempdir().unwrap();
        let mut cache = Cache::at(dir.path()).unwrap();
        cache.max_total = 3 * (HEADER as u64 + 100);
        let old = |name: &str, seconds: i64| {
            let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
            let file = File::options().write(true).open(dir.path().join(name)).unwrap();
            futimens(&file, &Timestamps { last_access: time, last_modification: time }).unwrap();
        };
        for (n, module) in [b"1", b"2", b"3"].into_iter().enumerate() {
            put(&cache, module, &[0; 100]);
            old(&key(module).file(), 1000 + n as i64);
        }
        std::fs::write(dir.path().join("dead.new"), "").unwrap();
        old("dead.new", 1000);
        std::fs::write(dir.path().join("alive.new"), "").unwrap();
        // Reading makes the oldest the youngest.
        assert!(load(&cache, &key(b"1")).is_some());
        put(&cache, b"4", &[0; 100]);
        let left = |module: &[u8]| dir.path().join(key(module).file()).exists();
        assert_eq!([left(b"1"), left(b"2"), left(b"3"), left(b"4")], [true, false, true, true]);
        assert!(!dir.path().join("dead.new").exists() && dir.path().join("alive.new").exists());
    }
}

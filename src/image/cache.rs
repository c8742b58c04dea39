//! What is made once on a host and used by many runs: guest kernels, initial file systems, unpacked images.
//!
//! Main type: [`Cache`]. An entry is a directory, named for its kind and for the digest of everything that goes into it;
//! it is made once under a lock, by whichever run comes first, while the others wait for it. It is made in a fresh
//! sibling, synced, and appears by a rename: a process killed at any moment leaves either a whole entry or none, and what
//! it left instead is removed by the next run that wants the same entry. Whoever uses an entry holds its lock shared
//! ([`Entry`]), so that making room never takes one out of a run's hands. A copy of an entry ([`Cache::copy`]) is one run's
//! alone at a time, by its lock; the next run may have it afterwards, and one for each entry is kept for that.
//!
//! Trusts: the user that it belongs to. A directory that belongs to somebody else or that others can write is refused,
//! not worked around: whoever can write there chooses the kernel. Where there can be no cache at all (no home, a read-only
//! disk, no locks), a directory that the caller names serves for this one run.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, RenameFlags, Stat, Timespec, Timestamps, UTIME_NOW, fstat, open, openat,
    renameat_with, statat, syncfs,
};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::artifact::Digest;
use crate::artifact::beneath::{self, DIRECTORY};
use crate::env::{Env, Var};
use crate::lock::Lock;

mod copies;
mod room;

pub use room::{Gone, Held};

/// An entry that nobody used for this long makes room when another of its kind is made.
const UNUSED: Duration = Duration::from_secs(30 * 24 * 3600);
/// Suffix of a lock's file; it stands beside the entry.
const LOCK: &str = ".lock";
/// Suffix of an entry that is being made. There is one name for each entry, since its maker holds the lock.
const UNFINISHED: &str = ".new";

/// Name of the file in an entry that is a digest.
const DIGEST: &str = "sha256";

/// Where caches of this user are: root's in `/var/cache`, unless `XDG_CACHE_HOME` says otherwise; none without a home.
#[must_use]
pub fn base(env: &Env) -> Option<PathBuf> {
    if geteuid().is_root() && env.os(Var::XdgCacheHome).is_none() {
        Some(PathBuf::from("/var/cache/plimsoll"))
    } else {
        env.cache_dir()
    }
}

/// Why there is no entry.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// Somebody else could have put things there.
    #[error("the cache {0} belongs to somebody else or can be written by others")]
    Untrusted(PathBuf),
    /// It can't be used.
    #[error("failed to {action} {path}")]
    Io {
        /// Completes "failed to …".
        action: &'static str,
        /// What.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl CacheError {
    /// What to do about it.
    #[must_use]
    pub const fn help(&self) -> &'static str {
        match self {
            CacheError::Untrusted(_) => {
                "remove that directory, or make it yours alone (chown, chmod go-w); XDG_CACHE_HOME moves the cache"
            }
            CacheError::Io { .. } => "make room there, or set XDG_CACHE_HOME to a directory that can be written",
        }
    }

    fn io<E: Into<io::Error>>(action: &'static str, path: &Path) -> impl FnOnce(E) -> Self {
        move |source| CacheError::Io { action, path: path.to_owned(), source: source.into() }
    }
}

/// The directory of entries, checked and held open.
#[derive(Debug, Clone)]
pub struct Cache {
    path: PathBuf,
    directory: Arc<OwnedFd>,
    /// Whether entries are to survive the machine's sudden end.
    lasting: bool,
    notice: Option<String>,
}

/// A whole entry, which stays for as long as this or a clone of it is held; or a copy, which is nobody else's meanwhile.
#[derive(Debug, Clone)]
pub struct Entry {
    path: PathBuf,
    /// Whether this run made it.
    pub fresh: bool,
    hold: Arc<Hold>,
}

/// What keeps a directory where it is.
#[derive(Debug)]
struct Hold {
    lock: Option<Lock<File>>,
    /// Of a copy.
    copy: Option<copies::Copied>,
}

impl Entry {
    /// The directory that it is. What lies in an entry is read, never written.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Cache {
    /// The cache of this user; `fallback`, a directory that is this run's own, where there can be none.
    ///
    /// # Errors
    /// [`CacheError::Untrusted`], and when not even the fallback can be used.
    pub fn of_user(env: &Env, fallback: &Path) -> Result<Self, CacheError> {
        let why = match base(env).map(|base| Self::at(&base.join("image"))) {
            Some(Ok(cache)) => match cache.try_locks() {
                Ok(()) => return Ok(cache),
                Err(error) => crate::text::chain(&error),
            },
            Some(Err(error @ CacheError::Untrusted(_))) => return Err(error),
            Some(Err(error)) => crate::text::chain(&error),
            None => "this user has no home directory".to_owned(),
        };
        let mut cache = Self::at(fallback)?;
        cache.lasting = false;
        cache.notice = Some(format!("kernels and images are not kept for the next run: {why}"));
        Ok(cache)
    }

    /// The cache at `path`, which is made if need be.
    ///
    /// # Errors
    /// If it can't be made or opened, or is not this user's alone to write.
    pub fn at(path: &Path) -> Result<Self, CacheError> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(CacheError::io("make the cache directory", path))?;
        let directory = open(path, DIRECTORY, Mode::empty()).map_err(|e| match e {
            // The last component is a link: somebody else's choice of a place.
            Errno::LOOP | Errno::NOTDIR => CacheError::Untrusted(path.to_owned()),
            e => CacheError::io("open the cache directory", path)(e),
        })?;
        if !ours(&fstat(&directory).map_err(CacheError::io("examine", path))?) {
            return Err(CacheError::Untrusted(path.to_owned()));
        }
        Ok(Self { path: path.to_owned(), directory: Arc::new(directory), lasting: true, notice: None })
    }

    /// What a report should say about it.
    #[must_use]
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// The entry of that kind and key. If it is not there, `build` makes it in the fresh directory that it is given, under
    /// the lock. `kind` and `key` are plain words of ours: `[a-z0-9-]`.
    ///
    /// # Errors
    /// If it is not ours, can't be made, or `build` fails; then nothing is left of it.
    pub fn entry<E: From<CacheError>>(
        &self,
        kind: &str,
        key: &str,
        build: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<Entry, E> {
        debug_assert!([kind, key].iter().all(|w| w.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'))));
        let name = format!("{kind}-{key}");
        let path = self.path.join(&name);
        let lock = self.lock(&name, FlockOperation::LockShared)?;
        if self.holds(&name)? {
            return Ok(Self::used(path, lock, false));
        }
        drop(lock);
        let lock = self.lock(&name, FlockOperation::LockExclusive)?;
        // Somebody else may have made it in between.
        let fresh = !self.holds(&name)?;
        if fresh {
            self.make(&name, build)?;
            self.make_room(kind, &name);
        }
        // The lock is not converted in one piece (flock(2)): who gets in between finds the entry made, or wants to make
        // room, and this one was used just now.
        touch(&lock);
        lock.convert(FlockOperation::LockShared).map_err(CacheError::io("lock", &path))?;
        Ok(Self::used(path, lock, fresh))
    }

    /// The cache of this user, where there is one.
    #[must_use]
    pub fn kept(env: &Env) -> Option<Self> {
        let cache = Self::at(&base(env)?.join("image")).ok()?;
        cache.try_locks().is_ok().then_some(cache)
    }

    /// The digest of a file, lowercase hex, as `hash` finds it. It is kept under what the file system says of the file, the
    /// time of its last change among it, so that nothing is read at most starts: whoever can turn that back owns the host.
    ///
    /// # Errors
    /// If `hash` fails, or as for [`Cache::entry`].
    pub fn digest<E: From<CacheError>>(
        &self,
        meta: &fs::Metadata,
        hash: impl FnOnce() -> Result<String, E>,
    ) -> Result<String, E> {
        let changed = (meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec());
        let said = format!("{:?}", (meta.dev(), meta.ino(), meta.len(), changed));
        let entry = self.entry("file", &Digest::of(said.as_bytes()).to_string(), |directory| -> Result<(), E> {
            Ok(fs::write(directory.join(DIGEST), hash()?).map_err(CacheError::io("write", directory))?)
        })?;
        let path = entry.path().join(DIGEST);
        Ok(fs::read_to_string(&path).map_err(CacheError::io("read", &path))?)
    }

    fn used(path: PathBuf, lock: Lock<File>, fresh: bool) -> Entry {
        touch(&lock);
        Entry { path, fresh, hold: Arc::new(Hold { lock: Some(lock), copy: None }) }
    }

    fn make<E: From<CacheError>>(&self, name: &str, build: impl FnOnce(&Path) -> Result<(), E>) -> Result<(), E> {
        let unfinished = format!("{name}{UNFINISHED}");
        let path = self.path.join(&unfinished);
        self.remove(&unfinished).map_err(CacheError::io("clear", &path))?;
        DirBuilder::new().mode(0o700).create(&path).map_err(CacheError::io("make", &path))?;
        let made = build(&path).and_then(|()| {
            let fresh = openat(&self.directory, &*unfinished, DIRECTORY, Mode::empty())
                .map_err(CacheError::io("open", &path))?;
            if self.lasting {
                // The content has to be on the disk before the name that vouches for it.
                syncfs(&fresh).map_err(CacheError::io("sync", &path))?;
            }
            renameat_with(&self.directory, &*unfinished, &self.directory, name, RenameFlags::NOREPLACE)
                .map_err(CacheError::io("rename", &path))?;
            if self.lasting {
                rustix::fs::fsync(&self.directory).map_err(CacheError::io("sync", &self.path))?;
            }
            Ok(())
        });
        if made.is_err() {
            let _ = self.remove(&unfinished);
        }
        made
    }

    /// Whether the entry is there and can be believed.
    fn holds(&self, name: &str) -> Result<bool, CacheError> {
        let path = self.path.join(name);
        match statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode).is_dir() && ours(&stat) => Ok(true),
            Ok(_) => Err(CacheError::Untrusted(path)),
            Err(Errno::NOENT) => Ok(false),
            Err(e) => Err(CacheError::io("examine", &path)(e)),
        }
    }

    /// The lock of an entry, waited for unless `how` says not to.
    fn lock(&self, name: &str, how: FlockOperation) -> Result<Lock<File>, CacheError> {
        let path = self.path.join(format!("{name}{LOCK}"));
        loop {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
                .open(&path)
                .map_err(CacheError::io("open", &path))?;
            let lock = Lock::of(file, how).map_err(CacheError::io("lock", &path))?;
            // Whoever makes room removes the file under its lock: one that lost its name guards nothing.
            let held = lock.metadata().map_err(CacheError::io("examine", &path))?;
            match fs::symlink_metadata(&path) {
                Ok(named) if (named.dev(), named.ino()) == (held.dev(), held.ino()) => return Ok(lock),
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(CacheError::io("examine", &path)(e)),
            }
        }
    }

    /// Some network file systems have no locks, and a disk may be mounted read-only: found out before it matters.
    fn try_locks(&self) -> Result<(), CacheError> {
        self.lock("writable", FlockOperation::LockShared).map(drop)
    }

    /// Removes an entry's directory, if it is there, following no link.
    fn remove(&self, name: &str) -> io::Result<()> {
        let directory = match openat(&self.directory, name, DIRECTORY, Mode::empty()) {
            Ok(directory) => directory,
            Err(Errno::NOENT) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        beneath::empty(std::os::fd::AsFd::as_fd(&directory))?;
        Ok(rustix::fs::unlinkat(&self.directory, name, AtFlags::REMOVEDIR)?)
    }
}

/// Notes the time of use, for those who make room.
fn touch(lock: &File) {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let _ = rustix::fs::futimens(lock, &Timestamps { last_access: now, last_modification: now });
}

/// Whether a file is ours alone to write.
fn ours(stat: &Stat) -> bool {
    stat.st_uid == geteuid().as_raw() && stat.st_mode & 0o022 == 0
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::process::Command;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn write(content: &'static str) -> impl Fn(&Path) -> Result<(), CacheError> {
        move |path| fs::write(path.join("file"), content).map_err(CacheError::io("write", path))
    }

    fn never(_: &Path) -> Result<(), CacheError> {
        panic!("it is there already")
    }

    fn names(path: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_files_digest_is_known_until_the_file_changes() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(&dir.path().join("cache")).unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "one").unwrap();
        let digest = |hash: &dyn Fn() -> Result<String, CacheError>| cache.digest(&fs::metadata(&file).unwrap(), hash);
        assert_eq!(digest(&|| Ok("aa".to_owned())).unwrap(), "aa");
        assert_eq!(digest(&|| panic!("it is known")).unwrap(), "aa");
        // Another file of that name, of the same size and age.
        let other = dir.path().join("other");
        fs::write(&other, "two").unwrap();
        let age = fs::metadata(&file).unwrap().modified().unwrap();
        File::options().write(true).open(&other).unwrap().set_modified(age).unwrap();
        fs::rename(&other, &file).unwrap();
        assert_eq!(digest(&|| Ok("bb".to_owned())).unwrap(), "bb");
        let failed = || Err(CacheError::Untrusted(file.clone()));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o700)).unwrap();
        assert!(digest(&failed).is_err());
        assert_eq!(digest(&|| Ok("cc".to_owned())).unwrap(), "cc");
    }

    #[test]
    fn an_entry_is_made_once_and_then_found() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(&dir.path().join("made/on/the/way")).unwrap();
        let first = cache.entry("kernel", "a1", write("x")).unwrap();
        let second = cache.entry("kernel", "a1", never).unwrap();
        assert!(first.fresh && !second.fresh);
        assert_eq!(fs::read_to_string(second.path().join("file")).unwrap(), "x");
        assert_ne!(cache.entry("kernel", "a2", write("y")).unwrap().path(), first.path());
    }

    #[test]
    fn many_who_want_the_same_entry_make_it_once() {
        let dir = tempfile::tempdir().unwrap();
        let made = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let cache = Cache::at(&dir.path().join("c")).unwrap();
                    let entry = cache.entry("image", "k", |path| {
                        made.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(20));
                        write("x")(path)
                    });
                    assert_eq!(fs::read_to_string(entry.unwrap().path().join("file")).unwrap(), "x");
                });
            }
        });
        assert_eq!(made.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn what_fails_or_dies_half_way_leaves_no_entry() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let failed = cache.entry("image", "k", |path| {
            write("half")(path)?;
            Err(CacheError::Untrusted("x".into()))
        });
        assert!(matches!(failed, Err(CacheError::Untrusted(_))));
        assert_eq!(names(dir.path()), ["image-k.lock"]);
        // As a maker leaves it that was killed: half an entry, and a directory without write permission in it.
        fs::create_dir_all(dir.path().join("image-k.new/deep/er")).unwrap();
        fs::write(dir.path().join("image-k.new/deep/stale"), "x").unwrap();
        fs::set_permissions(dir.path().join("image-k.new/deep"), PermissionsExt::from_mode(0o500)).unwrap();
        let entry = cache.entry("image", "k", write("whole")).unwrap();
        assert_eq!(names(entry.path()), ["file"]);
        assert_eq!(names(dir.path()), ["image-k", "image-k.lock"]);
    }

    #[test]
    fn a_maker_that_is_killed_gives_its_lock_back() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let lock = dir.path().join("image-k.lock");
        let mut holder = match Command::new("flock").arg(&lock).args(["sleep", "600"]).spawn() {
            Ok(holder) => holder,
            Err(e) => return eprintln!("skipped: flock(1) can't be run ({e})"),
        };
        let held = || {
            let file = File::options().write(true).open(&lock);
            file.is_ok_and(|file| Lock::of(file, FlockOperation::NonBlockingLockExclusive).is_err())
        };
        while !held() {
            std::thread::yield_now();
        }
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| cache.entry("image", "k", write("x")).map(|entry| entry.fresh));
            assert!(!dir.path().join("image-k").exists());
            // flock(1) hands its lock on to what it starts once it holds it: both have to go.
            let children = format!("/proc/{0}/task/{0}/children", holder.id());
            let children = std::iter::repeat_with(|| fs::read_to_string(&children).unwrap()).find(|c| !c.is_empty());
            for pid in children.unwrap().split_whitespace() {
                let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            }
            holder.kill().unwrap();
            assert!(waiting.join().unwrap().unwrap());
        });
        holder.wait().unwrap();
    }

    #[test]
    fn a_place_that_others_can_write_is_refused_not_worked_around() {
        let dir = tempfile::tempdir().unwrap();
        let env = Env::from_iter([(Var::XdgCacheHome, dir.path())]);
        let fallback = dir.path().join("scratch");
        let place = dir.path().join("plimsoll/image");
        let good = Cache::of_user(&env, &fallback).unwrap();
        assert_eq!((good.path.as_path(), good.notice()), (place.as_path(), None));
        fs::set_permissions(&place, PermissionsExt::from_mode(0o770)).unwrap();
        assert!(matches!(Cache::of_user(&env, &fallback), Err(CacheError::Untrusted(p)) if p == place));
        fs::remove_dir_all(&place).unwrap();
        let real = tempfile::tempdir().unwrap();
        symlink(real.path(), &place).unwrap();
        assert!(matches!(Cache::of_user(&env, &fallback), Err(CacheError::Untrusted(_))));
    }

    #[test]
    fn an_entry_that_is_not_ours_alone_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let entry = cache.entry("kernel", "k", write("x")).unwrap();
        fs::set_permissions(entry.path(), PermissionsExt::from_mode(0o777)).unwrap();
        assert!(matches!(cache.entry("kernel", "k", never), Err(CacheError::Untrusted(_))));
        fs::rename(entry.path(), dir.path().join("elsewhere")).unwrap();
        symlink(dir.path().join("elsewhere"), entry.path()).unwrap();
        assert!(matches!(cache.entry("kernel", "k", never), Err(CacheError::Untrusted(_))));
    }

    #[test]
    fn where_there_can_be_no_cache_this_run_has_its_own() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        // A cache directory below a file can't be made, whoever asks.
        let env = Env::from_iter([(Var::XdgCacheHome, dir.path().join("file"))]);
        let cache = Cache::of_user(&env, &dir.path().join("scratch")).unwrap();
        assert!(cache.notice().unwrap().contains("not kept"), "{:?}", cache.notice());
        assert!(cache.entry("image", "k", write("x")).unwrap().path().starts_with(dir.path().join("scratch")));
    }

    #[test]
    fn what_nobody_used_for_long_makes_room_unless_it_is_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let age = |name: &str| {
            let time = Timespec { tv_sec: 1000, tv_nsec: 0 };
            let file = File::options().write(true).open(dir.path().join(name)).unwrap();
            rustix::fs::futimens(&file, &Timestamps { last_access: time, last_modification: time }).unwrap();
        };
        let in_use = cache.entry("image", "in-use", write("x")).unwrap();
        for key in ["old", "young"] {
            cache.entry("image", key, write("x")).unwrap();
        }
        cache.entry("imagery", "old", write("x")).unwrap();
        for name in ["image-in-use.lock", "image-old.lock", "imagery-old.lock"] {
            age(name);
        }
        cache.entry("image", "new", write("x")).unwrap();
        let left: Vec<_> = names(dir.path()).into_iter().filter(|n| !n.ends_with(LOCK)).collect();
        assert_eq!(left, ["image-in-use", "image-new", "image-young", "imagery-old"]);
        assert!(!dir.path().join("image-old.lock").exists());
        drop(in_use);
    }
}

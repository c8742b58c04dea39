//! What lies in the cache, and making room in it. An entry that a run uses is locked, and stays.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::SystemTime;

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::copies::COPY;
use super::{Cache, CacheError, LOCK, UNFINISHED, UNUSED};

/// An entry, as somebody looks at it from outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// Its kind.
    pub kind: String,
    /// Its key.
    pub key: String,
    /// Its directory.
    pub path: PathBuf,
    /// When it was used last.
    pub used: SystemTime,
}

/// What became of an entry that was to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    /// It is gone.
    Removed,
    /// It is in use, and stays.
    InUse,
}

impl Cache {
    /// All entries, those first that were not used for longest.
    ///
    /// # Errors
    /// If the cache can't be listed.
    pub fn entries(&self) -> Result<Vec<Held>, CacheError> {
        let list = |e| CacheError::io("list", &self.path)(e);
        let mut held = Vec::new();
        for file in fs::read_dir(&self.path).map_err(list)? {
            let Ok(name) = file.map_err(list)?.file_name().into_string() else { continue };
            let Some((kind, key)) = name.split_once('-').filter(|_| !name.ends_with(LOCK)) else { continue };
            if name.ends_with(UNFINISHED) || kind == COPY {
                continue;
            }
            let used = self.used_last(&name).unwrap_or(SystemTime::UNIX_EPOCH);
            let (kind, key, path) = (kind.to_owned(), key.to_owned(), self.path.join(&name));
            held.push(Held { kind, key, path, used });
        }
        held.sort_by(|a, b| (a.used, &a.key).cmp(&(b.used, &b.key)));
        Ok(held)
    }

    /// Removes an entry, unless a run uses it; and what a killed maker left of it.
    ///
    /// # Errors
    /// If it can't be removed.
    pub fn discard(&self, kind: &str, key: &str) -> Result<Gone, CacheError> {
        self.discard_named(&format!("{kind}-{key}"), FlockOperation::NonBlockingLockExclusive)
    }

    /// Removes an entry as soon as no run uses it.
    ///
    /// # Errors
    /// If it can't be removed.
    pub fn discard_at_last(&self, kind: &str, key: &str) -> Result<(), CacheError> {
        self.discard_named(&format!("{kind}-{key}"), FlockOperation::LockExclusive).map(drop)
    }

    pub(super) fn discard_named(&self, name: &str, how: FlockOperation) -> Result<Gone, CacheError> {
        let _lock = match self.lock(name, how) {
            Ok(lock) => lock,
            Err(CacheError::Io { source, .. }) if source.raw_os_error() == Some(Errno::WOULDBLOCK.raw_os_error()) => {
                return Ok(Gone::InUse);
            }
            Err(error) => return Err(error),
        };
        let lock = self.path.join(format!("{name}{LOCK}"));
        let gone = self.remove(name).and_then(|()| self.remove(&format!("{name}{UNFINISHED}")));
        gone.and_then(|()| fs::remove_file(&lock))
            .or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) })
            .map_err(CacheError::io("remove", &self.path.join(name)))?;
        Ok(Gone::Removed)
    }

    /// Removes what runs left that were killed: half an entry whose lock nobody holds, or a copy that no run will have. Says
    /// how many.
    ///
    /// # Errors
    /// If the cache can't be listed.
    pub fn sweep_unfinished(&self) -> Result<usize, CacheError> {
        let list = |e| CacheError::io("list", &self.path)(e);
        let mut swept = self.sweep_copies()?;
        for file in fs::read_dir(&self.path).map_err(list)? {
            let Ok(file_name) = file.map_err(list)?.file_name().into_string() else { continue };
            let Some(name) = file_name.strip_suffix(UNFINISHED) else { continue };
            // Whoever makes it holds the lock exclusively.
            if self
                .lock(name, FlockOperation::NonBlockingLockExclusive)
                .is_ok_and(|_lock| self.remove(&file_name).is_ok())
            {
                swept += 1;
            }
        }
        Ok(swept)
    }

    /// Removes entries of that kind that nobody used for long, and what their makers left.
    pub(super) fn make_room(&self, kind: &str, keep: &str) {
        let before = SystemTime::now().checked_sub(UNUSED);
        for name in self.locked().unwrap_or_default() {
            let mine = name.strip_prefix(kind).is_some_and(|rest| rest.starts_with('-'));
            let used = self.used_last(&name);
            if !mine || name == keep || used.is_none() || used >= before {
                continue;
            }
            if let Err(error) = self.discard_named(&name, FlockOperation::NonBlockingLockExclusive) {
                tracing::debug!(name, error = crate::text::chain(&error), "an old entry of the cache was not removed");
            }
        }
    }

    /// Names of everything that has a lock beside it.
    pub(super) fn locked(&self) -> Result<Vec<String>, CacheError> {
        let list = |e| CacheError::io("list", &self.path)(e);
        let mut names = Vec::new();
        for file in fs::read_dir(&self.path).map_err(list)? {
            let Ok(name) = file.map_err(list)?.file_name().into_string() else { continue };
            names.extend(name.strip_suffix(LOCK).map(str::to_owned));
        }
        Ok(names)
    }

    /// When something was used last, by its lock.
    pub(super) fn used_last(&self, name: &str) -> Option<SystemTime> {
        fs::metadata(self.path.join(format!("{name}{LOCK}"))).and_then(|meta| meta.modified()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_use_stays_and_what_a_killed_maker_left_goes() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let made = |_: &std::path::Path| Ok::<_, CacheError>(());
        let used = cache.entry("image", "used", made).unwrap();
        cache.entry("image", "idle", made).unwrap();
        fs::create_dir_all(dir.path().join("image-half.new/deep")).unwrap();
        let keys: Vec<_> = cache.entries().unwrap().into_iter().map(|held| held.key).collect();
        assert_eq!(keys, ["used", "idle"]);
        assert_eq!(cache.discard("image", "used").unwrap(), Gone::InUse);
        assert_eq!(cache.discard("image", "idle").unwrap(), Gone::Removed);
        assert_eq!(cache.sweep_unfinished().unwrap(), 1);
        assert!(used.path().is_dir() && !dir.path().join("image-half.new").exists());
        drop(used);
        cache.discard_at_last("image", "used").unwrap();
        assert_eq!(cache.discard("image", "used").unwrap(), Gone::Removed);
        assert!(cache.entries().unwrap().is_empty());
    }
}

//! Copies of entries: each one run's alone while it is held, and one of each entry kept for the next run.
//!
//! A copy is `copy-KIND-KEY-RANDOM` with a lock beside it, whose holder it belongs to. What a killed run left is a copy that
//! nobody holds, like any other that waits: whoever gets it compares its content.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use rustix::fs::FlockOperation;

use super::{Cache, CacheError, Entry, Gone, Hold, touch};
use crate::lock::Lock;

/// The kind of directories that are copies of entries.
pub(super) const COPY: &str = "copy";
/// How long a copy waits for the next run.
const COPY_UNUSED: Duration = Duration::from_secs(24 * 3600);

/// A copy that is held.
#[derive(Debug)]
pub(super) struct Copied {
    cache: Cache,
    name: String,
    /// Whether another run may have it afterwards.
    good: AtomicBool,
}

impl Drop for Hold {
    fn drop(&mut self) {
        let Some(Copied { cache, name, good }) = self.copy.take() else { return };
        if let Some(lock) = self.lock.as_ref().filter(|_| good.into_inner() && cache.is_only_copy(&name)) {
            touch(lock);
            return;
        }
        // Whoever takes the lock may remove it: we, or a sweep in between.
        drop(self.lock.take());
        if let Err(error) = cache.discard_named(&name, FlockOperation::NonBlockingLockExclusive) {
            tracing::debug!(name, error = crate::text::chain(&error), "a copy was not removed");
        }
    }
}

impl Entry {
    /// Vouches for a copy, that it is what its entry is; otherwise it goes with its last holder.
    pub fn vouch(&self) {
        if let Some(copy) = &self.hold.copy {
            copy.good.store(true, Ordering::Relaxed);
        }
    }
}

impl Cache {
    /// A copy of that entry, which is this run's alone while it is held: one that an earlier run is done with, whose content
    /// is for the caller to compare; or, if `fresh`, a new directory for the caller to fill. It lies on the file system of the
    /// entries.
    ///
    /// # Errors
    /// If it can't be made.
    pub fn copy(&self, kind: &str, key: &str) -> Result<Entry, CacheError> {
        self.sweep_copies()?;
        let of = format!("{kind}-{key}-");
        for name in self.copies(&of)? {
            // One that is in use is another run's.
            let Ok(lock) = self.lock(&name, FlockOperation::NonBlockingLockExclusive) else { continue };
            if self.holds(&name)? {
                return Ok(self.copied(name, lock, false));
            }
        }
        let mut random = [0; 8];
        getrandom::fill(&mut random)
            .map_err(|e| CacheError::io("draw randomness for", &self.path)(io::Error::other(e.to_string())))?;
        let name = format!("{COPY}-{of}{}", hex::encode(random));
        // There is no directory without a lock beside it: it is made after its lock, and removed before.
        let lock = self.lock(&name, FlockOperation::LockExclusive)?;
        let made = self.copied(name, lock, true);
        DirBuilder::new().mode(0o700).create(&made.path).map_err(CacheError::io("make", &made.path))?;
        Ok(made)
    }

    fn copied(&self, name: String, lock: Lock<File>, fresh: bool) -> Entry {
        let path = self.path.join(&name);
        let copy = Some(Copied { cache: self.clone(), name, good: AtomicBool::new(false) });
        Entry { path, fresh, hold: Arc::new(Hold { lock: Some(lock), copy }) }
    }

    /// Removes copies that nobody holds, but one of each entry that is there and was used not long ago. Says how many.
    ///
    /// # Errors
    /// If the cache can't be listed.
    pub fn sweep_copies(&self) -> Result<usize, CacheError> {
        let before = SystemTime::now().checked_sub(COPY_UNUSED);
        let mut kept = BTreeSet::new();
        let mut swept = 0;
        for name in self.copies("")? {
            let entry = copied_entry(&name);
            let wanted = self.used_last(&name) >= before
                && entry.is_some_and(|entry| self.path.join(entry).is_dir() && kept.insert(entry.to_owned()));
            if !wanted
                && matches!(self.discard_named(&name, FlockOperation::NonBlockingLockExclusive), Ok(Gone::Removed))
            {
                swept += 1;
            }
        }
        Ok(swept)
    }

    /// How many copies there are of each entry.
    ///
    /// # Errors
    /// If the cache can't be listed.
    pub fn numbers_of_copies(&self) -> Result<BTreeMap<String, u64>, CacheError> {
        let mut numbers = BTreeMap::new();
        for name in self.copies("")? {
            if let Some(entry) = copied_entry(&name) {
                *numbers.entry(entry.to_owned()).or_default() += 1;
            }
        }
        Ok(numbers)
    }

    /// Names of copies of entries that begin so.
    fn copies(&self, of: &str) -> Result<Vec<String>, CacheError> {
        let prefix = format!("{COPY}-{of}");
        Ok(self.locked()?.into_iter().filter(|name| name.starts_with(&prefix)).collect())
    }

    /// Whether there is no other copy of the same entry.
    fn is_only_copy(&self, name: &str) -> bool {
        let entry = copied_entry(name).map(|entry| format!("{entry}-"));
        entry.is_some_and(|entry| self.copies(&entry).is_ok_and(|names| names.len() == 1))
    }
}

/// The name of the entry that a copy is of.
fn copied_entry(name: &str) -> Option<&str> {
    let (entry, _random) = name.strip_prefix(COPY)?.strip_prefix('-')?.rsplit_once('-')?;
    Some(entry)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn one_good_copy_is_kept_for_the_next_run_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        drop(cache.entry("image", "a", |_| Ok::<_, CacheError>(())).unwrap());
        let fill = |copy: &Entry| {
            fs::create_dir(copy.path().join("sealed")).unwrap();
            fs::write(copy.path().join("sealed/file"), "x").unwrap();
            fs::set_permissions(copy.path().join("sealed"), PermissionsExt::from_mode(0o555)).unwrap();
        };
        let first = cache.copy("image", "a").unwrap();
        fill(&first);
        let second = cache.copy("image", "a").unwrap();
        assert!(first.fresh && second.fresh && first.path() != second.path());
        let kept = first.path().to_owned();
        first.vouch();
        second.vouch();
        let clone = first.clone();
        drop((first, second));
        assert_eq!(cache.numbers_of_copies().unwrap(), BTreeMap::from([("image-a".to_owned(), 1)]));
        // Still held by the clone.
        assert!(cache.copy("image", "a").unwrap().fresh);
        drop(clone);
        let again = cache.copy("image", "a").unwrap();
        assert!(!again.fresh && again.path() == kept && again.path().join("sealed/file").exists());
        // Nobody vouched for it again.
        drop(again);
        assert!(!kept.exists());
    }

    #[test]
    fn copies_that_no_run_will_have_are_swept() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        drop(cache.entry("image", "a", |_| Ok::<_, CacheError>(())).unwrap());
        let in_use = cache.copy("image", "a").unwrap();
        // As killed runs leave them: with a lock that nobody holds; one died before there was a directory.
        for name in ["copy-image-a-01", "copy-image-a-02", "copy-image-gone-03", "copy-04"] {
            fs::create_dir_all(dir.path().join(name).join("tree")).unwrap();
            fs::write(dir.path().join(format!("{name}.lock")), "").unwrap();
        }
        fs::write(dir.path().join("copy-image-gone-05.lock"), "").unwrap();
        let swept = cache.sweep_unfinished().unwrap();
        assert!(in_use.path().is_dir() && swept >= 4, "{swept}");
        let old = File::create(dir.path().join("copy-image-a-06.lock")).unwrap();
        old.set_modified(SystemTime::now() - COPY_UNUSED - Duration::from_secs(1)).unwrap();
        assert!(cache.sweep_copies().unwrap() >= 1);
        assert!(!dir.path().join("copy-image-a-06.lock").exists());
        drop(in_use);
        cache.discard("image", "a").unwrap();
        cache.sweep_copies().unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

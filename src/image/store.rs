//! Images in the cache: as they were pulled, unpacked, and as disks.
//!
//! Main type: [`Stored`]. A tree is kept under the digest of what it was unpacked from and serves gVisor as it is; [`disk`]
//! makes of it the squashfs that a microVM gets, kept under the same digest. How something is unpacked is the caller's, since
//! that takes a jail.
//!
//! With each lies what it is ([`About`]): where it came from, its size, and a digest of its content. Nobody gets the entry
//! itself: each use has a [copy](seal) of its own, whose digest is computed while it is made. When that use is over, one copy
//! is kept for the next, which computes its digest again. What differs is made again, and never shown to a boundary; so
//! whatever an engine does to its copy, the next run gets what was unpacked. A pulled layout needs none of this: each of its
//! blobs is compared with its own digest when it is used.
//!
//! The cache is bounded by [`gc`], which runs whenever something new came.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::cache::{Cache, CacheError, Entry, Gone, Held};
use super::seal::{self, Fault};
use super::squashfs::{PackError, pack_with};
use crate::artifact::helper::make_destination;
use crate::artifact::{Digest, Error as ArtifactError};

/// Counts what is done with the same input: entries of another number are not used.
const FORMAT: u32 = 2;
const TREE: &str = "tree";
const DISK: &str = "disk";
const ABOUT: &str = "about.json";
/// Copies of earlier runs that may be damaged in a row before the entry is thought to be.
const MOST_DAMAGED: usize = 4;
/// Kinds of entries that are images.
const KINDS: [&str; 3] = ["pulled", "image", "disk"];
/// Longest of the files about entries, bytes.
const MAX_ABOUT: u64 = 64 << 10;

/// Most bytes of images that are kept without being asked.
pub const MOST_BYTES: u64 = 20 << 30;
/// How long an image stays that nobody uses.
pub const LONGEST_UNUSED: Duration = Duration::from_secs(30 * 24 * 3600);

/// Why there is no tree or disk.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It can't be kept.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// It can't be unpacked.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// It can't be packed.
    #[error("failed to make a disk of the image")]
    Pack(#[from] PackError),
    /// It is damaged as soon as it is made.
    #[error("{} is not what was written there, each time it is made", .0.display())]
    Damaged(PathBuf),
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// As the first step that used it named it.
    pub reference: String,
    /// Of the manifest, or of the archive.
    pub digest: Digest,
    /// Of the index that led there, where one did.
    #[serde(default)]
    pub index: Option<Digest>,
    /// Its size, bytes.
    pub bytes: u64,
    /// Of its content as it lies here.
    #[serde(default)]
    pub content: Option<Digest>,
}

impl About {
    fn of(entry: &Path) -> Option<Self> {
        let mut text = Vec::new();
        let file = File::open(entry.join(ABOUT)).ok()?;
        std::io::Read::read_to_end(&mut std::io::Read::take(file, MAX_ABOUT), &mut text).ok()?;
        serde_json::from_slice(&text).ok()
    }

    fn write(&self, entry: &Path) -> Result<(), CacheError> {
        let path = entry.join(ABOUT);
        let text = serde_json::to_vec(self).map_err(std::io::Error::from);
        text.and_then(|text| fs::write(&path, text)).map_err(|source| CacheError::Io { action: "write", path, source })
    }
}

/// A copy of an unpacked image, which is there while this is held.
#[derive(Debug, Clone)]
pub struct Stored {
    key: String,
    about: About,
    copy: Entry,
}

impl Stored {
    /// The tree. Everybody may read it, and nobody else gets there.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.copy.path().join(TREE)
    }

    /// Bytes of its files.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.about.bytes
    }
}

/// What a tree is unpacked from.
#[derive(Debug, Clone, Copy)]
pub struct Origin<'a> {
    /// What the digest is of and how it is unpacked.
    pub how: &'a str,
    /// As the step names it.
    pub reference: &'a str,
    /// The digest.
    pub digest: Digest,
}

/// The tree of what has that digest; `unpack` fills the empty directory that it is given, if it is not there yet or is no
/// longer what it was.
///
/// # Errors
/// As [`StoreError`] says.
pub fn tree(
    cache: &Cache,
    origin: Origin<'_>,
    unpack: impl Fn(&File) -> Result<(), ArtifactError>,
) -> Result<Stored, StoreError> {
    let key = Digest::of(format!("image {FORMAT} {} {}", origin.how, origin.digest).as_bytes()).to_string();
    let make = |directory: &Path| {
        let path = directory.join(TREE);
        let tree =
            make_destination(&path).map_err(|source| CacheError::Io { action: "make", path: path.clone(), source })?;
        unpack(&tree)?;
        let (content, bytes) = seal::digest(&path).map_err(|fault| fault.of(&path))?;
        let (reference, digest) = (origin.reference.to_owned(), origin.digest);
        About { reference, digest, index: None, bytes, content: Some(content) }.write(directory)?;
        Ok(())
    };
    let (copy, about) =
        copied(cache, "image", &key, make, TREE, seal::copy, |own| seal::digest(own).map(|(own, _)| own))?;
    Ok(Stored { key, about, copy })
}

/// A copy of an entry, of which `name` is what it was when it was made: one that an earlier run is done with, if it still is
/// that, or a new one. An entry that has changed is made again.
fn copied(
    cache: &Cache,
    kind: &str,
    key: &str,
    make: impl Fn(&Path) -> Result<(), StoreError>,
    name: &str,
    copy: impl Fn(&Path, &Path) -> Result<(Digest, u64), Fault>,
    digest: impl Fn(&Path) -> Result<Digest, Fault>,
) -> Result<(Entry, About), StoreError> {
    for _ in 0..2 {
        let entry = cache.entry(kind, key, &make)?;
        if entry.fresh {
            bound(cache);
        }
        for _ in 0..MOST_DAMAGED {
            // Without that, it is not what it was either.
            let Some(about) = About::of(entry.path()) else { break };
            let own = cache.copy(kind, key)?;
            let path = own.path().join(name);
            let found =
                if own.fresh { copy(&entry.path().join(name), &path).map(|(found, _)| found) } else { digest(&path) };
            match found {
                Ok(found) if about.content == Some(found) => {
                    own.vouch();
                    return Ok((own, about));
                }
                Err(fault @ Fault::Copy(_)) => return Err(fault.of(own.path()).into()),
                // Unlike the entry, it is of no more use, and gone as soon as nobody holds it.
                _ if !own.fresh => tracing::warn!("{} is damaged, and made again", own.path().display()),
                _ => break,
            }
        }
        tracing::warn!("{} is damaged, and made again", entry.path().display());
        drop(entry);
        cache.discard_at_last(kind, key)?;
    }
    Err(StoreError::Damaged(PathBuf::from(format!("{kind}-{key}"))))
}

/// A copy of the squashfs of a tree, mode 0444; it is there while the entry is held.
///
/// # Errors
/// As [`StoreError`] says.
pub fn disk(cache: &Cache, stored: &Stored) -> Result<(PathBuf, Entry), StoreError> {
    let digest = |disk: &Path| File::open(disk).and_then(Digest::of_reader).map_err(Fault::Kept);
    let make = |directory: &Path| {
        let path = directory.join(DISK);
        // In a microVM what is written goes to an overlay, so there the modes are those that unpacking gives.
        let packed = pack_with(&stored.path(), &path, 0o222)?;
        let content = digest(&path).map_err(|fault| fault.of(&path))?;
        About { bytes: packed.bytes, content: Some(content), ..stored.about.clone() }.write(directory)?;
        Ok(())
    };
    let (copy, _) = copied(cache, "disk", &stored.key, make, DISK, seal::copy_file, digest)?;
    Ok((copy.path().join(DISK), copy))
}

/// The image layout of what was pulled under that digest, of a manifest or an index; `pull` fills the directory that it is
/// given if it is not there yet, and says what came.
///
/// # Errors
/// As `pull`, or if it can't be kept.
pub fn pulled<E: From<CacheError>>(
    cache: &Cache,
    digest: Digest,
    pull: impl FnOnce(&Path) -> Result<About, E>,
) -> Result<Entry, E> {
    cache.entry("pulled", &pulled_key(digest), |directory| {
        let about = pull(directory)?;
        Ok(about.write(directory)?)
    })
}

fn pulled_key(digest: Digest) -> String {
    Digest::of(format!("pulled {FORMAT} {digest}").as_bytes()).to_string()
}

/// Removes what was pulled under that digest, since it turned out to be damaged.
///
/// # Errors
/// If it can't be removed.
pub fn forget_pulled(cache: &Cache, digest: Digest) -> Result<Gone, CacheError> {
    cache.discard("pulled", &pulled_key(digest))
}

/// An entry that is an image, in one of its forms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// What it is; none for one of another release of plimsoll.
    pub about: Option<About>,
    /// Where and since when.
    pub held: Held,
}

impl Listed {
    /// Which form it has: `pulled` (layers), `image` (unpacked), `disk`.
    #[must_use]
    pub fn form(&self) -> &str {
        &self.held.kind
    }

    /// Whether somebody means this one: by the reference, or by a digest or the beginning of one.
    #[must_use]
    pub fn answers_to(&self, wanted: &str) -> bool {
        let Some(about) = &self.about else { return false };
        let hex = wanted.strip_prefix("sha256:").unwrap_or(wanted);
        let is = |digest: &Digest| hex.len() >= 6 && digest.to_string().starts_with(hex);
        about.reference == wanted || is(&about.digest) || about.index.as_ref().is_some_and(is)
    }
}

/// All images, those first that were not used for longest.
///
/// # Errors
/// If the cache can't be listed.
pub fn list(cache: &Cache) -> Result<Vec<Listed>, CacheError> {
    let images = cache.entries()?.into_iter().filter(|held| KINDS.contains(&held.kind.as_str()));
    Ok(images.map(|held| Listed { about: About::of(&held.path), held }).collect())
}

/// Removes images: first those that were not used for `unused`, then, those first that were not used for longest, until no
/// more than `bytes` are left. Those in use stay. Says what went.
///
/// # Errors
/// If the cache can't be listed, or something can't be removed.
pub fn gc(cache: &Cache, bytes: u64, unused: Duration) -> Result<Vec<Listed>, CacheError> {
    cache.sweep_unfinished()?;
    let all = list(cache)?;
    let copies = cache.numbers_of_copies()?;
    let size = |one: &Listed| {
        let copies = copies.get(&format!("{}-{}", one.held.kind, one.held.key)).copied().unwrap_or(0);
        one.about.as_ref().map_or(0, |about| about.bytes * (1 + copies))
    };
    let mut total: u64 = all.iter().map(size).sum();
    let before = SystemTime::now().checked_sub(unused);
    let mut gone = Vec::new();
    for one in all {
        let old = before.is_some_and(|before| one.held.used < before);
        // What another release left is of no use to this one.
        if !(old || total > bytes || one.about.is_none()) {
            continue;
        }
        if cache.discard(&one.held.kind, &one.held.key)? == Gone::Removed {
            total = total.saturating_sub(size(&one));
            gone.push(one);
        }
    }
    // Those of what went just now.
    cache.sweep_copies()?;
    Ok(gone)
}

/// Keeps the cache within bounds; what was made just now is in use.
fn bound(cache: &Cache) {
    if let Err(error) = gc(cache, MOST_BYTES, LONGEST_UNUSED) {
        tracing::debug!(error = crate::text::chain(&error), "the cache of images was not tidied");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn origin(digest: Digest) -> Origin<'static> {
        Origin { how: "test", reference: "test:1", digest }
    }

    /// A tree with one file below the directory that is unpacked to.
    fn fill(content: &'static str) -> impl Fn(&File) -> Result<(), ArtifactError> {
        move |tree| {
            let make = || -> std::io::Result<()> {
                let file = rustix::fs::openat(
                    tree,
                    "file",
                    rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY,
                    rustix::fs::Mode::from_raw_mode(0o644),
                )?;
                std::io::Write::write_all(&mut File::from(file), content.as_bytes())
            };
            make().map_err(|e| ArtifactError::failed("fill it", e))
        }
    }

    #[test]
    fn a_tree_and_its_disk_are_made_once_for_a_digest() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let digest = Digest::of(b"image");
        let first = tree(&cache, origin(digest), fill("x")).unwrap();
        let again = tree(&cache, origin(digest), |_| panic!("it is there")).unwrap();
        assert_ne!(first.path(), again.path());
        tree(&cache, Origin { how: "another way", ..origin(digest) }, fill("y")).unwrap();
        let (path, _held) = disk(&cache, &first).unwrap();
        assert!(fs::read(&path).unwrap().starts_with(b"hsqs"));
        assert_ne!(disk(&cache, &again).unwrap().0, path);
        let mut forms: Vec<_> = list(&cache).unwrap().iter().map(|one| one.form().to_owned()).collect();
        forms.sort();
        assert_eq!(forms, ["disk", "image", "image"]);
        let failed = tree(&cache, origin(Digest::of(b"x")), |_| {
            Err(ArtifactError::failed("do it", std::io::Error::from(std::io::ErrorKind::Other)))
        });
        assert!(matches!(failed, Err(StoreError::Artifact(_))));
    }

    /// What the cache itself holds of that kind.
    fn kept(cache: &Cache, kind: &str) -> PathBuf {
        let entry = cache.entries().unwrap().into_iter().find(|held| held.kind == kind).unwrap().path;
        entry.join(if kind == "disk" { DISK } else { "tree/file" })
    }

    fn flip(path: &Path) {
        let mut bytes = fs::read(path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
        fs::write(path, bytes).unwrap();
    }

    #[test]
    fn a_flipped_byte_is_made_again_and_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let made = AtomicUsize::new(0);
        let unpack = |at: &File| {
            made.fetch_add(1, Ordering::Relaxed);
            fill("content")(at)
        };
        let use_it = || tree(&cache, origin(Digest::of(b"i")), unpack).unwrap();
        let content = |stored: &Stored| fs::read_to_string(stored.path().join("file")).unwrap();
        let before = use_it();
        // One run has its copy; what becomes of the entry changes nothing in it, and what becomes of it changes no entry.
        flip(&kept(&cache, "image"));
        assert_eq!((content(&before), content(&use_it())), ("content".to_owned(), "content".to_owned()));
        assert_eq!(made.load(Ordering::Relaxed), 2);
        flip(&before.path().join("file"));
        assert_eq!((content(&before), content(&use_it())), ("contenu".to_owned(), "content".to_owned()));
        assert_eq!(made.load(Ordering::Relaxed), 2);
        let (disk_file, held) = disk(&cache, &use_it()).unwrap();
        let good = fs::read(&disk_file).unwrap();
        assert_eq!(fs::metadata(&disk_file).unwrap().permissions().mode() & 0o7777, 0o444);
        flip(&kept(&cache, "disk"));
        assert_eq!(fs::read(disk(&cache, &use_it()).unwrap().0).unwrap(), good);
        assert_eq!(fs::read(&disk_file).unwrap(), good);
        drop((before, held));
        // The next run has the copy of the one before, unless that is not what it was.
        let first = use_it().path();
        assert_eq!(use_it().path(), first);
        flip(&first.join("file"));
        let second = use_it();
        assert_ne!(second.path(), first);
        assert_eq!((content(&second), first.exists()), ("content".to_owned(), false));
        assert_eq!(made.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn many_runs_that_find_it_damaged_all_get_what_was_unpacked() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let use_it = || tree(&cache, origin(Digest::of(b"i")), fill("content")).unwrap();
        use_it();
        flip(&kept(&cache, "image"));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let stored = use_it();
                    assert_eq!(fs::read_to_string(stored.path().join("file")).unwrap(), "content");
                });
            }
        });
    }

    #[test]
    fn the_oldest_make_room_for_the_newest() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        for name in ["a", "b", "c"] {
            let digest = Digest::of(name.as_bytes());
            tree(&cache, Origin { reference: name, ..origin(digest) }, fill("12345678")).unwrap();
        }
        fs::create_dir(dir.path().join("image-of-another-release")).unwrap();
        let names = |all: Vec<Listed>| {
            all.into_iter().map(|one| one.about.map_or("?".to_owned(), |a| a.reference)).collect::<Vec<_>>()
        };
        let a = tree(&cache, Origin { reference: "a", ..origin(Digest::of(b"a")) }, fill("12345678")).unwrap();
        let kept = cache.entry("image", &a.key, |_| Err(CacheError::Untrusted(PathBuf::new()))).unwrap();
        // Each has a copy that waits for the next run.
        assert_eq!(names(gc(&cache, 40, LONGEST_UNUSED).unwrap()), ["?", "b"]);
        // In use, whatever the bounds.
        assert_eq!(names(gc(&cache, 0, Duration::ZERO).unwrap()), ["c"]);
        drop(kept);
        let listed = list(&cache).unwrap();
        let digest = Digest::of(b"a").to_string();
        for wanted in ["a", &digest[..12], &format!("sha256:{digest}")] {
            assert!(listed[0].answers_to(wanted), "{wanted}");
        }
        for other in ["b", "", &digest[..4], "sha256:"] {
            assert!(!listed[0].answers_to(other), "{other}");
        }
    }
}

//! A kernel for guests, where runs find it: a readable copy of an installed one (Ubuntu keeps `/boot/vmlinuz-*` root-only), or
//! one that a tree of the same shape brings: `boot/vmlinuz-RELEASE` and `lib/modules/RELEASE`. Such a tree may come as an
//! archive, since a kernel of a distribution is of no use without its modules; it is unpacked in the jailed helper.
//!
//! The kernel is guest code: whatever it is, the boundary is judged from outside. What can be told is told: its digest is compared if
//! one is given, and a kernel of this host's distribution was verified by the package manager.

use std::fs::{self, DirBuilder, File, Permissions};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::source::{Pin, Source, SourceError};
use super::{Place, Plan, Put, SetupError};
use crate::artifact::{Acquire, Budget, Digest, Purpose, acquire};
use crate::env::Env;
use crate::image::kernel::COPY;
use crate::run::scratch::Scratch;
use crate::run::{state_dir, unpacker};

/// Longest kernel and longest module, bytes.
const MOST: u64 = 512 << 20;
/// Files of a release's modules beside the modules themselves.
const LISTS: [&str; 3] = ["modules.dep", "modules.builtin", "modules.builtin.modinfo"];

/// How long unpacking an archive may take.
const DEADLINE: Duration = Duration::from_secs(300);

/// Where a kernel comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum From {
    /// A tree.
    Tree(PathBuf),
    /// An archive of one, under that name there.
    Archive(Source, String),
}

impl From {
    /// Reads `--from`.
    ///
    /// # Errors
    /// If it is no directory, file or address of a file.
    pub fn parse(text: &str) -> Result<Self, SourceError> {
        if text.starts_with("https://") || text.starts_with("http://") {
            let unknown = || SourceError::Unknown(crate::artifact::rejection::shown(text.as_bytes()));
            let (base, name) = text.rsplit_once('/').filter(|(_, name)| !name.is_empty()).ok_or_else(unknown)?;
            return Ok(Self::Archive(Source::parse(base)?, name.to_owned()));
        }
        Ok(match Source::parse(text)? {
            Source::Directory(tree) => Self::Tree(tree),
            file => {
                let name = Path::new(text).file_name().unwrap_or_default().to_string_lossy().into_owned();
                Self::Archive(file, name)
            }
        })
    }
}

/// What is to be written: the newest kernel that comes `from` there, or the one of that release. `pin` is the digest of the
/// kernel, or of the archive.
///
/// # Errors
/// If there is none, or nothing says that it is what it should be.
pub fn plan(
    place: &Place,
    from: &From,
    release: Option<&str>,
    pin: Option<Pin>,
    env: &Env,
) -> Result<Plan, SetupError> {
    if place.user.is_some() {
        return Err(SetupError::Root("a kernel for all runs of this host"));
    }
    let (source, name) = match from {
        From::Tree(tree) => {
            let verify = |file: &Path, content: &[u8]| match &pin {
                Some(pin) => pin.check(&file.display().to_string(), content),
                None if owned_by_root(file) => Ok(format!("{} belongs to root, who installed it", file.display())),
                None => Err(SourceError::Unpinned(file.display().to_string())),
            };
            return planned(place, tree, release, verify);
        }
        From::Archive(source, name) => (source, name),
    };
    let (archive, note) = source.verified(name, pin, ".sha256", MOST, env)?;
    let state = state_dir(env);
    let scratch = Scratch::create(&state).map_err(|e| SetupError::Unfit(crate::text::chain(&e)))?;
    let (packed, tree) = (scratch.path().join("archive"), scratch.path().join("tree"));
    fs::write(&packed, &archive).map_err(SetupError::io("write", &packed))?;
    // Whoever unpacks has another uid; nobody else gets here.
    DirBuilder::new()
        .mode(0o777)
        .create(&tree)
        .and_then(|()| fs::set_permissions(&tree, Permissions::from_mode(0o777)))
        .map_err(SetupError::io("make", &tree))?;
    let into = File::open(&tree).map_err(SetupError::io("open", &tree))?;
    let what = Acquire {
        path: &packed,
        purpose: Purpose::RootFs,
        sha256: Some(Digest::of(&archive)),
        budget: Budget::default(),
        deadline: DEADLINE,
        exclude: &[],
    };
    acquire(&what, into.as_fd(), &AtomicBool::new(false), unpacker::start)
        .map_err(|e| SourceError::Archive { name: source.place(name), why: crate::text::chain(&e) })?;
    planned(place, &tree, release, |_, _| Ok(note.clone()))
}

fn planned(
    place: &Place,
    tree: &Path,
    release: Option<&str>,
    verify: impl Fn(&Path, &[u8]) -> Result<String, SourceError>,
) -> Result<Plan, SetupError> {
    let file = newest(tree, release)?;
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let release = name.trim_start_matches("vmlinuz-").to_owned();
    let content = read(&file)?;
    let note = verify(&file, &content)?;
    let copy = place.at(COPY);
    let mut files = vec![Put { to: copy.join("boot").join(&name), mode: 0o644, content, engine: None }];
    let modules = ["lib/modules", "usr/lib/modules"].map(|below| tree.join(below).join(&release));
    if let Some(modules) = modules.iter().find(|modules| modules.join("modules.dep").is_file())
        && tree != Path::new("/")
    {
        let to = copy.join("lib/modules").join(&release);
        let mut names: Vec<PathBuf> = LISTS.map(PathBuf::from).to_vec();
        find(modules, Path::new("kernel"), &mut names)?;
        for name in names.into_iter().filter(|name| modules.join(name).is_file()) {
            let content = read(&modules.join(&name))?;
            files.push(Put { to: to.join(name), mode: 0o644, content, engine: None });
        }
    }
    Ok(Plan { files, notes: vec![note] })
}

fn newest(tree: &Path, release: Option<&str>) -> Result<PathBuf, SetupError> {
    let boot = tree.join("boot");
    let entries = fs::read_dir(&boot).map_err(|source| SourceError::Io { path: boot.clone(), source })?;
    let mut found: Vec<(Vec<u64>, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let own = name.strip_prefix("vmlinuz-")?;
            let numbers = own.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect();
            release.is_none_or(|wanted| wanted == own).then(|| (numbers, entry.path()))
        })
        .collect();
    found.sort();
    let none = || SetupError::Unfit(format!("there is no kernel `vmlinuz-RELEASE` in {}", boot.display()));
    found.pop().map(|(_, path)| path).ok_or_else(none)
}

fn owned_by_root(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.is_file() && meta.uid() == 0 && meta.mode() & 0o022 == 0)
}

fn read(path: &Path) -> Result<Vec<u8>, SetupError> {
    let io = |source| SourceError::Io { path: path.to_owned(), source };
    if fs::metadata(path).map_err(io)?.len() > MOST {
        return Err(SourceError::Large { name: path.display().to_string(), most: MOST }.into());
    }
    Ok(fs::read(path).map_err(io)?)
}

/// Modules that guests load are few, but which depend on which is the kernel's to say: all of the drivers that may be needed.
fn find(modules: &Path, below: &Path, found: &mut Vec<PathBuf>) -> Result<(), SetupError> {
    const PARTS: [&str; 5] =
        ["kernel/drivers/virtio", "kernel/drivers/block", "kernel/fs", "kernel/net/vmw_vsock", "kernel/lib"];
    let directory = modules.join(below);
    let Ok(entries) = fs::read_dir(&directory) else { return Ok(()) };
    for entry in entries.flatten() {
        let path = below.join(entry.file_name());
        let wanted = PARTS.iter().any(|part| path.starts_with(part) || Path::new(part).starts_with(&path));
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && wanted => find(modules, &path, found)?,
            Ok(kind) if kind.is_file() && PARTS.iter().any(|part| path.starts_with(part)) => found.push(path),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_kernel_comes_with_its_modules_if_its_digest_is_known() {
        let (tree, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let write = |name: &str, content: &str| {
            let path = tree.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        };
        write("boot/vmlinuz-6.9.0", "old");
        write("boot/vmlinuz-6.12.1-cloud", "new");
        for name in ["modules.dep", "kernel/fs/squashfs/squashfs.ko", "kernel/sound/a.ko"] {
            write(&format!("lib/modules/6.12.1-cloud/{name}"), name);
        }
        let place = Place { root: root.path().to_owned(), user: None };
        let digest = crate::artifact::Digest::of(b"new").to_string();
        let pin = |digest: &str| Some(Pin::Sha256(digest.to_owned(), "you".to_owned()));
        let from = From::Tree(tree.path().to_owned());
        let plan = |pin| super::plan(&place, &from, None, pin, &Env::default());
        plan(pin(&digest)).unwrap().carry_out(&place, false).unwrap();
        let copy = place.at(COPY);
        assert_eq!(fs::read_to_string(copy.join("boot/vmlinuz-6.12.1-cloud")).unwrap(), "new");
        assert!(copy.join("lib/modules/6.12.1-cloud/kernel/fs/squashfs/squashfs.ko").is_file());
        assert!(!copy.join("lib/modules/6.12.1-cloud/kernel/sound").exists());
        assert!(plan(pin(&"0".repeat(64))).is_err());
        // Whose it is says nothing if everybody can write it.
        fs::set_permissions(
            tree.path().join("boot/vmlinuz-6.12.1-cloud"),
            std::os::unix::fs::PermissionsExt::from_mode(0o666),
        )
        .unwrap();
        assert!(plan(None).is_err());
    }
}

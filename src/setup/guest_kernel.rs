//! A kernel for guests, where runs find it: a readable copy of an installed one (Ubuntu keeps `/boot/vmlinuz-*` root-only), or
//! one that a tree of the same shape brings: `boot/vmlinuz-RELEASE` and `lib/modules/RELEASE`. Such a tree may come as an
//! archive, since a kernel of a distribution is of no use without its modules; it is unpacked in the jailed helper.
//!
//! The kernel is guest code: whatever it is, the boundary is judged from outside. What can be told is told: its digest is compared if
//! one is given, and a kernel of this host's distribution was verified by the package manager.

use std::fs::{self, Metadata};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::fs::FileType;

use super::source::{Pin, Source, SourceError};
use super::tree::Tree;
use super::{Place, Plan, Put, SetupError};
use crate::artifact::helper::make_destination;
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
        From::Tree(path) => {
            let verify = |kernel: &Kernel| {
                let name = path.join(&kernel.path).display().to_string();
                match &pin {
                    Some(pin) => pin.check(&name, &kernel.content),
                    None if kernel.belongs_to_root() => Ok(format!("{name} belongs to root, who installed it")),
                    None => Err(SourceError::Unpinned(name)),
                }
            };
            let tree = Tree::open(path, path.display().to_string())?;
            return planned(place, &tree, path != Path::new("/"), release, verify);
        }
        From::Archive(source, name) => (source, name),
    };
    let (archive, note) = source.verified(name, pin, ".sha256", MOST, env)?;
    let scratch = Scratch::create(&state_dir(env)).map_err(|e| SetupError::Unfit(crate::text::chain(&e)))?;
    let (packed, unpacked) = (scratch.path().join("archive"), scratch.path().join("tree"));
    fs::write(&packed, &archive).map_err(SetupError::io("write", &packed))?;
    let into = make_destination(&unpacked).map_err(SetupError::io("make", &unpacked))?;
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
    let tree = Tree::open(&unpacked, source.place(name))?;
    planned(place, &tree, true, release, |_| Ok(note.clone()))
}

/// A kernel as it lies in a tree.
struct Kernel {
    /// Relative to the tree.
    path: PathBuf,
    release: String,
    linked: bool,
    meta: Metadata,
    content: Vec<u8>,
}

impl Kernel {
    fn belongs_to_root(&self) -> bool {
        !self.linked && self.meta.uid() == 0 && self.meta.mode() & 0o022 == 0
    }

    /// The newest of a tree, or the one of that release.
    fn newest(tree: &Tree, release: Option<&str>) -> Result<Self, SetupError> {
        let none = || SetupError::Unfit(format!("there is no kernel `boot/vmlinuz-RELEASE` in {}", tree.name));
        let names = tree.names(Path::new("boot")).map_err(|_| none())?;
        let (_, own, linked) = names
            .into_iter()
            .filter_map(|(name, kind)| {
                let own = name.strip_prefix("vmlinuz-")?.to_owned();
                let numbers: Vec<u64> =
                    own.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect();
                release.is_none_or(|wanted| wanted == own).then_some((numbers, own, kind == FileType::Symlink))
            })
            .max()
            .ok_or_else(none)?;
        let path = Path::new("boot").join(format!("vmlinuz-{own}"));
        let (meta, content) = tree.read(&path, MOST)?.ok_or_else(none)?;
        Ok(Self { path, release: own, linked, meta, content })
    }
}

/// The plan for a tree; `with_modules` unless the host itself has them.
fn planned(
    place: &Place,
    tree: &Tree,
    with_modules: bool,
    release: Option<&str>,
    verify: impl Fn(&Kernel) -> Result<String, SourceError>,
) -> Result<Plan, SetupError> {
    let kernel = Kernel::newest(tree, release)?;
    let note = verify(&kernel)?;
    let copy = place.at(COPY);
    let Kernel { path, release, content, .. } = kernel;
    let mut files = vec![Put { to: copy.join(&path), mode: 0o644, content, engine: None }];
    if with_modules {
        files.extend(modules(place, tree, &release)?);
    }
    Ok(Plan { files, notes: vec![note] })
}

/// Modules of that release, unless the host has its own. Without any `kernel: distro` would pass the kernel over.
fn modules(place: &Place, tree: &Tree, release: &str) -> Result<Vec<Put>, SetupError> {
    let below = ["lib/modules", "usr/lib/modules"].map(|below| Path::new(below).join(release));
    for own in &below {
        if tree.read(&own.join("modules.dep"), MOST)?.is_none() {
            continue;
        }
        let mut names: Vec<PathBuf> = LISTS.map(PathBuf::from).to_vec();
        find(tree, own, Path::new("kernel"), &mut names);
        let to = place.at(COPY).join("lib/modules").join(release);
        let mut files = Vec::new();
        for name in names {
            if let Some((_, content)) = tree.read(&own.join(&name), MOST)? {
                files.push(Put { to: to.join(name), mode: 0o644, content, engine: None });
            }
        }
        return Ok(files);
    }
    if below.iter().any(|own| place.root.join(own).join("modules.dep").is_file()) {
        return Ok(Vec::new());
    }
    Err(SetupError::Unfit(format!(
        "{} has no `lib/modules/{release}/modules.dep`, and neither has this host: a guest would have no drivers",
        tree.name
    )))
}

/// Modules that guests load are few, but which depend on which is the kernel's to say: all of the drivers that may be needed.
fn find(tree: &Tree, modules: &Path, below: &Path, found: &mut Vec<PathBuf>) {
    const PARTS: [&str; 5] =
        ["kernel/drivers/virtio", "kernel/drivers/block", "kernel/fs", "kernel/net/vmw_vsock", "kernel/lib"];
    for (name, kind) in tree.names(&modules.join(below)).unwrap_or_default() {
        let path = below.join(name);
        let wanted = PARTS.iter().any(|part| path.starts_with(part) || Path::new(part).starts_with(&path));
        match kind {
            FileType::Directory if wanted => find(tree, modules, &path, found),
            FileType::RegularFile if PARTS.iter().any(|part| path.starts_with(part)) => found.push(path),
            _ => {}
        }
    }
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

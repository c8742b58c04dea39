//! What a microVM is made of: a kernel with its initramfs, and an image for each tree of the step's.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::backend::{AGENT, MachineMount, MachineParts};
use crate::env::Env;
use crate::exit::Exit;
use crate::image::cache::{self, Entry};
use crate::image::kernel::{self, GuestKernel, KernelError};
use crate::image::store::{self, Stored};
use crate::image::{Cache, squashfs};
use crate::spec::{Kernel, Mount};

use super::parts::Why;
use super::record::refusal;

/// Remembers, in the user's cache, that this host runs no guests; holds the boot id for which that is so.
const UNFIT: &str = "kvm-unfit";

/// Kernel and disks, which are there for as long as this is held.
#[derive(Debug)]
pub struct Ground {
    kernel: GuestKernel,
    rootfs: PathBuf,
    mounts: Vec<MachineMount>,
    /// What the report should say about them.
    pub notice: Option<String>,
    _disk: Option<Entry>,
}

/// What to make them of.
#[derive(Debug, Clone, Copy)]
pub struct Sources<'a> {
    /// The kernel that the step wants.
    pub kernel: &'a Kernel,
    /// The root file system: a tree, or an image that was made of one.
    pub rootfs: Root<'a>,
    /// Further mounts.
    pub mounts: &'a [Mount],
    /// A directory for what is made for this step alone.
    pub scratch: &'a Path,
    /// A directory of this run's, for a user who has no cache.
    pub fallback: &'a Path,
}

/// The root file system of an image.
#[derive(Debug, Clone, Copy)]
pub enum Root<'a> {
    /// A directory tree.
    Tree(&'a Path),
    /// One in the cache, where its squashfs is kept too.
    Stored(&'a Stored),
}

impl Ground {
    /// Makes them. Takes a while, and blocks.
    ///
    /// # Errors
    /// What to report instead.
    pub fn make(sources: &Sources<'_>) -> Result<Self, Why> {
        let cache = Cache::of_user(&Env::process(), sources.fallback)
            .map_err(|e| Box::new((Exit::Unavailable, refusal("image", "cache", crate::text::chain(&e), e.help()))))?;
        std::thread::scope(|scope| {
            let kernel = scope.spawn(|| kernel::prepare(sources.kernel, AGENT, &cache).map_err(|e| no_kernel(&e)));
            let disks = Disks::make(sources, &cache);
            let kernel = kernel.join().unwrap_or_else(|_| {
                let why = refusal("image", "internal", "making the kernel ready broke".to_owned(), "");
                Err(Box::new((Exit::Internal, why)))
            })?;
            let Disks { rootfs, mounts, stored } = disks?;
            Ok(Self { kernel, rootfs, mounts, notice: cache.notice().map(str::to_owned), _disk: stored })
        })
    }

    /// All parts, with a disk of the unpacked artifact, which is made in `scratch`. Blocks.
    ///
    /// # Errors
    /// What to report instead.
    pub fn with(&self, workspace: &Path, scratch: &Path) -> Result<MachineParts, Why> {
        Ok(MachineParts {
            kernel: self.kernel.kernel.clone(),
            initramfs: self.kernel.initrd.clone(),
            kernel_release: self.kernel.release.clone(),
            kernel_sha256: self.kernel.kernel_sha256.clone(),
            rootfs: self.rootfs.clone(),
            workspace: Some(pack(workspace, scratch.join("workspace.squashfs"))?),
            mounts: self.mounts.clone(),
        })
    }
}

struct Disks {
    rootfs: PathBuf,
    mounts: Vec<MachineMount>,
    stored: Option<Entry>,
}

impl Disks {
    fn make(sources: &Sources<'_>, cache: &Cache) -> Result<Self, Why> {
        let (rootfs, stored) = match sources.rootfs {
            Root::Tree(tree) => (pack(tree, sources.scratch.join("rootfs.squashfs"))?, None),
            Root::Stored(stored) => {
                let (path, entry) = store::disk(cache, stored).map_err(|e| {
                    let help = "look at the disk that holds the cache";
                    Box::new((Exit::Internal, refusal("image", "not-packed", crate::text::chain(&e), help)))
                })?;
                (path, Some(entry))
            }
        };
        let mut mounts = Vec::new();
        for (number, mount) in sources.mounts.iter().enumerate() {
            let is_file = fs::metadata(&mount.path).is_ok_and(|m| m.is_file());
            let name = mount.path.file_name().map(|name| name.to_string_lossy().into_owned());
            mounts.push(MachineMount {
                image: pack(&mount.path, sources.scratch.join(format!("mount-{number}.squashfs")))?,
                at: mount.at.display().to_string(),
                file: name.filter(|_| is_file),
            });
        }
        Ok(Self { rootfs, mounts, stored })
    }
}

fn pack(tree: &Path, into: PathBuf) -> Result<PathBuf, Why> {
    match squashfs::pack(tree, &into) {
        Ok(_) => Ok(into),
        Err(e) => {
            let message = format!("{} cannot be packed for a microVM: {}", tree.display(), crate::text::chain(&e));
            let why = refusal("image", "not-packed", message, "look at the disk, and at that directory");
            Err(Box::new((Exit::Internal, why)))
        }
    }
}

fn no_kernel(error: &KernelError) -> Why {
    let (exit, stage, reason) = match error {
        KernelError::NotListed { .. } => (Exit::Refused, "policy", "kernel-not-listed"),
        KernelError::NoneSuitable(_) | KernelError::Machine | KernelError::Cache(_) => {
            (Exit::Unavailable, "prepare", "backend-unavailable")
        }
        _ => (Exit::Rejected, "image", "kernel-rejected"),
    };
    Box::new((exit, refusal(stage, reason, crate::text::chain(error), &error.help())))
}

/// Whether a microVM was waited for in vain since this host was started. To be asked where another backend will do: one
/// that is wanted by name is tried again.
#[must_use]
pub fn known_unfit() -> bool {
    place().is_some_and(|file| is_unfit(&file))
}

/// Remembers whether microVMs boot on this host.
pub fn remember(unfit: bool) {
    let Some(file) = place() else { return };
    // Only a matter of time saved, so a cache that cannot be written is no fault.
    if let Err(e) = note(&file, unfit) {
        tracing::debug!("{}: {e}", file.display());
    }
}

fn place() -> Option<PathBuf> {
    cache::base(&Env::process()).map(|base| base.join(UNFIT))
}

fn is_unfit(file: &Path) -> bool {
    fs::read_to_string(file).is_ok_and(|text| text == boot_id())
}

fn note(file: &Path, unfit: bool) -> io::Result<()> {
    if unfit {
        let directory = file.parent().unwrap_or(Path::new("/"));
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        return fs::write(file, boot_id());
    }
    match fs::remove_file(file) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_unfit_until_it_is_started_again_or_a_guest_boots() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("cache").join(UNFIT);
        assert!(!is_unfit(&file));
        note(&file, false).unwrap();
        note(&file, true).unwrap();
        assert!(is_unfit(&file));
        fs::write(&file, "another boot").unwrap();
        assert!(!is_unfit(&file));
        note(&file, true).unwrap();
        note(&file, false).unwrap();
        assert!(!is_unfit(&file));
    }
}

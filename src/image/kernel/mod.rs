//! The kernel that a microVM boots, and the initial file system that it starts with; nothing is downloaded.
//!
//! Main function: [`prepare`]. `kernel: distro` is the kernel that this host's distribution installed and keeps patched
//! ([`distro`]), `kernel: PATH` one that a step brings. The bootable image is taken out of the file ([`bzimage`],
//! [`decompress`](mod@decompress)), the modules that a microVM needs are chosen ([`modules`]) and packed with our agent. Both results are
//! kept in the [`Cache`] under the digest of everything that went into them, so at most starts only the kernel's file and a
//! few modules are read and hashed.
//!
//! A kernel that a step brings is guest code like the rest: it is only parsed here, within bounds, and never run here.

pub mod bzimage;
pub mod decompress;
pub mod distro;
pub mod modules;

pub use distro::COPY;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use bzimage::{Extracted, MAX_IMAGE, Machine};
use decompress::Fault;
use modules::{ModuleError, Modules, WANTED};

use super::cache::{Cache, CacheError, Entry};
use super::initramfs::initramfs;
use crate::artifact::Digest;
use crate::spec::{Kernel, Sha256Digest};

/// Counts what is done with the same input: entries of another number are not used.
const FORMAT: u32 = 1;
/// Names inside entries.
const IMAGE: &str = "image";
const FACTS: &str = "facts.json";

/// A kernel and its initial file system, ready to boot.
#[derive(Debug, Clone)]
pub struct GuestKernel {
    /// The bootable image (ELF; `Image` on aarch64) in the cache, mode 0444.
    pub kernel: PathBuf,
    /// The initial file system in the cache, mode 0444.
    pub initrd: PathBuf,
    /// As `uname -r` will say it; empty if a kernel that a step brings does not say.
    pub release: String,
    /// The file that was installed or named.
    pub origin: PathBuf,
    /// Of the bootable image, lowercase hex.
    pub kernel_sha256: String,
    /// Of the file that was installed or named, lowercase hex.
    pub source_sha256: String,
    /// Of the initial file system, lowercase hex.
    pub initrd_sha256: String,
    /// Names of the modules in it, in the order of loading; none when all is built in.
    pub modules: Vec<String>,
    /// Keeps the files where they are.
    _entries: [Entry; 2],
}

/// Why there is no kernel.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// No installed kernel will do.
    #[error("no kernel of this host can be a guest's{}", reasons(.0))]
    NoneSuitable(Vec<String>),
    /// The operator's policy lists kernels, and this is none of them.
    #[error("the policy does not list the kernel {file} (sha256 {sha256})")]
    NotListed {
        /// The file.
        file: PathBuf,
        /// Its digest.
        sha256: String,
    },
    /// It is no kernel, or a damaged one.
    #[error("{file} is no kernel that can be booted here: byte {offset}: {what}")]
    Damaged {
        /// The file.
        file: PathBuf,
        /// Where it is wrong.
        offset: usize,
        /// How.
        what: String,
    },
    /// It is another kernel than its name says, so the modules would not fit.
    #[error("{file} says that it is {found}, not {named}")]
    Release {
        /// The file.
        file: PathBuf,
        /// By its name.
        named: String,
        /// By its content.
        found: String,
    },
    /// It can't be read.
    #[error("failed to read the kernel {file}")]
    Io {
        /// The file.
        file: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// No microVM runs on this kind of machine.
    #[error("no microVM boots on this kind of machine ({})", std::env::consts::ARCH)]
    Machine,
    /// Its modules can't be used.
    #[error("the modules of the kernel can't be used")]
    Modules(#[from] ModuleError),
    /// The results can't be kept.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

fn reasons(reasons: &[String]) -> String {
    match reasons {
        [] => format!(": there is none below /boot or {}", distro::COPY),
        some => format!(": {}", some.join("; ")),
    }
}

impl KernelError {
    /// What to do about it, in one line.
    #[must_use]
    pub fn help(&self) -> String {
        match self {
            KernelError::NoneSuitable(reasons) if reasons.iter().any(|r| r.contains("Permission denied")) => format!(
                "make a readable copy: `sudo install -D -m 0644 -t {}/boot /boot/vmlinuz-*`, or name a kernel with `sandbox.kernel`",
                distro::COPY
            ),
            KernelError::NoneSuitable(_) | KernelError::Modules(ModuleError::Missing { .. }) => {
                "install a kernel with its modules (Debian: linux-image-cloud-amd64; Ubuntu: linux-image-virtual and linux-modules-extra; Fedora: kernel-core and kernel-modules), or name one that has virtio, vsock, squashfs and overlay built in with `sandbox.kernel`".to_owned()
            }
            KernelError::NotListed { .. } => "use `kernel: distro`, or ask the runner's owner to list its digest under `kernels`".to_owned(),
            KernelError::Damaged { .. } => {
                "name a bzImage or an ELF vmlinux for this machine, or install the kernel's package again".to_owned()
            }
            KernelError::Release { .. } => "install the kernel's package again".to_owned(),
            KernelError::Io { .. } => "correct `sandbox.kernel`, or make the file readable".to_owned(),
            KernelError::Machine => "use the backend `gvisor` or `wasm`".to_owned(),
            KernelError::Modules(_) => "run `depmod`, or install the kernel's package again".to_owned(),
            KernelError::Cache(error) => error.help().to_owned(),
        }
    }
}

/// Makes, or finds in the cache, the image and initial file system for a step's kernel. `agent` is what becomes `/init`.
///
/// # Errors
/// As [`KernelError`] says; [`KernelError::help`] says what to do.
pub fn prepare(source: &Kernel, agent: &[u8], cache: &Cache) -> Result<GuestKernel, KernelError> {
    let machine = Machine::host().ok_or(KernelError::Machine)?;
    prepare_for(machine, &[Path::new("/"), Path::new(distro::COPY)], source, agent, cache)
}

fn prepare_for(
    machine: Machine,
    roots: &[&Path],
    source: &Kernel,
    agent: &[u8],
    cache: &Cache,
) -> Result<GuestKernel, KernelError> {
    let (origin, installed) = match source {
        Kernel::Distro => {
            let installed = distro::newest(roots).map_err(KernelError::NoneSuitable)?;
            (installed.file, Some((installed.release, installed.modules)))
        }
        Kernel::Path { path, .. } => (path.clone(), None),
    };
    let source_sha256 = match source {
        Kernel::Distro => known_digest(&origin, cache)?,
        Kernel::Path { .. } => Digest::of(&read(&origin)?).to_string(),
    };
    let is_it = |digest: &Sha256Digest| digest.to_string() == source_sha256;
    if let Kernel::Path { listed: Some(listed), .. } = source
        && !listed.iter().any(is_it)
    {
        return Err(KernelError::NotListed { file: origin, sha256: source_sha256 });
    }
    let (kernel, facts) = image(machine, &origin, &source_sha256, cache)?;
    let (release, chosen) = match installed {
        Some((named, modules)) => match facts.release {
            Some(found) if found != named => return Err(KernelError::Release { file: origin, named, found }),
            _ => (named, modules),
        },
        // A kernel that a step brings has modules if its release is installed; otherwise it must do without.
        None => {
            let release = facts.release.unwrap_or_default();
            match distro::modules_of(roots, &release).filter(|_| !release.is_empty()) {
                Some(directory) => (release, Modules::open(&directory)?.choose(&WANTED)?),
                None => (release, Vec::new()),
            }
        }
    };
    let (initrd, initrd_sha256) = initial(agent, &chosen, cache)?;
    Ok(GuestKernel {
        kernel: kernel.path().join(IMAGE),
        initrd: initrd.path().join(IMAGE),
        release,
        origin,
        kernel_sha256: facts.sha256,
        source_sha256,
        initrd_sha256,
        modules: chosen.into_iter().map(|(name, _)| name).collect(),
        _entries: [kernel, initrd],
    })
}

/// What is known of an entry's image without reading it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Facts {
    sha256: String,
    release: Option<String>,
}

/// The digest of an installed kernel's file.
fn known_digest(file: &Path, cache: &Cache) -> Result<String, KernelError> {
    let meta = fs::metadata(file).map_err(|source| KernelError::Io { file: file.to_owned(), source })?;
    cache.digest(&meta, || Ok(Digest::of(&read(file)?).to_string()))
}

/// The bootable image out of a kernel's file, which has this digest.
fn image(machine: Machine, origin: &Path, sha256: &str, cache: &Cache) -> Result<(Entry, Facts), KernelError> {
    let key = Digest::of(format!("kernel {FORMAT} {machine:?} {sha256}").as_bytes()).to_string();
    let entry = cache.entry("kernel", &key, |directory| {
        let damaged = |Fault { offset, what }| KernelError::Damaged { file: origin.to_owned(), offset, what };
        let file = read(origin)?;
        if Digest::of(&file).to_string() != sha256 {
            return Err(damaged(Fault { offset: 0, what: "it changed while it was read".to_owned() }));
        }
        let Extracted { image, release } = bzimage::extract(file, machine).map_err(damaged)?;
        let sha256 = Digest::of(&image).to_string();
        store(directory, &image, &Facts { sha256, release })
    })?;
    let facts = facts(&entry)?;
    Ok((entry, facts))
}

/// The initial file system of these modules and the agent.
fn initial(agent: &[u8], chosen: &[(String, PathBuf)], cache: &Cache) -> Result<(Entry, String), KernelError> {
    let modules = chosen.iter().map(|(name, file)| modules::load(name, file)).collect::<Result<Vec<_>, _>>()?;
    let mut recipe = format!("initrd {FORMAT} {}", Digest::of(agent));
    for module in &modules {
        recipe.push_str(&format!(" {} {}", module.name, Digest::of(&module.content)));
    }
    let key = Digest::of(recipe.as_bytes()).to_string();
    let entry = cache.entry("initrd", &key, |directory| {
        let archive = initramfs(agent, &modules);
        let sha256 = Digest::of(&archive).to_string();
        store(directory, &archive, &Facts { sha256, release: None })
    })?;
    let facts = facts(&entry)?;
    Ok((entry, facts.sha256))
}

fn store(directory: &Path, image: &[u8], facts: &Facts) -> Result<(), KernelError> {
    let facts = serde_json::to_vec(facts).unwrap_or_default();
    for (name, content) in [(IMAGE, image), (FACTS, &facts)] {
        let path = directory.join(name);
        let written = OpenOptions::new().write(true).create_new(true).mode(0o444).open(&path);
        written.and_then(|mut file| file.write_all(content)).map_err(|source| CacheError::Io {
            action: "write",
            path,
            source,
        })?;
    }
    Ok(())
}

fn facts(entry: &Entry) -> Result<Facts, KernelError> {
    let path = entry.path().join(FACTS);
    let read = fs::read(&path).and_then(|bytes| Ok(serde_json::from_slice(&bytes)?));
    Ok(read.map_err(|source| CacheError::Io { action: "read", path, source })?)
}

fn read(path: &Path) -> Result<Vec<u8>, KernelError> {
    let io = |source| KernelError::Io { file: path.to_owned(), source };
    // A FIFO would be waited for.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(io)?;
    let meta = file.metadata().map_err(io)?;
    if !meta.is_file() {
        return Err(io(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(meta.len()).unwrap_or(0).min(MAX_IMAGE));
    file.take(MAX_IMAGE as u64 + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() > MAX_IMAGE {
        return Err(io(io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {MAX_IMAGE} bytes"))));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;

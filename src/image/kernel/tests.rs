//! From an installed or a named kernel to what boots.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;

use super::bzimage::tests::{bzimage, elf};
use super::decompress::Compression;
use super::modules::tests::{BUILTIN, DEP, installed};
use super::*;

const RELEASE: &str = "6.1.0-1-test";

struct Host {
    dir: tempfile::TempDir,
    cache: Cache,
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(&dir.path().join("cache")).unwrap();
        fs::create_dir(dir.path().join("boot")).unwrap();
        installed(&dir.path().join("lib/modules").join(RELEASE), DEP, BUILTIN);
        Host { dir, cache }
    }

    fn kernel(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.dir.path().join("boot").join(name);
        fs::write(&path, content).unwrap();
        path
    }

    fn prepare(&self, source: &Kernel, agent: &[u8]) -> Result<GuestKernel, KernelError> {
        prepare_for(Machine::X86_64, &[self.dir.path()], source, agent, &self.cache)
    }
}

fn named(path: PathBuf) -> Kernel {
    Kernel::Path { path, listed: None }
}

#[test]
fn the_installed_kernel_boots_with_its_modules_and_the_agent() {
    let host = Host::new();
    let file = bzimage(Compression::Zstd, RELEASE);
    let origin = host.kernel(&format!("vmlinuz-{RELEASE}"), &file);
    let ready = host.prepare(&Kernel::Distro, b"agent").unwrap();
    assert_eq!((ready.release.as_str(), &ready.origin), (RELEASE, &origin));
    assert_eq!(fs::read(&ready.kernel).unwrap(), elf(RELEASE));
    assert_eq!(ready.source_sha256, Digest::of(&file).to_string());
    assert_eq!(ready.kernel_sha256, Digest::of(&elf(RELEASE)).to_string());
    let initrd = fs::read(&ready.initrd).unwrap();
    assert_eq!(ready.initrd_sha256, Digest::of(&initrd).to_string());
    assert!(initrd.windows(16).any(|w| w == b"modules/05-overl"));
    assert_eq!(ready.modules.len(), 6);
    for path in [&ready.kernel, &ready.initrd] {
        assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o444);
    }
}

#[test]
fn what_goes_in_decides_whether_anything_is_made_again() {
    let host = Host::new();
    host.kernel(&format!("vmlinuz-{RELEASE}"), &bzimage(Compression::Gzip, RELEASE));
    let first = host.prepare(&Kernel::Distro, b"agent").unwrap();
    let again = host.prepare(&Kernel::Distro, b"agent").unwrap();
    assert!(first._entries.iter().all(|e| e.fresh) && again._entries.iter().all(|e| !e.fresh));
    assert_eq!((&first.kernel, &first.initrd), (&again.kernel, &again.initrd));
    let agent = host.prepare(&Kernel::Distro, b"another agent").unwrap();
    assert!(agent.kernel == first.kernel && agent.initrd != first.initrd);
    let module = host.dir.path().join("lib/modules").join(RELEASE).join("kernel/fs/overlay.ko");
    fs::write(module, "\x7fELF updated").unwrap();
    let module = host.prepare(&Kernel::Distro, b"agent").unwrap();
    assert!(module.kernel == first.kernel && module.initrd != first.initrd);
}

#[test]
fn a_kernel_that_a_step_names_brings_no_modules_but_those_of_its_release() {
    let host = Host::new();
    let own = host.prepare(&named(host.kernel("vmlinux", &elf("5.10.0-own"))), b"agent").unwrap();
    assert_eq!((own.release.as_str(), own.modules.len()), ("5.10.0-own", 0));
    let known = host.prepare(&named(host.kernel("bzImage", &bzimage(Compression::Xz, RELEASE))), b"agent").unwrap();
    assert_eq!((known.release.as_str(), known.modules.len()), (RELEASE, 6));
}

#[test]
fn a_policy_that_lists_kernels_lets_only_those_in() {
    let host = Host::new();
    let path = host.kernel("vmlinux", &elf("5.10.0"));
    let digest = |content: &[u8]| Digest::of(content).to_string();
    let listed = |content: &[u8]| {
        let mut bytes = [0; 32];
        hex::decode_to_slice(digest(content), &mut bytes).unwrap();
        Kernel::Path { path: path.clone(), listed: Some(BTreeSet::from([Sha256Digest::from_bytes(bytes)])) }
    };
    host.prepare(&listed(&elf("5.10.0")), b"agent").unwrap();
    let refused = host.prepare(&listed(b"another"), b"agent").unwrap_err();
    assert!(matches!(refused, KernelError::NotListed { sha256, .. } if sha256 == digest(&elf("5.10.0"))));
}

#[test]
fn damage_is_named_with_its_file_and_byte_and_what_to_do_and_leaves_no_entry() {
    let host = Host::new();
    let mut damaged = bzimage(Compression::Lz4, RELEASE);
    let length = damaged.len();
    damaged[length - 60..length - 30].fill(0xff);
    host.kernel(&format!("vmlinuz-{RELEASE}"), &damaged);
    let error = host.prepare(&Kernel::Distro, b"agent").unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&format!("boot/vmlinuz-{RELEASE}")) && text.contains("byte "), "{text}");
    assert!(error.help().contains("install"), "{}", error.help());
    host.kernel(&format!("vmlinuz-{RELEASE}"), &bzimage(Compression::Lz4, RELEASE));
    host.prepare(&Kernel::Distro, b"agent").unwrap();
    // Modules are built for one release only.
    host.kernel(&format!("vmlinuz-{RELEASE}"), &bzimage(Compression::Lz4, "6.1.0-2"));
    assert!(matches!(host.prepare(&Kernel::Distro, b"agent"), Err(KernelError::Release { .. })));
}

#[test]
fn what_is_no_file_is_not_waited_for() {
    let host = Host::new();
    let fifo = host.dir.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    for path in [fifo, host.dir.path().to_owned(), host.dir.path().join("missing")] {
        assert!(matches!(host.prepare(&named(path), b"agent"), Err(KernelError::Io { .. })));
    }
}

#[test]
fn the_kernel_of_this_host_can_be_prepared() {
    let host = Host::new();
    match prepare(&Kernel::Distro, b"agent", &host.cache) {
        Ok(ready) => {
            let position = |name| ready.modules.iter().position(|m| m == name);
            assert!(position("virtio_ring") <= position("virtio_mmio"), "{:?}", ready.modules);
            assert!(position("vsock") <= position("vmw_vsock_virtio_transport"), "{:?}", ready.modules);
        }
        Err(KernelError::NoneSuitable(reasons)) => eprintln!("skipped: no kernel of this host will do: {reasons:?}"),
        Err(error) => panic!("{}", crate::text::chain(&error)),
    }
}

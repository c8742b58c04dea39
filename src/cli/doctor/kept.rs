//! What trials of backends found since this host was started, kept in the user's cache: `doctor` alone reads it, and no run
//! ever does, whose gate observes for itself.
//!
//! Kept is what takes its time: a backend that is usable, and a microVM that was waited for in vain. Any other blocker is
//! found out anew, since it is asked for after something was mended. What was kept counts under the [`key`] of everything
//! that it depends on; a file that is somebody else's, too long or malformed does not count.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::record::BackendV1;
use crate::artifact::Digest;
use crate::backend::executable::Executable;
use crate::backend::{Backend, Engines, fix};
use crate::env::Env;
use crate::image::{cache, kernel};
use crate::run;
use crate::spec::{Policy, PolicyRefusal};

/// Longest of the files, bytes.
const MAX: u64 = 256 << 10;
/// Settings of the kernel that decide whether there are user namespaces.
const SYSCTLS: [&str; 3] = [
    "/proc/sys/user/max_user_namespaces",
    "/proc/sys/kernel/unprivileged_userns_clone",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
];
/// Of `/proc/self/status`, who and how confined this process is.
const STATUS: [&str; 7] = ["Uid:", "Gid:", "Groups:", "CapEff:", "CapBnd:", "NoNewPrivs:", "Seccomp:"];

#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    key: Digest,
    found: BackendV1,
}

/// The digest of everything that a trial of that backend depends on; none where this boot can't be told from another.
#[must_use]
pub fn key(backend: Backend, engines: &Engines, policy: &Result<Policy, PolicyRefusal>) -> Option<Digest> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let boot = read("/proc/sys/kernel/random/boot_id");
    if boot.is_empty() {
        return None;
    }
    let status = read("/proc/self/status");
    let status: Vec<_> = status.lines().filter(|line| STATUS.iter().any(|name| line.starts_with(name))).collect();
    let namespaces = ["user", "mnt", "pid", "net"].map(|name| fs::read_link(format!("/proc/self/ns/{name}")).ok());
    let vouched = policy.as_ref().map(Policy::engines).unwrap_or_default();
    let programs = [("runsc", &engines.runsc), ("firecracker", &engines.firecracker), ("jailer", &engines.jailer)];
    let programs = programs.map(|(name, path)| {
        Executable::open(name, path.as_deref()).ok().map(|engine| (engine.path().to_owned(), stat(engine.path())))
    });
    let places = ["/proc/self/exe", "/dev/kvm", "/boot", kernel::COPY].map(|path| stat(Path::new(path)));
    let kernels = stat(&Path::new(kernel::COPY).join("boot"));
    let text = format!(
        "{backend} {} {boot} {:?} {:?} {engines:?} {vouched:?} {status:?} {namespaces:?} {programs:?} {places:?} {kernels:?} {} {}",
        env!("CARGO_PKG_VERSION"),
        SYSCTLS.map(read),
        run::policy_record(policy),
        read("/proc/self/cgroup"),
        read("/proc/self/attr/current"),
    );
    Some(Digest::of(text.as_bytes()))
}

/// What the file system says of a file that changes with it.
fn stat(path: &Path) -> Option<impl std::fmt::Debug + use<>> {
    let meta = fs::metadata(path).ok()?;
    let times = (meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec());
    Some((meta.dev(), meta.ino(), meta.len(), times, meta.mode(), meta.uid(), meta.gid()))
}

fn place(backend: Backend, env: &Env) -> Option<PathBuf> {
    cache::base(env).map(|base| base.join(format!("trial-{backend}.json")))
}

/// What was found for that key.
#[must_use]
pub fn recall(backend: Backend, key: Digest, env: &Env) -> Option<BackendV1> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = File::options().read(true).custom_flags(flags).open(place(backend, env)?).ok()?;
    let meta = file.metadata().ok()?;
    if !meta.is_file() || meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o022 != 0 {
        return None;
    }
    let mut text = Vec::new();
    file.take(MAX).read_to_end(&mut text).ok()?;
    let kept: Kept = serde_json::from_slice(&text).ok()?;
    let fits = kept.key == key && kept.found.backend == backend.name() && worth_keeping(&kept.found);
    fits.then_some(BackendV1 { cached: true, ..kept.found })
}

/// Keeps what was found, if that is worth it.
pub fn keep(backend: Backend, key: Digest, found: &BackendV1, env: &Env) {
    let Some(path) = place(backend, env) else { return };
    let write = || -> io::Result<()> {
        let directory = path.parent().unwrap_or(Path::new("/"));
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let mut file = tempfile::NamedTempFile::new_in(directory)?;
        file.write_all(&serde_json::to_vec(&Kept { key, found: found.clone() })?)?;
        file.persist(&path).map(drop).map_err(|e| e.error)
    };
    // Only a matter of time saved, so a cache that cannot be written is no fault.
    if worth_keeping(found)
        && let Err(e) = write()
    {
        tracing::debug!("{}: {e}", path.display());
    }
}

fn worth_keeping(found: &BackendV1) -> bool {
    found.usable || found.help.as_deref() == Some(fix::KVM_USELESS)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::env::Var;
    use crate::evidence::Tier;

    fn found(usable: bool, help: Option<&str>) -> BackendV1 {
        BackendV1 {
            backend: "gvisor".to_owned(),
            usable,
            tier: usable.then_some(Tier::Kernel),
            floor: Tier::Kernel,
            total_ms: 900,
            engine: None,
            controls: Default::default(),
            blocker: help.map(|_| "it does not work".to_owned()),
            help: help.map(str::to_owned),
            found_at: jiff::Timestamp::UNIX_EPOCH,
            cached: false,
        }
    }

    #[test]
    fn what_takes_long_is_kept_and_what_may_be_mended_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let env = Env::from_iter([(Var::XdgCacheHome, dir.path())]);
        let (one, other) = (Digest::of(b"one"), Digest::of(b"other"));
        let recalled = |key| recall(Backend::Gvisor, key, &env).map(|found| (found.usable, found.cached));
        keep(Backend::Gvisor, one, &found(false, Some("install it")), &env);
        assert_eq!(recalled(one), None);
        keep(Backend::Gvisor, one, &found(false, Some(fix::KVM_USELESS)), &env);
        assert_eq!((recalled(one), recalled(other)), (Some((false, true)), None));
        keep(Backend::Gvisor, other, &found(true, None), &env);
        assert_eq!((recalled(one), recalled(other)), (None, Some((true, true))));
        assert!(recall(Backend::Wasm, other, &env).is_none());
    }

    #[test]
    fn a_file_that_is_not_ours_alone_or_is_no_such_thing_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let env = Env::from_iter([(Var::XdgCacheHome, dir.path())]);
        let key = Digest::of(b"key");
        let path = place(Backend::Gvisor, &env).unwrap();
        let usable = || recall(Backend::Gvisor, key, &env).is_some();
        keep(Backend::Gvisor, key, &found(true, None), &env);
        assert!(usable());
        fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
        assert!(!usable());
        let good = fs::read(&path).unwrap();
        for bad in [&b"{"[..], b"", &[b" ".repeat(300 << 10), good.clone()].concat(), &good[..good.len() - 1]] {
            fs::remove_file(&path).unwrap();
            fs::write(&path, bad).unwrap();
            assert!(!usable());
        }
        fs::rename(&path, dir.path().join("elsewhere")).unwrap();
        fs::write(dir.path().join("elsewhere"), good).unwrap();
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), &path).unwrap();
        assert!(!usable());
    }

    #[test]
    fn another_engine_another_setting_or_another_policy_is_another_key() {
        let dir = tempfile::tempdir().unwrap();
        let runsc = dir.path().join("runsc");
        fs::copy("/proc/self/exe", &runsc).unwrap();
        let engines = Engines { runsc: Some(runsc.clone()), ..Engines::default() };
        let of = |engines: &Engines, policy| key(Backend::Gvisor, engines, &Ok(policy));
        let first = of(&engines, Policy::absent());
        assert!(first.is_some() && first == of(&engines, Policy::absent()));
        let platform = Engines { platform: Some("ptrace".to_owned()), ..engines.clone() };
        assert_ne!(first, of(&platform, Policy::absent()));
        assert_ne!(first, of(&engines, Policy::of_text("backends: [wasm]\n")));
        assert_ne!(first, key(Backend::Wasm, &engines, &Ok(Policy::absent())));
        File::options().append(true).open(&runsc).unwrap().write_all(b"x").unwrap();
        assert_ne!(first, of(&engines, Policy::absent()));
    }
}

//! Finds the kernel that `kernel: distro` means: the newest one installed here that can be a guest's.
//!
//! Main function: [`newest`]. Looked for are `boot/vmlinuz-<release>` and `lib/modules/<release>/vmlinuz` (where Fedora and
//! Arch put it) below `/` and below [`COPY`], which holds readable copies: Ubuntu keeps `/boot/vmlinuz-*` root-only.
//! Suitable is one that is readable, that nobody but root and this user can write, and whose modules are all there.

use std::cmp::Ordering;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

use super::modules::{Modules, WANTED};

/// Where readable copies of kernels are, in a tree of the same shape as the host's.
pub const COPY: &str = "/var/lib/plimsoll/guest-kernel";

/// A kernel that will do.
#[derive(Debug)]
pub struct Installed {
    /// The kernel's file.
    pub file: PathBuf,
    /// As `uname -r` says it.
    pub release: String,
    /// Its modules, in the order of loading.
    pub modules: Vec<(String, PathBuf)>,
}

/// The newest suitable kernel below these roots; of one release, the one below the earlier root. `Err` holds, for each
/// kernel that was looked at, why it won't do.
pub fn newest(roots: &[&Path]) -> Result<Installed, Vec<String>> {
    let mut candidates = candidates(roots);
    candidates.sort_by(|a, b| compare(&b.0, &a.0));
    let mut reasons = Vec::new();
    for (release, file) in candidates {
        match suitable(roots, &release, &file) {
            Ok(modules) => return Ok(Installed { file, release, modules }),
            Err(why) => reasons.push(format!("{}: {why}", file.display())),
        }
    }
    Err(reasons)
}

/// The directory of a release's modules, below the first root that has one.
#[must_use]
pub fn modules_of(roots: &[&Path], release: &str) -> Option<PathBuf> {
    let places = roots.iter().flat_map(|root| [root.join("lib/modules"), root.join("usr/lib/modules")]);
    places.map(|place| place.join(release)).find(|directory| directory.join("modules.dep").exists())
}

/// Release and file of every kernel, the roots in their order.
fn candidates(roots: &[&Path]) -> Vec<(String, PathBuf)> {
    let names = |directory: PathBuf| {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
    };
    let mut found = Vec::new();
    for root in roots {
        for (name, path) in names(root.join("boot")) {
            if let Some(release) = name.strip_prefix("vmlinuz-") {
                found.push((release.to_owned(), path));
            }
        }
        for (release, path) in names(root.join("lib/modules")) {
            let file = path.join("vmlinuz");
            if file.exists() {
                found.push((release, file));
            }
        }
    }
    found
}

fn suitable(roots: &[&Path], release: &str, file: &Path) -> Result<Vec<(String, PathBuf)>, String> {
    let meta = fs::metadata(file).map_err(|e| e.to_string())?;
    if !meta.is_file() {
        return Err("it is no file".to_owned());
    }
    if meta.mode() & 0o022 != 0 || ![0, geteuid().as_raw()].contains(&meta.uid()) {
        return Err("somebody other than root can write it".to_owned());
    }
    let directory =
        modules_of(roots, release).ok_or_else(|| format!("there is no /lib/modules/{release}/modules.dep"))?;
    let modules = Modules::open(&directory).and_then(|modules| modules.choose(&WANTED));
    let modules = modules.map_err(|e| crate::text::chain(&e))?;
    // Last, so that what is said about a kernel that only lacks this is this.
    fs::File::open(file).map_err(|e| e.to_string())?;
    Ok(modules)
}

/// Releases in their order, numbers as numbers: `6.10` comes after `6.9`, `-57` after `-9`.
fn compare(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a, b);
    loop {
        let ((left, rest_a), (right, rest_b)) = (piece(a), piece(b));
        let order = match (left.parse::<u64>(), right.parse::<u64>()) {
            (Ok(left), Ok(right)) => left.cmp(&right),
            _ => left.cmp(right),
        };
        if order != Ordering::Equal || (rest_a.is_empty() && rest_b.is_empty()) {
            return order;
        }
        (a, b) = (rest_a, rest_b);
    }
}

/// The longest beginning of digits only or of none.
fn piece(text: &str) -> (&str, &str) {
    let digit = text.starts_with(|c: char| c.is_ascii_digit());
    let end = text.find(|c: char| c.is_ascii_digit() != digit).unwrap_or(text.len());
    text.split_at(end)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::modules::tests::{BUILTIN, DEP, installed};
    use super::*;

    fn kernel(root: &Path, release: &str, dep: &str) -> PathBuf {
        let file = root.join("boot").join(format!("vmlinuz-{release}"));
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "kernel").unwrap();
        if !dep.is_empty() {
            installed(&root.join("lib/modules").join(release), dep, BUILTIN);
        }
        file
    }

    #[test]
    fn releases_are_ordered_by_their_numbers() {
        let sorted = [
            "5.9.0",
            "5.10.0-9-amd64",
            "5.10.0-10-amd64",
            "6.1.0-57-amd64",
            "6.1.0-57-cloud-amd64",
            "6.1.10",
            "6.10.1",
        ];
        assert!(sorted.is_sorted_by(|a, b| compare(a, b) == Ordering::Less));
        assert_eq!(compare("6.1", "6.1"), Ordering::Equal);
        assert_eq!(compare("6.1-99999999999999999999999", "6.1-99999999999999999999999"), Ordering::Equal);
    }

    #[test]
    fn the_newest_that_will_do_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let (host, copy) = (dir.path().join("host"), dir.path().join("copy"));
        kernel(&host, "6.1.0-9", DEP);
        kernel(&host, "6.1.0-10", DEP);
        let lacks = DEP.replace("kernel/fs/overlay.ko:\n", "");
        kernel(&host, "6.5.0", &lacks);
        kernel(&host, "6.6.0", "");
        let open = kernel(&host, "6.7.0", DEP);
        fs::set_permissions(&open, PermissionsExt::from_mode(0o666)).unwrap();
        let roots = [host.as_path(), copy.as_path()];
        let found = newest(&roots).unwrap();
        assert_eq!((found.release.as_str(), found.file), ("6.1.0-10", host.join("boot/vmlinuz-6.1.0-10")));
        assert_eq!(found.modules.last().unwrap().0, "overlay");
        // A copy needs no modules of its own when the host's can be read.
        installed(&host.join("lib/modules/6.8.0"), DEP, BUILTIN);
        let copied = kernel(&copy, "6.8.0", "");
        assert_eq!(newest(&roots).unwrap().file, copied);
        let beside = host.join("lib/modules/6.9.0/vmlinuz");
        installed(beside.parent().unwrap(), DEP, BUILTIN);
        fs::write(&beside, "kernel").unwrap();
        assert_eq!(newest(&roots).unwrap().file, beside);
    }

    #[test]
    fn when_none_will_do_each_has_its_reason() {
        let dir = tempfile::tempdir().unwrap();
        kernel(dir.path(), "6.5.0", &DEP.replace("kernel/fs/overlay.ko:\n", ""));
        kernel(dir.path(), "6.6.0", "");
        let reasons = newest(&[dir.path()]).unwrap_err();
        assert_eq!(reasons.len(), 2);
        assert!(reasons[0].contains("vmlinuz-6.6.0: there is no"), "{reasons:?}");
        assert!(reasons[1].contains("the module overlay is neither"), "{reasons:?}");
        assert!(newest(&[]).unwrap_err().is_empty());
    }
}

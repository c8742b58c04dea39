//! What a boundary's root directory is made of.
//!
//! The root is a skeleton of our own: empty directories for what the boundary mounts itself, and below them the image's
//! top level, bound read-only. [`Rootfs::host`] shows of the runner's own tree only what programs need to run and
//! everybody may read: `/usr`, `/bin`, `/sbin`, `/lib*` and a list of files in `/etc`; nothing of `/root`, `/home`,
//! `/var`, `/run`, `/srv`, `/opt` or `/tmp`. A toolchain that lives there is deliberately not visible.
//!
//! A file below `/usr` that only root may read stays unreadable: the program has a uid that owns nothing.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Uid and gid of guest code: no distribution hands this number out, and no file of an image belongs to it.
pub const GUEST_USER: (u32, u32) = (47_113, 47_113);

/// Directories that the boundary makes or mounts itself; an image's own of the same name are not shown.
const OURS: [&str; 6] = ["proc", "sys", "dev", "run", "tmp", "workspace"];
/// Of the host's top level, what is shown.
const TOP: [&str; 8] = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "libo32"];
/// Of the host's `/etc`, what programs need and what tells nothing of this host. A directory is bound, a file copied.
const ETC: &[&str] = &[
    "alternatives",
    "ca-certificates",
    "crypto-policies",
    "fonts",
    "gai.conf",
    "inputrc",
    "java",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "localtime",
    "magic",
    "mime.types",
    "os-release",
    "perl",
    "pki/ca-trust",
    "pki/tls/certs",
    "profile.d",
    "protocols",
    "rpc",
    "services",
    "shells",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
];
/// Directories of `/etc` that interpreters keep their settings in, with a version in the name.
const ETC_PREFIXES: [&str; 3] = ["python", "php", "java-"];
/// A file that is copied is not longer.
const MAX_COPY: u64 = 8 * 1024 * 1024;

/// One entry of a root directory; paths are absolute, inside it, and parents come first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Entry {
    /// An empty directory of ours.
    Directory(PathBuf),
    /// A symbolic link, resolved inside.
    Link {
        /// Where.
        at: PathBuf,
        /// What it says.
        target: PathBuf,
    },
    /// A small file of ours.
    File {
        /// Where.
        at: PathBuf,
        /// Its content.
        content: Vec<u8>,
    },
    /// A directory or file of the host, bound read-only.
    Bind {
        /// Where.
        at: PathBuf,
        /// What, on the host.
        source: PathBuf,
    },
}

/// A root directory, to be built by whoever has the mount namespace for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rootfs {
    /// In the order they are made.
    pub entries: Vec<Entry>,
}

impl Rootfs {
    /// The toolchain part of the runner's own tree.
    ///
    /// # Errors
    /// If `/etc` cannot be listed.
    pub fn host() -> io::Result<Self> {
        let mut rootfs = Self::skeleton();
        for name in TOP {
            rootfs.show(Path::new("/"), Path::new(name));
        }
        rootfs.entries.push(Entry::Directory("/etc".into()));
        let mut names: Vec<String> = ETC.iter().map(|&n| n.to_owned()).collect();
        for entry in fs::read_dir("/etc")? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let versioned = |prefix: &str| {
                name.strip_prefix(prefix).and_then(|rest| rest.bytes().next()).is_some_and(|b| b.is_ascii_digit())
            };
            if ETC_PREFIXES.into_iter().any(versioned) {
                names.push(name);
            }
        }
        names.sort();
        names.dedup();
        for name in names {
            rootfs.show(Path::new("/"), &Path::new("etc").join(name));
        }
        rootfs.accounts();
        Ok(rootfs)
    }

    /// The top level of a tree, whole, but for the directories that the boundary makes itself.
    ///
    /// # Errors
    /// If it cannot be listed.
    pub fn tree(root: &Path) -> io::Result<Self> {
        let mut rootfs = Self::skeleton();
        let mut names = fs::read_dir(root)?.map(|e| Ok(e?.file_name())).collect::<io::Result<Vec<_>>>()?;
        names.sort();
        for name in names {
            if !OURS.iter().any(|&ours| name == ours) {
                rootfs.show(root, Path::new(&name));
            }
        }
        Ok(rootfs)
    }

    fn skeleton() -> Self {
        Self { entries: OURS.iter().map(|name| Entry::Directory(Path::new("/").join(name))).collect() }
    }

    /// Shows `root/name` at `/name`, if everybody may read it.
    fn show(&mut self, root: &Path, name: &Path) {
        let source = root.join(name);
        let at = Path::new("/").join(name);
        let Ok(meta) = fs::symlink_metadata(&source) else { return };
        let mode = meta.permissions().mode();
        let entry = if meta.is_symlink() {
            match fs::read_link(&source) {
                Ok(target) => Entry::Link { at, target },
                Err(_) => return,
            }
        } else if meta.is_dir() && mode & 0o005 == 0o005 {
            Entry::Bind { at, source }
        } else if meta.is_file() && mode & 0o004 != 0 && meta.len() <= MAX_COPY {
            match fs::read(&source) {
                Ok(content) => Entry::File { at, content },
                Err(_) => return,
            }
        } else if meta.is_file() && mode & 0o004 != 0 {
            Entry::Bind { at, source }
        } else {
            return;
        };
        self.parents(name);
        self.entries.push(entry);
    }

    /// Directories of ours above `/name` that are not there yet.
    fn parents(&mut self, name: &Path) {
        let mut above: Vec<PathBuf> = name.ancestors().skip(1).map(|p| Path::new("/").join(p)).collect();
        above.reverse();
        for path in above.into_iter().filter(|p| p != Path::new("/")) {
            let directory = Entry::Directory(path);
            if !self.entries.contains(&directory) {
                self.entries.push(directory);
            }
        }
    }

    /// Who there is: the host's own users are nobody's business.
    fn accounts(&mut self) {
        let (uid, gid) = GUEST_USER;
        let files = [
            (
                "/etc/passwd",
                format!(
                    "root:x:0:0:root:/:/usr/sbin/nologin\nplimsoll:x:{uid}:{gid}:guest code:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
                ),
            ),
            ("/etc/group", format!("root:x:0:\nplimsoll:x:{gid}:\nnogroup:x:65534:\n")),
            ("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n".to_owned()),
            ("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n".to_owned()),
            ("/etc/hostname", "plimsoll\n".to_owned()),
        ];
        self.entries.extend(files.map(|(at, content)| Entry::File { at: at.into(), content: content.into_bytes() }));
    }

    /// Adds a read-only mount of the host's `source` at `at`: a directory of ours is made for it where the skeleton
    /// reaches; below a bound directory of the image it has to exist.
    ///
    /// # Errors
    /// Why it cannot be there, in words.
    pub fn mount(&mut self, source: &Path, at: &str) -> Result<(), String> {
        let inner = match at.strip_prefix('/') {
            Some(inner) if !inner.is_empty() => Path::new(inner),
            _ => return Err(format!("{at} is no absolute path below /")),
        };
        if inner.components().any(|c| !matches!(c, std::path::Component::Normal(_))) {
            return Err(format!("{at} is no plain path"));
        }
        let top = inner.components().next().map(|c| c.as_os_str().to_owned()).unwrap_or_default();
        if OURS.iter().any(|&ours| top == ours) {
            return Err(format!("/{} is the boundary's own", top.display()));
        }
        let is_directory = fs::metadata(source).map_err(|e| format!("{}: {e}", source.display()))?.is_dir();
        let full = Path::new("/").join(inner);
        let bound = self.entries.iter().find_map(|entry| match entry {
            Entry::Bind { at, source } if full.starts_with(at) => Some((at.clone(), source.clone())),
            _ => None,
        });
        match bound {
            Some((above, from)) => {
                let there = full.strip_prefix(&above).map(|rest| from.join(rest)).unwrap_or(from);
                if there.is_dir() != is_directory || !there.exists() {
                    return Err(format!("{at} lies in the image, which has nothing there to mount over"));
                }
            }
            None => {
                if self.entries.iter().any(|e| matches!(e, Entry::Link { at, .. } if full.starts_with(at))) {
                    return Err(format!("{at} lies behind a symbolic link of the image"));
                }
                self.parents(inner);
                if is_directory {
                    let directory = Entry::Directory(full.clone());
                    if !self.entries.contains(&directory) {
                        self.entries.push(directory);
                    }
                } else {
                    self.entries.push(Entry::File { at: full.clone(), content: Vec::new() });
                }
            }
        }
        self.entries.push(Entry::Bind { at: full, source: source.to_owned() });
        Ok(())
    }

    /// Mount points inside that show files of the host.
    #[must_use]
    pub fn bound(&self) -> Vec<String> {
        self.entries
            .iter()
            .filter_map(|entry| match entry {
                Entry::Bind { at, .. } => Some(at.to_string_lossy().into_owned()),
                _ => None,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(rootfs: &Rootfs) -> Vec<String> {
        rootfs
            .entries
            .iter()
            .map(|entry| match entry {
                Entry::Directory(at) | Entry::Link { at, .. } | Entry::File { at, .. } | Entry::Bind { at, .. } => {
                    at.to_string_lossy().into_owned()
                }
            })
            .collect()
    }

    #[test]
    fn the_host_shows_its_toolchain_and_nothing_of_its_people() {
        let rootfs = Rootfs::host().unwrap();
        assert!(rootfs.bound().contains(&"/usr".to_owned()));
        for place in places(&rootfs) {
            for hidden in ["/root", "/home", "/var", "/srv", "/opt", "/etc/shadow", "/etc/ssl/private", "/etc/ssh"] {
                assert!(!Path::new(&place).starts_with(hidden), "{place}");
            }
        }
        for bound in rootfs.bound() {
            assert!(!["/", "/etc", "/etc/ssl", "/run", "/tmp"].contains(&bound.as_str()), "{bound}");
        }
        let passwd = rootfs.entries.iter().find_map(|e| match e {
            Entry::File { at, content } if at == Path::new("/etc/passwd") => Some(String::from_utf8_lossy(content)),
            _ => None,
        });
        assert_eq!(passwd.unwrap().lines().count(), 3);
    }

    #[test]
    fn parents_come_before_what_is_in_them() {
        let places = places(&Rootfs::host().unwrap());
        for (index, place) in places.iter().enumerate() {
            let above = Path::new(place).parent().unwrap();
            assert!(above == Path::new("/") || places[..index].iter().any(|p| Path::new(p) == above), "{place}");
        }
    }

    #[test]
    fn a_trees_own_special_directories_give_way_to_ours() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["bin", "proc", "workspace", "data"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        fs::write(dir.path().join("secret"), "x").unwrap();
        fs::set_permissions(dir.path().join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink("bin", dir.path().join("sbin")).unwrap();
        let rootfs = Rootfs::tree(dir.path()).unwrap();
        assert_eq!(rootfs.bound(), ["/bin", "/data"]);
        assert!(places(&rootfs).contains(&"/sbin".to_owned()));
        assert!(!places(&rootfs).contains(&"/secret".to_owned()));
    }

    #[test]
    fn mounts_go_beside_the_image_or_over_what_is_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut rootfs = Rootfs::host().unwrap();
        rootfs.mount(dir.path(), "/wheels/cache").unwrap();
        assert!(places(&rootfs).contains(&"/wheels".to_owned()));
        rootfs.mount(dir.path(), "/usr/share").unwrap();
        for at in ["/usr/share/no-such-thing", "/workspace/x", "/proc", "/", "relative", "/a/../b", "/run/x"] {
            assert!(rootfs.mount(dir.path(), at).is_err(), "{at}");
        }
        assert!(rootfs.mount(Path::new("/nonexistent"), "/x").is_err());
    }
}

//! The modules of an installed kernel that a microVM needs, in the order in which they load.
//!
//! Main type: [`Modules`]. It reads what `depmod` wrote beside the modules (modules.dep(5); `modules.builtin` names what the
//! kernel has in itself) and works out the order from each module's own dependencies, not from how a line is sorted.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use super::decompress::{decompress, sniff};
use crate::image::initramfs::Module;

/// What a microVM needs: its bus, its disks, its channel, and the file systems of its root.
pub const WANTED: [&str; 5] = ["virtio_mmio", "virtio_blk", "vmw_vsock_virtio_transport", "squashfs", "overlay"];

/// Largest list, bytes. Debian's `modules.dep` has 0.6 MB.
const MAX_LIST: u64 = 32 << 20;
/// Largest module, bytes, also when decompressed.
const MAX_MODULE: usize = 64 << 20;
/// More dependencies than these five ever had.
const MAX_MODULES: usize = 64;

/// Why the modules are not to be had.
#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    /// The kernel can't do without it and doesn't have it.
    #[error("the module {name} is neither in {directory} nor built into that kernel")]
    Missing {
        /// As `lsmod` would show it.
        name: String,
        /// Of the modules.
        directory: PathBuf,
    },
    /// The lists contradict each other.
    #[error("{file} is damaged: {what}")]
    Lists {
        /// The list.
        file: PathBuf,
        /// How.
        what: String,
    },
    /// A module is not what its name says.
    #[error("{file} is damaged at byte {offset}: {what}")]
    Damaged {
        /// The module.
        file: PathBuf,
        /// Where.
        offset: usize,
        /// How.
        what: String,
    },
    /// Something can't be read.
    #[error("failed to read {file}")]
    Io {
        /// What.
        file: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The lists of one installed kernel. They name thousands, of which a few are looked for.
#[derive(Debug)]
pub struct Modules {
    directory: PathBuf,
    /// A line for each that can be loaded: its path below the directory, a colon, and the paths of what it needs.
    loadable: String,
    /// A path in each line.
    builtin: String,
}

impl Modules {
    /// Reads the lists of `/lib/modules/<release>`.
    ///
    /// # Errors
    /// If `modules.dep` can't be read.
    pub fn open(directory: &Path) -> Result<Self, ModuleError> {
        let list = |name: &str| {
            let file = directory.join(name);
            let bytes = read(&file, MAX_LIST)?;
            String::from_utf8(bytes).map_err(|_| ModuleError::Lists { file, what: "it is no text".to_owned() })
        };
        let loadable = list("modules.dep")?;
        let builtin = match list("modules.builtin") {
            // A kernel without any is told by what is missing.
            Err(ModuleError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => String::new(),
            list => list?,
        };
        Ok(Self { directory: directory.to_owned(), loadable, builtin })
    }

    /// Files of what is wanted and of what that needs, in the order in which they load: name and path.
    ///
    /// # Errors
    /// If one is missing, or they need each other in a circle.
    pub fn choose(&self, wanted: &[&str]) -> Result<Vec<(String, PathBuf)>, ModuleError> {
        let mut choice = Choice {
            directory: &self.directory,
            loadable: Vec::new(),
            builtin: self.builtin.lines().map(stem).collect(),
            chosen: Vec::new(),
        };
        for line in self.loadable.lines().filter(|line| !line.trim().is_empty()) {
            let Some((path, needs)) = line.split_once(':') else {
                return Err(choice.wrong(format!("a line without a colon, {line:?}")));
            };
            choice.loadable.push((stem(path), path.trim(), needs));
        }
        for name in wanted {
            choice.add(name, &mut Vec::new())?;
        }
        Ok(choice.chosen)
    }
}

struct Choice<'a> {
    directory: &'a Path,
    /// File's name less its endings, path, and the paths of what it needs.
    loadable: Vec<(&'a str, &'a str, &'a str)>,
    /// Files' names less their endings.
    builtin: Vec<&'a str>,
    chosen: Vec<(String, PathBuf)>,
}

impl Choice<'_> {
    fn wrong(&self, what: String) -> ModuleError {
        ModuleError::Lists { file: self.directory.join("modules.dep"), what }
    }

    fn add(&mut self, name: &str, above: &mut Vec<String>) -> Result<(), ModuleError> {
        let there = |stem: &&str| is(stem, name);
        if self.builtin.iter().any(there) || self.chosen.iter().any(|(known, _)| known == name) {
            return Ok(());
        }
        let Some(&(_, path, needs)) = self.loadable.iter().find(|(stem, ..)| is(stem, name)) else {
            return Err(ModuleError::Missing { name: name.to_owned(), directory: self.directory.to_owned() });
        };
        if !Path::new(path).components().all(|c| matches!(c, Component::Normal(_))) {
            return Err(self.wrong(format!("{path} leads out of the directory")));
        }
        if above.iter().any(|known| known == name) {
            return Err(self.wrong(format!("{name} needs itself, by way of {}", above.join(", "))));
        }
        if above.len() + self.chosen.len() >= MAX_MODULES {
            let first = above.first().map_or(name, |n| n);
            return Err(self.wrong(format!("{first} needs more than {MAX_MODULES} modules")));
        }
        above.push(name.to_owned());
        // depmod lists what has to be loaded first at the end.
        for need in needs.split_whitespace().rev() {
            self.add(&stem(need).replace('-', "_"), above)?;
        }
        above.pop();
        self.chosen.push((name.to_owned(), self.directory.join(path)));
        Ok(())
    }
}

/// Reads a module's file and takes it out of its compression.
///
/// # Errors
/// If it can't be read or is no module.
pub fn load(name: &str, file: &Path) -> Result<Module, ModuleError> {
    let bytes = read(file, MAX_MODULE as u64)?;
    let damaged = |offset, what: String| ModuleError::Damaged { file: file.to_owned(), offset, what };
    let content = match sniff(&bytes) {
        Some(_) => decompress(&bytes, MAX_MODULE).map_err(|fault| damaged(fault.offset, fault.what))?,
        None => bytes,
    };
    if !content.starts_with(b"\x7fELF") {
        return Err(damaged(0, "it is no kernel module".to_owned()));
    }
    Ok(Module { name: name.to_owned(), content })
}

/// A module's file's name, less `.ko` and a compression.
fn stem(path: &str) -> &str {
    let file = path.trim().rsplit('/').next().unwrap_or_default();
    let end = file.as_bytes().windows(3).position(|w| w == b".ko");
    end.map_or(file, |end| &file[..end])
}

/// Whether a file's name is the module's, which has `_` where a file may have `-` (as the kernel itself writes it).
fn is(stem: &str, name: &str) -> bool {
    let plain = |byte: u8| if byte == b'-' { b'_' } else { byte };
    stem.len() == name.len() && stem.bytes().map(plain).eq(name.bytes())
}

fn read(file: &Path, most: u64) -> Result<Vec<u8>, ModuleError> {
    let io = |source| ModuleError::Io { file: file.to_owned(), source };
    let mut bytes = Vec::new();
    File::open(file).map_err(io)?.take(most + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > most {
        return Err(io(io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {most} bytes"))));
    }
    Ok(bytes)
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;

    use super::super::decompress::Compression;
    use super::super::decompress::tests::{ALL, compress};
    use super::*;

    /// A directory of modules as depmod leaves it: `dep` lines, of which each module's file is made.
    pub fn installed(directory: &Path, dep: &str, builtin: &str) {
        fs::create_dir_all(directory).unwrap();
        fs::write(directory.join("modules.dep"), dep).unwrap();
        fs::write(directory.join("modules.builtin"), builtin).unwrap();
        for path in dep.lines().map(|line| directory.join(line.split(':').next().unwrap())) {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, format!("\x7fELF module {}", path.display())).unwrap();
        }
    }

    pub const DEP: &str = "\
kernel/drivers/block/virtio_blk.ko: kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/virtio/virtio.ko: kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/virtio/virtio_ring.ko:
kernel/net/vmw-vsock-virtio-transport.ko.xz: kernel/net/vsock.ko
kernel/net/vsock.ko:
kernel/fs/overlay.ko:
kernel/unwanted.ko: kernel/missing.ko
";
    pub const BUILTIN: &str = "kernel/drivers/virtio/virtio_mmio.ko\nkernel/fs/squashfs/squashfs.ko\n";

    fn choose(dep: &str, builtin: &str, wanted: &[&str]) -> Result<Vec<String>, ModuleError> {
        let dir = tempfile::tempdir().unwrap();
        installed(dir.path(), dep, builtin);
        Ok(Modules::open(dir.path())?.choose(wanted)?.into_iter().map(|(name, _)| name).collect())
    }

    #[test]
    fn what_is_needed_loads_before_what_needs_it_and_what_is_built_in_not_at_all() {
        let chosen = choose(DEP, BUILTIN, &WANTED).unwrap();
        assert_eq!(chosen, ["virtio_ring", "virtio", "virtio_blk", "vsock", "vmw_vsock_virtio_transport", "overlay"]);
    }

    #[test]
    fn the_order_does_not_depend_on_how_lines_are_sorted() {
        assert_eq!(choose("a.ko: b.ko c.ko\nb.ko: c.ko\nc.ko:\n", "", &["a"]).unwrap(), ["c", "b", "a"]);
        assert_eq!(choose("a.ko: c.ko b.ko\nc.ko:\nb.ko: c.ko\n", "", &["a"]).unwrap(), ["c", "b", "a"]);
    }

    #[test]
    fn a_missing_module_is_named() {
        for (wanted, missing) in [("nothing", "nothing"), ("unwanted", "missing")] {
            match choose(DEP, BUILTIN, &[wanted]) {
                Err(ModuleError::Missing { name, .. }) => assert_eq!(name, missing),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn damaged_lists_are_errors() {
        for dep in ["a.ko: b.ko\nb.ko: a.ko\n", "a.ko: a.ko\n", "a.ko b.ko\n", "/etc/a.ko:\n", "../a.ko:\n"] {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join("modules.dep"), dep).unwrap();
            let chosen = Modules::open(dir.path()).and_then(|modules| modules.choose(&["a"]));
            assert!(matches!(chosen, Err(ModuleError::Lists { .. })), "{dep:?}: {chosen:?}");
        }
        let chain: String = (0..100).map(|n| format!("m{n}.ko: m{}.ko\n", n + 1)).collect();
        assert!(matches!(choose(&chain, "", &["m0"]), Err(ModuleError::Lists { .. })));
    }

    #[test]
    fn a_module_comes_out_of_its_compression() {
        let dir = tempfile::tempdir().unwrap();
        let object = b"\x7fELF module".repeat(100);
        for compression in ALL.into_iter().filter(|c| *c != Compression::Lz4) {
            let file = dir.path().join("m.ko.any");
            fs::write(&file, compress(compression, &object)).unwrap();
            assert_eq!(load("m", &file).unwrap(), Module { name: "m".into(), content: object.clone() });
            let mut cut = compress(compression, &object);
            cut.truncate(30);
            fs::write(&file, cut).unwrap();
            assert!(matches!(load("m", &file), Err(ModuleError::Damaged { .. })), "{compression:?}");
        }
        fs::write(dir.path().join("text"), "no module").unwrap();
        assert!(matches!(load("m", &dir.path().join("text")), Err(ModuleError::Damaged { .. })));
    }
}

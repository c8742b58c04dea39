//! The file system that a guest kernel starts with: our agent as `/init`, and the modules that it loads.
//!
//! Main function: [`initramfs`]. The format is cpio *newc* (the kernel's `Documentation/driver-api/early-userspace/
//! buffer-format.rst`), not compressed: the VMM copies it into the guest's memory, and a few MiB are unpacked faster than
//! they are decompressed. Everything belongs to root, and times are zero, so the same content gives the same bytes.

/// A kernel module to be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// As `lsmod` shows it, with `_` for `-`.
    pub name: String,
    /// The object, not compressed.
    pub content: Vec<u8>,
}

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const FILE: u32 = 0o100_644;

/// Builds the archive: `/init`, the empty directories `/dev`, `/proc` and `/sys`, and each module as
/// `/modules/NN-name.ko`, numbered in the order in which they load.
#[must_use]
pub fn initramfs(agent: &[u8], modules: &[Module]) -> Vec<u8> {
    let content: usize = modules.iter().map(|m| m.content.len() + 256).sum();
    let mut archive = Archive { bytes: Vec::with_capacity(agent.len() + content + 4096), inode: 0 };
    for directory in ["dev", "proc", "sys", "modules"] {
        archive.member(directory, DIRECTORY, &[]);
    }
    archive.member("init", PROGRAM, agent);
    let digits = modules.len().to_string().len().max(2);
    for (index, module) in modules.iter().enumerate() {
        archive.member(&format!("modules/{index:0digits$}-{}.ko", module.name), FILE, &module.content);
    }
    archive.finish()
}

struct Archive {
    bytes: Vec<u8>,
    inode: usize,
}

impl Archive {
    fn member(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.inode += 1;
        self.header(self.inode, name, mode, content.len());
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    /// Thirteen numbers of eight hexadecimal digits, then the name with a NUL: inode, mode, uid, gid, links, time, size,
    /// device (2), special device (2), length of the name, checksum (unused in this variant).
    fn header(&mut self, inode: usize, name: &str, mode: u32, size: usize) {
        let links = if mode & 0o170_000 == 0o040_000 { 2 } else { 1 };
        let numbers = [inode, mode as usize, 0, 0, links, 0, size, 0, 0, 0, 0, name.len() + 1, 0];
        self.bytes.extend_from_slice(b"070701");
        for number in numbers {
            self.bytes.extend_from_slice(format!("{number:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.header(0, "TRAILER!!!", 0, 0);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use proptest::prelude::*;

    use super::*;

    fn modules(contents: &[&[u8]]) -> Vec<Module> {
        contents.iter().enumerate().map(|(n, c)| Module { name: format!("m{n}"), content: c.to_vec() }).collect()
    }

    /// Name, mode and content of each member, read strictly.
    fn read(mut archive: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let (mut found, whole) = (Vec::new(), archive.len());
        loop {
            assert_eq!(&archive[..6], b"070701");
            let number = |n: usize| {
                let digits = std::str::from_utf8(&archive[6 + 8 * n..14 + 8 * n]).unwrap();
                usize::from_str_radix(digits, 16).unwrap()
            };
            let (mode, size, name) = (number(1), number(6), number(11));
            let body = (110 + name).next_multiple_of(4);
            let name = String::from_utf8(archive[110..110 + name - 1].to_vec()).unwrap();
            if name == "TRAILER!!!" {
                assert_eq!((archive.len(), whole % 4), (body, 0));
                return found;
            }
            assert_eq!(number(0), found.len() + 1);
            found.push((name, mode as u32, archive[body..body + size].to_vec()));
            archive = &archive[(body + size).next_multiple_of(4)..];
        }
    }

    #[test]
    fn modules_stand_in_the_order_of_loading() {
        let names: Vec<_> = read(&initramfs(b"agent", &modules(&[&b"a"[..]; 12]))).into_iter().map(|m| m.0).collect();
        assert_eq!(names[..6], ["dev", "proc", "sys", "modules", "init", "modules/00-m0.ko"]);
        assert!(names[5..].is_sorted());
        let many: Vec<_> = read(&initramfs(b"", &modules(&[&b""[..]; 101]))).into_iter().skip(5).map(|m| m.0).collect();
        assert!(many.is_sorted() && many[100] == "modules/100-m100.ko");
    }

    #[test]
    fn the_same_content_gives_the_same_bytes() {
        let build = || initramfs(b"agent", &modules(&[b"one", b"two"]));
        assert_eq!(build(), build());
        assert_ne!(build(), initramfs(b"agent", &modules(&[b"one", b"twp"])));
    }

    #[test]
    fn gnu_cpio_reads_it() {
        let cpio = Command::new("cpio").args(["-itv", "--quiet"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut cpio = match cpio {
            Ok(cpio) => cpio,
            Err(e) => return eprintln!("skipped: cpio can't be run ({e})"),
        };
        cpio.stdin.take().unwrap().write_all(&initramfs(b"agent", &modules(&[b"module"]))).unwrap();
        let output = cpio.wait_with_output().unwrap();
        assert!(output.status.success());
        let listed = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<Vec<&str>> = listed.lines().map(|l| l.split_whitespace().collect()).collect();
        let shown: Vec<_> = lines.iter().map(|l| (l[0], l[2], l[4], l[8])).collect();
        assert_eq!(shown[4], ("-rwxr-xr-x", "root", "5", "init"));
        assert_eq!(shown[5], ("-rw-r--r--", "root", "6", "modules/00-m0.ko"));
        assert_eq!(shown[0].0, "drwxr-xr-x");
    }

    proptest! {
        #[test]
        fn any_content_can_be_read_back(
            agent in prop::collection::vec(any::<u8>(), 0..50),
            contents in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..5)
        ) {
            let slices: Vec<&[u8]> = contents.iter().map(Vec::as_slice).collect();
            let members = read(&initramfs(&agent, &modules(&slices)));
            prop_assert_eq!(&members[4], &("init".to_owned(), PROGRAM, agent));
            let found: Vec<_> = members.into_iter().skip(5).map(|m| m.2).collect();
            prop_assert_eq!(found, contents);
        }
    }
}

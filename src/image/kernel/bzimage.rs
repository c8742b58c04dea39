//! What a file that a step or this host names as its kernel is, and the image inside that a VMM boots.
//!
//! Main function: [`extract`]. Firecracker boots an uncompressed ELF `vmlinux` on x86-64 and an `Image` on aarch64;
//! distributions install a bzImage, whose header says where the compressed ELF lies (the kernel's
//! `Documentation/arch/x86/boot.rst`; `payload_offset` and `payload_length` came with protocol 2.08) and an `Image` that may
//! be in gzip (`Documentation/arch/arm64/booting.rst`). The file is not trusted to be either.

use std::ops::Range;

use super::decompress::{Fault, decompress, sniff};

/// Largest kernel image, uncompressed, bytes. Debian's has 53 MB, an unstripped one some 500.
pub const MAX_IMAGE: usize = 768 << 20;
/// Longest release that is believed, bytes: `__NEW_UTS_LEN` of the kernel.
const MAX_RELEASE: usize = 64;

/// Whose kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// bzImage or ELF.
    X86_64,
    /// `Image`.
    Aarch64,
}

impl Machine {
    /// This host's, if microVMs are there for it.
    #[must_use]
    pub const fn host() -> Option<Self> {
        if cfg!(target_arch = "x86_64") {
            Some(Machine::X86_64)
        } else if cfg!(target_arch = "aarch64") {
            Some(Machine::Aarch64)
        } else {
            None
        }
    }
}

/// A kernel that a VMM can boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extracted {
    /// ELF or `Image`.
    pub image: Vec<u8>,
    /// What `uname -r` will say, where the file says it.
    pub release: Option<String>,
}

/// Gets the bootable image out of a kernel file.
///
/// # Errors
/// Where and how the file is not a kernel for that machine.
pub fn extract(file: Vec<u8>, machine: Machine) -> Result<Extracted, Fault> {
    match machine {
        Machine::X86_64 if file.starts_with(ELF) => {
            check_elf(&file)?;
            let release = banner(&file);
            Ok(Extracted { image: file, release })
        }
        Machine::X86_64 => {
            let header = Header::parse(&file)?;
            let start = header.payload.start;
            let image = decompress(&file[header.payload], MAX_IMAGE)
                .map_err(|fault| Fault { offset: start + fault.offset, ..fault })?;
            check_elf(&image).map_err(|fault| {
                Fault::at(
                    start,
                    format!("what is compressed there is no kernel: {} (byte {})", fault.what, fault.offset),
                )
            })?;
            Ok(Extracted { release: header.release.or_else(|| banner(&image)), image })
        }
        Machine::Aarch64 => {
            let image = if sniff(&file).is_some() { decompress(&file, MAX_IMAGE)? } else { file };
            // booting.rst: magic number at byte 56.
            if image.get(56..60) != Some(b"ARM\x64") {
                return Err(Fault::at(56, "no arm64 `Image` begins like this"));
            }
            Ok(Extracted { release: banner(&image), image })
        }
    }
}

/// Of a bzImage's header, what leads to the image.
#[derive(Debug, PartialEq, Eq)]
struct Header {
    payload: Range<usize>,
    release: Option<String>,
}

impl Header {
    fn parse(file: &[u8]) -> Result<Self, Fault> {
        let word = |at: usize| file.get(at..at + 2).and_then(|b| b.first_chunk()).map(|b| u16::from_le_bytes(*b));
        let long =
            |at: usize| file.get(at..at + 4).and_then(|b| b.first_chunk()).map(|b| u32::from_le_bytes(*b) as usize);
        if word(0x1fe) != Some(0xaa55) || file.get(0x202..0x206) != Some(b"HdrS") {
            return Err(Fault::at(0x1fe, "neither a bzImage nor an ELF image has this there"));
        }
        let short = || Fault::at(file.len(), "it ends inside its header");
        let protocol = word(0x206).ok_or_else(short)?;
        if protocol < 0x208 {
            return Err(Fault::at(
                0x206,
                format!("boot protocol {}.{:02}, where 2.08 (Linux 2.6.26) is needed", protocol >> 8, protocol & 0xff),
            ));
        }
        if file.get(0x211).ok_or_else(short)? & 1 == 0 {
            return Err(Fault::at(0x211, "it is a zImage, which loads low"));
        }
        let sectors = match file[0x1f1] {
            0 => 4,
            sectors => usize::from(sectors),
        };
        let setup = (sectors + 1) * 512;
        let (offset, length) = (long(0x248).ok_or_else(short)?, long(0x24c).ok_or_else(short)?);
        let start = setup.saturating_add(offset);
        let payload = start..start.saturating_add(length);
        if length == 0 || file.get(payload.clone()).is_none() {
            let what = format!("its compressed part is said to be bytes {start} to {}, of {}", payload.end, file.len());
            return Err(Fault::at(0x248, what));
        }
        let version = word(0x20e).filter(|&at| at != 0).map(|at| usize::from(at) + 512).filter(|&at| at < setup);
        let release = version.and_then(|at| file.get(at..)).and_then(release);
        Ok(Header { payload, release })
    }
}

const ELF: &[u8] = b"\x7fELF";

/// Whether these are all the bytes of a 64-bit x86 kernel that the segments' headers speak of.
fn check_elf(image: &[u8]) -> Result<(), Fault> {
    let number = |at: usize, bytes: usize| -> Option<u64> {
        let mut value = [0; 8];
        value[..bytes].copy_from_slice(image.get(at..at.checked_add(bytes)?)?);
        Some(u64::from_le_bytes(value))
    };
    let short = || Fault::at(image.len(), "it ends inside its header");
    if !image.starts_with(ELF) {
        return Err(Fault::at(0, "it is no ELF image"));
    }
    if image.get(4..6) != Some(&[2, 1]) {
        return Err(Fault::at(4, "it is no 64-bit little-endian ELF image"));
    }
    let (kind, machine) = (number(16, 2).ok_or_else(short)?, number(18, 2).ok_or_else(short)?);
    if machine != 62 {
        return Err(Fault::at(18, format!("it is for machine {machine}, not for x86-64 (62)")));
    }
    // ET_EXEC, or ET_DYN for a relocatable kernel.
    if !matches!(kind, 2 | 3) {
        return Err(Fault::at(16, format!("it is of type {kind}, which can't be booted")));
    }
    let table = number(32, 8).ok_or_else(short)?;
    let (size, count) = (number(54, 2).ok_or_else(short)?, number(56, 2).ok_or_else(short)?);
    if count == 0 || size < 56 {
        return Err(Fault::at(54, "it has no segments"));
    }
    for index in 0..count {
        let at = table.checked_add(index * size).and_then(|at| usize::try_from(at).ok());
        let segment = at
            .and_then(|at| Some((at, number(at, 4)?, number(at.checked_add(8)?, 8)?, number(at.checked_add(32)?, 8)?)));
        let Some((at, kind, offset, length)) = segment else { return Err(short()) };
        // PT_LOAD
        if kind == 1 && offset.checked_add(length).is_none_or(|end| end > image.len() as u64) {
            return Err(Fault::at(
                at,
                format!("a segment of {length} bytes at {offset} lies outside of its {} bytes", image.len()),
            ));
        }
    }
    Ok(())
}

/// The release out of the banner that a kernel prints first (`linux_banner`).
fn banner(image: &[u8]) -> Option<String> {
    const BEGIN: &[u8] = b"Linux version ";
    // The same words stand in format strings, before a `%s`.
    image
        .windows(BEGIN.len())
        .enumerate()
        .filter(|(_, window)| *window == BEGIN)
        .find_map(|(at, _)| release(&image[at + BEGIN.len()..]))
}

/// A release at the beginning of a text: a plain word that begins with a digit, since it becomes part of a path.
fn release(text: &[u8]) -> Option<String> {
    let end = text.iter().take(MAX_RELEASE + 1).position(|b| matches!(b, b' ' | 0))?;
    let word = std::str::from_utf8(&text[..end]).ok()?;
    let plain = |b: u8| b.is_ascii_alphanumeric() || b".-_+~".contains(&b);
    (word.as_bytes().first()?.is_ascii_digit() && word.bytes().all(plain)).then(|| word.to_owned())
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::super::decompress::Compression;
    use super::super::decompress::tests::{ALL, compress};
    use super::*;

    /// The smallest ELF that passes, with a banner in its one segment.
    pub fn elf(release: &str) -> Vec<u8> {
        let text = format!("Linux version %s (%s)\0Linux version {release} (x@y)\0");
        let mut image = vec![0; 120];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        image[16] = 2;
        image[18] = 62;
        image[32] = 64;
        image[54] = 56;
        image[56] = 1;
        image[64] = 1;
        image[72] = 120;
        image[96..104].copy_from_slice(&(text.len() as u64).to_le_bytes());
        image.extend(text.as_bytes());
        image
    }

    pub fn bzimage(compression: Compression, release: &str) -> Vec<u8> {
        let payload = compress(compression, &elf(release));
        let mut file = vec![0; 3 * 512 + 100];
        file[0x1f1] = 2;
        file[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
        file[0x202..0x206].copy_from_slice(b"HdrS");
        file[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
        file[0x20e..0x210].copy_from_slice(&0x200_u16.to_le_bytes());
        file[0x211] = 1;
        file[0x248..0x24c].copy_from_slice(&100_u32.to_le_bytes());
        file[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        file[0x400..0x400 + release.len()].copy_from_slice(release.as_bytes());
        file.extend(payload);
        // What a signature adds behind it.
        file.extend([7; 33]);
        file
    }

    fn fault(file: Vec<u8>) -> Fault {
        extract(file, Machine::X86_64).unwrap_err()
    }

    #[test]
    fn a_bzimage_gives_its_elf_whatever_its_compression() {
        for compression in ALL {
            let extracted = extract(bzimage(compression, "6.1.0-1-test"), Machine::X86_64).unwrap();
            assert_eq!(extracted, Extracted { image: elf("6.1.0-1-test"), release: Some("6.1.0-1-test".into()) });
        }
    }

    #[test]
    fn an_elf_is_taken_as_it_is_and_tells_its_release() {
        let extracted = extract(elf("5.10.0+"), Machine::X86_64).unwrap();
        assert_eq!(extracted, Extracted { image: elf("5.10.0+"), release: Some("5.10.0+".into()) });
        assert_eq!(extract(elf("../../etc"), Machine::X86_64).unwrap().release, None, "no part of a path");
    }

    #[test]
    fn an_arm_image_is_taken_as_it_is_or_out_of_gzip() {
        let mut image = vec![0; 64];
        image[56..60].copy_from_slice(b"ARM\x64");
        image.extend(b"Linux version 6.8.0-9-generic (x)\0");
        for file in [image.clone(), compress(Compression::Gzip, &image)] {
            let extracted = extract(file, Machine::Aarch64).unwrap();
            assert_eq!(extracted, Extracted { image: image.clone(), release: Some("6.8.0-9-generic".into()) });
        }
        assert_eq!(extract(elf("1.0"), Machine::Aarch64).unwrap_err().offset, 56);
    }

    #[test]
    fn a_damaged_or_foreign_file_is_named_by_its_byte() {
        let good = bzimage(Compression::Gzip, "6.1");
        let with = |at: usize, bytes: &[u8]| {
            let mut file = good.clone();
            file[at..at + bytes.len()].copy_from_slice(bytes);
            fault(file)
        };
        assert_eq!(fault(Vec::new()).offset, 0x1fe);
        assert_eq!(fault(b"#!/bin/sh\n".repeat(100)).offset, 0x1fe);
        assert_eq!(fault(good[..0x207].to_vec()).offset, 0x207);
        assert_eq!(with(0x206, &[7, 2]).offset, 0x206);
        assert_eq!(with(0x211, &[0]).offset, 0x211);
        for length in [0, u32::MAX, good.len() as u32] {
            assert_eq!(with(0x24c, &length.to_le_bytes()).offset, 0x248, "{length}");
        }
        assert_eq!(with(0x248, &u32::MAX.to_le_bytes()).offset, 0x248);
        assert_eq!(with(3 * 512 + 100, b"XX").offset, 3 * 512 + 100, "no compression that is known");
        assert!(with(3 * 512 + 120, &[0xff; 30]).offset >= 3 * 512 + 100, "damaged inside");
        assert_eq!(fault(good[..good.len() - 40].to_vec()).offset, 0x248, "cut short");
        let mut foreign = elf("6.1");
        foreign[18] = 183;
        assert!(fault(foreign).what.contains("machine 183"));
        let whole = elf("6.1");
        assert!(fault(whole[..whole.len() - 1].to_vec()).what.contains("outside"));
    }

    #[test]
    fn the_kernel_of_debian_gives_its_elf() {
        let kernels = std::fs::read_dir("/boot").into_iter().flatten().flatten().map(|e| e.path());
        let found = kernels
            .filter(|p| p.to_string_lossy().starts_with("/boot/vmlinuz-"))
            .find_map(|p| Some((std::fs::read(&p).ok()?, p)));
        let (Some((file, path)), Some(Machine::X86_64)) = (found, Machine::host()) else {
            return eprintln!("skipped: no kernel in /boot can be read (apt install linux-image-cloud-amd64)");
        };
        let extracted = extract(file, Machine::X86_64).unwrap();
        assert!(path.ends_with(format!("vmlinuz-{}", extracted.release.unwrap())));
        assert!(extracted.image.len() > 10 << 20);
    }

    proptest! {
        #[test]
        fn no_header_makes_it_panic(at in 0x1f0usize..0x260, bytes in prop::collection::vec(any::<u8>(), 1..8), cut in 0usize..3000) {
            let mut file = bzimage(Compression::Lz4, "6.1");
            file[at..at + bytes.len()].copy_from_slice(&bytes);
            let _ = extract(file.clone(), Machine::X86_64);
            file.truncate(cut);
            let _ = extract(file, Machine::X86_64);
        }

        #[test]
        fn no_elf_makes_it_panic(at in 0usize..120, bytes in prop::collection::vec(any::<u8>(), 1..9), cut in 0usize..300) {
            let mut image = elf("6.1");
            let end = (at + bytes.len()).min(image.len());
            image[at..end].copy_from_slice(&bytes[..end - at]);
            image.truncate(cut);
            let _ = extract(image, Machine::X86_64);
        }
    }
}

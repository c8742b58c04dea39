//! What an artifact is packed as, told by its first bytes and never by its name or a declared type: the services
//! that store artifacts serve files under names and content types that don't match.
//!
//! Main type: [`Format`]. [`sniff`] looks at the beginning; whether a compressed file holds a tar is the business of
//! [`super::stream`].

use std::fmt;

use serde::{Deserialize, Serialize};

use super::rejection::{Rejection, Rule};
use super::tar;

/// How many bytes [`sniff`] wants to see.
pub const SNIFF: usize = 512;

/// What an artifact, or the archive inside it, is packed as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Format {
    /// A directory of this host.
    #[serde(rename = "directory")]
    Directory,
    /// One regular file that is no archive: a script, a WebAssembly module. It becomes a tree of one file.
    #[serde(rename = "file")]
    File,
    /// PKWARE zip.
    #[serde(rename = "zip")]
    Zip,
    /// Uncompressed tar: ustar, GNU or pax.
    #[serde(rename = "tar")]
    Tar,
    /// tar in gzip, any number of members.
    #[serde(rename = "tar.gz")]
    TarGz,
    /// tar in Zstandard, any number of frames.
    #[serde(rename = "tar.zst")]
    TarZst,
    /// tar in xz, any number of streams.
    #[serde(rename = "tar.xz")]
    TarXz,
}

impl Format {
    /// The word in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Format::Directory => "directory",
            Format::File => "file",
            Format::Zip => "zip",
            Format::Tar => "tar",
            Format::TarGz => "tar.gz",
            Format::TarZst => "tar.zst",
            Format::TarXz => "tar.xz",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Tells the format from the first [`SNIFF`] bytes (fewer when the input is shorter). gzip, zstd and xz are
/// reported as the compressed tar that they must turn out to be.
///
/// # Errors
/// [`Rule::Format`] for an empty input and for archives that are recognised but not unpacked: taking a `.7z` for a
/// file to run would hide the mistake.
pub fn sniff(head: &[u8]) -> Result<Format, Rejection> {
    let refuse = |what: &str| Err(Rejection::new(Rule::Format, format!("{what} is not a format that is unpacked")));
    if head.is_empty() {
        return Err(Rejection::new(Rule::Format, "the file is empty"));
    }
    if head.starts_with(b"PK\x03\x04") || head.starts_with(b"PK\x05\x06") || head.starts_with(b"PK\x06\x06") {
        return Ok(Format::Zip);
    }
    if head.starts_with(b"PK\x07\x08") {
        return refuse("a split or spanned zip");
    }
    if head.starts_with(b"\x1f\x8b") {
        return Ok(Format::TarGz);
    }
    if head.starts_with(b"\x28\xb5\x2f\xfd") || is_zstd_skippable(head) {
        return Ok(Format::TarZst);
    }
    if head.starts_with(b"\xfd7zXZ\0") {
        return Ok(Format::TarXz);
    }
    if let Some(block) = head.first_chunk::<512>()
        && tar::is_start(block)
    {
        return Ok(Format::Tar);
    }
    for (magic, what) in OTHERS {
        if head.starts_with(magic) {
            return refuse(what);
        }
    }
    Ok(Format::File)
}

/// Archives and compressions that are told apart only to say so.
const OTHERS: [(&[u8], &str); 14] = [
    (b"BZh", "bzip2"),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip"),
    (b"Rar!\x1a\x07", "RAR"),
    (b"LZIP", "lzip"),
    (b"\x04\x22\x4d\x18", "LZ4"),
    (b"\x1f\x9d", "Unix compress"),
    (b"\x1f\xa0", "Unix compress"),
    (b"\x89LZO\0", "lzop"),
    (b"!<arch>\n", "ar (a .deb or static library)"),
    (b"070701", "cpio"),
    (b"070702", "cpio"),
    (b"070707", "cpio"),
    (b"hsqs", "squashfs"),
    (b"\xed\xab\xee\xdb", "RPM"),
];

/// RFC 8878, 3.1.2: 0x184D2A50 to 0x184D2A5F, little-endian. `pzstd` begins its files with one.
fn is_zstd_skippable(head: &[u8]) -> bool {
    head.first().is_some_and(|b| b & 0xf0 == 0x50) && head[1..].starts_with(b"\x2a\x4d\x18")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_told_by_content() {
        let mut header = ::tar::Header::new_gnu();
        header.set_path("x").unwrap();
        header.set_size(0);
        header.set_cksum();
        for (head, format) in [
            (&b"PK\x03\x04rest"[..], Format::Zip),
            (b"PK\x05\x06rest", Format::Zip),
            (b"\x1f\x8b\x08", Format::TarGz),
            (b"\x28\xb5\x2f\xfd", Format::TarZst),
            (b"\x5a\x2a\x4d\x18", Format::TarZst),
            (b"\xfd7zXZ\0", Format::TarXz),
            (&header.as_bytes()[..], Format::Tar),
            (&[0; 512], Format::Tar),
            (b"\0asm\x01\0\0\0", Format::File),
            (b"#!/bin/sh\n", Format::File),
            (b"P", Format::File),
            (&[0; 511], Format::File),
        ] {
            assert_eq!(sniff(head), Ok(format));
        }
    }

    #[test]
    fn other_archives_are_named_not_taken_for_files() {
        assert!(sniff(b"").unwrap_err().message.contains("empty"));
        for (magic, what) in OTHERS {
            let rejection = sniff(magic).unwrap_err();
            assert!(rejection.rule == Rule::Format && rejection.message.contains(what), "{rejection}");
        }
    }
}

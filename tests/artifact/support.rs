//! Unpacks bytes in a guarded place, and builds archives that no ordinary tool would write.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Cursor, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use plimsoll::artifact::{Budget, Digest, Error, Purpose, Rejection, Request, Rule, Summary, unpack};

/// A destination with neighbours that must stay as they are.
pub struct Place {
    root: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("out")).unwrap();
        // A name that a string comparison takes for something inside `out`.
        fs::create_dir(root.path().join("out_backup")).unwrap();
        fs::write(root.path().join("secret"), "untouched").unwrap();
        Place { root }
    }

    pub fn out(&self) -> PathBuf {
        self.root.path().join("out")
    }

    pub fn open(&self) -> File {
        File::open(self.out()).unwrap()
    }

    /// Everything below the destination: `path` to what it is.
    pub fn listing(&self) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        list(&self.out(), "", &mut found);
        found
    }

    pub fn text(&self, path: &str) -> String {
        fs::read_to_string(self.out().join(path)).unwrap()
    }

    pub fn mode(&self, path: &str) -> u32 {
        fs::symlink_metadata(self.out().join(path)).unwrap().permissions().mode() & 0o7777
    }

    /// Panics if anything around the destination changed.
    pub fn assert_neighbours(&self) {
        let mut names: Vec<_> = fs::read_dir(self.root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["out", "out_backup", "secret"]);
        assert_eq!(fs::read_dir(self.root.path().join("out_backup")).unwrap().count(), 0);
        let secret = self.root.path().join("secret");
        assert_eq!(fs::read_to_string(&secret).unwrap(), "untouched");
        assert_eq!(fs::metadata(secret).unwrap().nlink(), 1);
    }
}

fn list(directory: &Path, prefix: &str, found: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let path = format!("{prefix}{}", entry.file_name().into_string().unwrap());
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.insert(path.clone(), "dir".into());
            list(&entry.path(), &format!("{path}/"), found);
        } else if kind.is_symlink() {
            found.insert(path, format!("-> {}", fs::read_link(entry.path()).unwrap().display()));
        } else {
            found.insert(path, format!("{} bytes", entry.metadata().unwrap().len()));
        }
    }
}

pub fn request() -> Request {
    Request {
        file_name: "artifact".into(),
        executable: false,
        purpose: Purpose::Artifact,
        budget: Budget::default(),
        sha256: None,
    }
}

/// Unpacks and checks the surroundings; on a refusal, that the destination is empty.
pub fn attempt(bytes: &[u8], request: &Request) -> (Place, Result<Summary, Error>) {
    let place = Place::new();
    let result = unpack(Cursor::new(bytes), place.open().into(), request);
    place.assert_neighbours();
    match &result {
        Ok(summary) => assert_eq!(summary.sha256, Digest::of(bytes), "the digest is of the input"),
        Err(_) => assert_eq!(place.listing(), BTreeMap::new(), "left after a refusal"),
    }
    (place, result)
}

/// Must unpack.
pub fn accepted(bytes: &[u8]) -> (Place, Summary) {
    let (place, result) = attempt(bytes, &request());
    (place, result.unwrap_or_else(|e| panic!("refused: {e}")))
}

/// Must be refused, by this rule.
pub fn refused(bytes: &[u8], rule: Rule) -> Rejection {
    refused_with(bytes, &request(), rule)
}

pub fn refused_with(bytes: &[u8], request: &Request, rule: Rule) -> Rejection {
    let (place, result) = attempt(bytes, request);
    match result {
        Err(Error::Rejected(rejection)) => {
            assert_eq!(rejection.rule, rule, "{rejection}");
            rejection
        }
        Err(other) => panic!("not a rejection: {other:?}"),
        Ok(_) => panic!("accepted: {:?}", place.listing()),
    }
}

/// Must be refused, by this rule, and name that member.
pub fn refused_member(bytes: &[u8], rule: Rule, member: &str) -> Rejection {
    let rejection = refused(bytes, rule);
    assert_eq!(rejection.member.as_deref(), Some(member), "{rejection}");
    rejection
}

/// A tar written block by block, so that it can say anything.
#[derive(Default, Clone)]
pub struct Tar(pub Vec<u8>);

impl Tar {
    /// A member with its data and a header changed at will; the checksum is made right afterwards.
    pub fn raw(mut self, kind: u8, name: &str, data: &[u8], change: impl FnOnce(&mut ::tar::Header)) -> Self {
        let mut header = ::tar::Header::new_gnu();
        header.as_mut_bytes()[..name.len().min(100)].copy_from_slice(&name.as_bytes()[..name.len().min(100)]);
        header.set_mode(0o644);
        header.set_size(data.len() as u64);
        header.as_mut_bytes()[156] = kind;
        change(&mut header);
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self.data(data)
    }

    /// Data and padding without a header.
    pub fn data(mut self, data: &[u8]) -> Self {
        self.0.extend_from_slice(data);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub fn file(self, name: &str, data: &[u8]) -> Self {
        self.raw(b'0', name, data, |_| ())
    }

    pub fn dir(self, name: &str) -> Self {
        self.raw(b'5', name, b"", |_| ())
    }

    pub fn symlink(self, name: &str, target: &str) -> Self {
        self.link(b'2', name, target)
    }

    pub fn hardlink(self, name: &str, target: &str) -> Self {
        self.link(b'1', name, target)
    }

    fn link(self, kind: u8, name: &str, target: &str) -> Self {
        self.raw(kind, name, b"", |header| {
            header.as_mut_bytes()[157..157 + target.len()].copy_from_slice(target.as_bytes());
        })
    }

    /// A pax extended header of these records.
    pub fn pax(self, records: &[(&str, &str)]) -> Self {
        self.extended(b'x', &pax_records(records))
    }

    /// An extended header with any data.
    pub fn extended(self, kind: u8, data: &[u8]) -> Self {
        self.raw(kind, "././@Extended", data, |_| ())
    }

    /// The end marker.
    pub fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

pub fn pax_records(records: &[(&str, &str)]) -> Vec<u8> {
    let mut data = Vec::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let mut length = rest + 1;
        while length != rest + length.to_string().len() {
            length += 1;
        }
        writeln!(data, "{length} {key}={value}").unwrap();
    }
    data
}

/// One entry of a [`zip`], with each place it is described in separately settable.
#[derive(Clone)]
pub struct Entry {
    pub name: Vec<u8>,
    pub local_name: Vec<u8>,
    /// As stored, after compression.
    pub data: Vec<u8>,
    pub method: u16,
    pub local_method: u16,
    pub flags: u16,
    pub local_flags: u16,
    pub crc: u32,
    pub size: u32,
    pub local_size: u32,
    pub mode: u32,
    pub made_by: u8,
    pub extra: Vec<u8>,
    pub local_extra: Vec<u8>,
    /// The local header's sizes are all ones, which sends readers to its zip64 field.
    pub local_sentinel: bool,
    /// What follows the data.
    pub descriptor: Vec<u8>,
    /// Where the central directory says that it begins, if it lies.
    pub offset: Option<u32>,
}

impl Entry {
    pub fn stored(name: &str, data: &[u8]) -> Self {
        let mut crc = flate2::Crc::new();
        crc.update(data);
        let size = data.len() as u32;
        Entry {
            name: name.into(),
            local_name: name.into(),
            data: data.into(),
            method: 0,
            local_method: 0,
            flags: 0,
            local_flags: 0,
            crc: crc.sum(),
            size,
            local_size: size,
            mode: 0o100_644,
            made_by: 3,
            extra: Vec::new(),
            local_extra: Vec::new(),
            local_sentinel: false,
            descriptor: Vec::new(),
            offset: None,
        }
    }

    pub fn deflated(name: &str, data: &[u8]) -> Self {
        let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(data).unwrap();
        Entry { data: encoder.finish().unwrap(), method: 8, local_method: 8, ..Self::stored(name, data) }
    }

    pub fn symlink(name: &str, target: &str) -> Self {
        Entry { mode: 0o120_777, ..Self::stored(name, target.as_bytes()) }
    }

    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// A zip of these entries.
pub fn zip(entries: &[Entry]) -> Vec<u8> {
    zip_at(0, entries)
}

/// A zip that believes it begins at that offset of a larger file.
pub fn zip_at(base: u32, entries: &[Entry]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut central = Vec::new();
    for entry in entries {
        let offset = entry.offset.unwrap_or(base + out.len() as u32);
        let stored = entry.data.len() as u32;
        let deferred = entry.local_flags & 8 != 0;
        out.extend_from_slice(b"PK\x03\x04");
        for value in [20, entry.local_flags, entry.local_method, 0, 0x21] {
            out.extend_from_slice(&value.to_le_bytes());
        }
        let sizes = if entry.local_sentinel { [u32::MAX; 2] } else { [stored, entry.local_size] };
        for value in [entry.crc, sizes[0], sizes[1]] {
            out.extend_from_slice(&if deferred { 0 } else { value }.to_le_bytes());
        }
        for length in [entry.local_name.len(), entry.local_extra.len()] {
            out.extend_from_slice(&(length as u16).to_le_bytes());
        }
        for part in [&entry.local_name, &entry.local_extra, &entry.data, &entry.descriptor] {
            out.extend_from_slice(part);
        }
        central.extend_from_slice(b"PK\x01\x02");
        central.extend_from_slice(&[30, entry.made_by]);
        for value in [20, entry.flags, entry.method, 0, 0x21] {
            central.extend_from_slice(&value.to_le_bytes());
        }
        for value in [entry.crc, stored, entry.size] {
            central.extend_from_slice(&value.to_le_bytes());
        }
        for value in [entry.name.len() as u16, entry.extra.len() as u16, 0, 0, 0] {
            central.extend_from_slice(&value.to_le_bytes());
        }
        for value in [entry.mode << 16, offset] {
            central.extend_from_slice(&value.to_le_bytes());
        }
        central.extend_from_slice(&entry.name);
        central.extend_from_slice(&entry.extra);
    }
    let start = base + out.len() as u32;
    out.extend_from_slice(&central);
    out.extend_from_slice(b"PK\x05\x06\0\0\0\0");
    for _ in 0..2 {
        out.extend_from_slice(&(entries.len() as u16).to_le_bytes());
    }
    for value in [central.len() as u32, start] {
        out.extend_from_slice(&value.to_le_bytes());
    }
    out.extend_from_slice(&[0, 0]);
    out
}

pub fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

pub fn zst(data: &[u8]) -> Vec<u8> {
    zstd::encode_all(data, 1).unwrap()
}

pub fn xz(data: &[u8]) -> Vec<u8> {
    let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 1);
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

/// Whether a test that needs this may be skipped; prints why, or panics when `PLIMSOLL_MUST_WORK` names it.
pub fn skip(need: &str, reason: &str) {
    let must = std::env::var("PLIMSOLL_MUST_WORK").unwrap_or_default();
    assert!(!must.split(',').any(|name| name == need || name == "all"), "{need} must work here: {reason}");
    eprintln!("skipped: {reason}");
}

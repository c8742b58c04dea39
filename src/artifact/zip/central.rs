//! The end records and the central directory of a zip.
//!
//! Main type: [`Directory`]: entries sorted by offset that don't overlap and don't repeat a name.

use std::collections::HashSet;
use std::io::{BufRead, Read, Seek};

use super::{disagree, u16_at, u32_at, u64_at};
use crate::artifact::budget::Budget;
use crate::artifact::digest::Source;
use crate::artifact::rejection::{Error, Rejection, Rule, shown};

const END: &[u8; 4] = b"PK\x05\x06";
const END_LENGTH: usize = 22;
const COMMENT_MAX: usize = 65_535;
const LOCATOR: &[u8; 4] = b"PK\x06\x07";
const LOCATOR_LENGTH: u64 = 20;
const END64: &[u8; 4] = b"PK\x06\x06";
const ENTRY: &[u8; 4] = b"PK\x01\x02";
const ENTRY_LENGTH: usize = 46;
const LOCAL_LENGTH: u64 = 30;

/// Largest central directory that is read, bytes: 200,000 entries take some 25 MB.
const DIRECTORY_MAX: u64 = 128 << 20;

/// What an entry is, by the upper half of its external attributes where a Unix wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    File,
    Directory,
    Symlink,
}

/// One member as the central directory describes it.
#[derive(Debug)]
pub struct Entry {
    /// The name's bytes as in both headers.
    pub name: Vec<u8>,
    pub kind: Kind,
    pub executable: bool,
    /// General purpose flags (APPNOTE 4.4.4).
    pub flags: u16,
    /// Compression method (APPNOTE 4.4.5).
    pub method: u16,
    pub crc: u32,
    pub compressed: u64,
    pub size: u64,
    /// Where its local header begins.
    pub offset: u64,
}

/// All entries, in order of their offsets.
#[derive(Debug)]
pub struct Directory {
    pub entries: Vec<Entry>,
    /// Where the entries' data ends and the central directory begins.
    start: u64,
    /// The central directory and all behind it, as read before unpacking.
    bytes: Vec<u8>,
}

/// Whether a file that doesn't begin like a zip ends like one: a self-extracting or otherwise prefixed zip, which
/// many readers open.
pub fn has_end_record<R: Read + Seek>(source: &mut Source<R>) -> Result<bool, Error> {
    let (tail, _) = tail(source)?;
    Ok(find_end(&tail).is_some_and(|at| u16_at(&tail[at..], 10) > 0))
}

fn tail<R: Read + Seek>(source: &mut Source<R>) -> Result<(Vec<u8>, u64), Error> {
    let start = source.length().saturating_sub((END_LENGTH + COMMENT_MAX) as u64);
    let bytes = source.look(start, END_LENGTH + COMMENT_MAX).map_err(|e| Error::failed("read the artifact", e))?;
    Ok((bytes, start))
}

/// The end record whose comment ends with the file, the last such.
fn find_end(tail: &[u8]) -> Option<usize> {
    (0..(tail.len() + 1).saturating_sub(END_LENGTH))
        .rev()
        .find(|&at| tail[at..].starts_with(END) && at + END_LENGTH + usize::from(u16_at(&tail[at..], 20)) == tail.len())
}

/// The figures of the end records.
struct End {
    entries: u64,
    size: u64,
    offset: u64,
    /// Where the first of the end records begins.
    at: u64,
}

impl Directory {
    /// Reads and checks it.
    pub fn read<R: Read + Seek>(source: &mut Source<R>, budget: &Budget) -> Result<Self, Error> {
        let end = read_end(source)?;
        if end.offset.checked_add(end.size) != Some(end.at) {
            let message = "the central directory doesn't end where the end record begins: something was put before or after the zip, or two were joined";
            return Err(Rejection::new(Rule::TrailingData, message).into());
        }
        if end.entries > budget.files {
            return Err(Rejection::new(Rule::BudgetFiles, format!("more than {} members", budget.files)).into());
        }
        if end.size > DIRECTORY_MAX {
            return Err(Rejection::new(Rule::BudgetBytes, "the central directory is larger than 128 MiB").into());
        }
        // `end.at` lies in the file, so what is behind it is at most the end records and a comment.
        let rest = source.length() - end.offset;
        let length = usize::try_from(rest).unwrap_or(usize::MAX);
        let bytes = source.look(end.offset, length).map_err(|e| Error::failed("read the artifact", e))?;
        if bytes.len() as u64 != rest {
            return Err(Rejection::new(Rule::Changed, "the file became shorter while it was read").into());
        }
        let mut records = &bytes[..end.size as usize];
        let mut entries = Vec::with_capacity(end.entries.min(1 << 16) as usize);
        let mut names = HashSet::new();
        while !records.is_empty() {
            let (entry, rest) = Entry::parse(records)?;
            if !names.insert(entry.name.clone()) {
                let message = "two entries have this name, and readers differ in which one they take";
                return Err(Rejection::new(Rule::Duplicate, message).at(&entry.name).into());
            }
            entries.push(entry);
            records = rest;
        }
        if entries.len() as u64 != end.entries {
            let message =
                format!("the end record counts {} entries, the central directory holds {}", end.entries, entries.len());
            return Err(disagree(message).into());
        }
        entries.sort_by_key(|entry: &Entry| entry.offset);
        let directory = Directory { entries, start: end.offset, bytes };
        directory.check_overlap()?;
        Ok(directory)
    }

    /// Sorted by offset, each entry must end before the next begins: near-linear, and before a byte is unpacked.
    fn check_overlap(&self) -> Result<(), Rejection> {
        let first = self.entries.first().map_or(self.start, |entry| entry.offset);
        if first != 0 {
            return Err(Rejection::new(
                Rule::TrailingData,
                format!("{first} bytes before the first entry belong to none"),
            ));
        }
        for (index, entry) in self.entries.iter().enumerate() {
            let least = LOCAL_LENGTH + entry.name.len() as u64;
            let end = entry.offset.checked_add(least).and_then(|end| end.checked_add(entry.compressed));
            if end.is_none_or(|end| end > self.end_of(index)) {
                let message = match self.entries.get(index + 1) {
                    Some(next) => format!("it overlaps the entry `{}`", shown(&next.name)),
                    None => "it overlaps the central directory".to_owned(),
                };
                return Err(Rejection::new(Rule::Overlap, message).at(&entry.name));
            }
        }
        Ok(())
    }

    /// Where the entry of that index must end.
    pub fn end_of(&self, index: usize) -> u64 {
        self.entries.get(index + 1).map_or(self.start, |next| next.offset)
    }

    /// Reads the rest of the input, which must still be what was parsed.
    pub fn check_unchanged(&self, input: &mut impl BufRead) -> Result<(), Error> {
        let mut now = Vec::with_capacity(self.bytes.len() + 1);
        input.take(self.bytes.len() as u64 + 1).read_to_end(&mut now).map_err(Error::from_read)?;
        if now != self.bytes {
            return Err(Rejection::new(Rule::Changed, "the central directory changed while the zip was read").into());
        }
        Ok(())
    }
}

fn read_end<R: Read + Seek>(source: &mut Source<R>) -> Result<End, Error> {
    let (tail, tail_start) = tail(source)?;
    let Some(at) = find_end(&tail) else {
        return Err(
            Rejection::new(Rule::Truncated, "the zip has no end record: it is cut short, or data follows it").into()
        );
    };
    let record = &tail[at..];
    // Other readers look for the last signature, whatever its comment length says.
    if record[4..].windows(4).any(|window| window == END) {
        return Err(
            Rejection::new(Rule::TrailingData, "a second end record hides in the first or in its comment").into()
        );
    }
    let at = tail_start + at as u64;
    let end = End {
        entries: u16_at(record, 10).into(),
        size: u32_at(record, 12).into(),
        offset: u32_at(record, 16).into(),
        at,
    };
    let disks = [u16_at(record, 4), u16_at(record, 6)];
    let here = u16_at(record, 8);
    let Some(locator_at) = at.checked_sub(LOCATOR_LENGTH) else { return single(disks, here, end) };
    let locator =
        source.look(locator_at, LOCATOR_LENGTH as usize).map_err(|e| Error::failed("read the artifact", e))?;
    if !locator.starts_with(LOCATOR) {
        return single(disks, here, end);
    }
    // APPNOTE 4.3.14 and 4.3.15.
    let at64 = u64_at(&locator, 8);
    let record = source.look(at64, 56).map_err(|e| Error::failed("read the artifact", e))?;
    let whole = u64_at(&record, 4).checked_add(12).and_then(|length| length.checked_add(at64));
    if !record.starts_with(END64) || record.len() != 56 || whole != Some(locator_at) {
        let message = "the zip64 end record isn't where its locator says, just before it";
        return Err(Rejection::new(Rule::TrailingData, message).into());
    }
    let end64 = End { entries: u64_at(&record, 32), size: u64_at(&record, 40), offset: u64_at(&record, 48), at: at64 };
    let same = |small: u64, sentinel: u64, large: u64| small == sentinel || small == large;
    if !same(end.entries, 0xffff, end64.entries)
        || !same(end.size, 0xffff_ffff, end64.size)
        || !same(end.offset, 0xffff_ffff, end64.offset)
    {
        return Err(disagree("the end record and the zip64 end record contradict each other").into());
    }
    if u32_at(&record, 16) != 0 || u32_at(&record, 20) != 0 || u64_at(&record, 24) != end64.entries {
        return Err(Rejection::new(Rule::Format, "the zip is split over several files").into());
    }
    Ok(end64)
}

fn single(disks: [u16; 2], here: u16, end: End) -> Result<End, Error> {
    if disks != [0, 0] || u64::from(here) != end.entries {
        return Err(Rejection::new(Rule::Format, "the zip is split over several files").into());
    }
    Ok(end)
}

impl Entry {
    /// One record and what follows it.
    fn parse(records: &[u8]) -> Result<(Self, &[u8]), Rejection> {
        let short = || Rejection::new(Rule::Corrupt, "the central directory is malformed");
        if !records.starts_with(ENTRY) || records.len() < ENTRY_LENGTH {
            return Err(short());
        }
        let lengths = [28, 30, 32].map(|at| usize::from(u16_at(records, at)));
        let [name, extra, comment] = lengths;
        let (variable, rest) = records[ENTRY_LENGTH..].split_at_checked(name + extra + comment).ok_or_else(short)?;
        let (name, extra) = (&variable[..name], &variable[name..name + extra]);
        Self::interpret(records, name, extra).map(|entry| (entry, rest)).map_err(|rejection| rejection.at(name))
    }

    fn interpret(record: &[u8], name: &[u8], extra: &[u8]) -> Result<Self, Rejection> {
        let flags = u16_at(record, 8);
        let method = u16_at(record, 10);
        if flags & 0x2041 != 0 || method == 99 {
            return Err(Rejection::new(Rule::Encrypted, "it is encrypted"));
        }
        let mut sizes = Zip64 {
            size: u32_at(record, 24).into(),
            compressed: u32_at(record, 20).into(),
            offset: u32_at(record, 42).into(),
        };
        sizes.widen(extra)?;
        if !matches!(u16_at(record, 34), 0 | 0xffff) {
            return Err(Rejection::new(Rule::Format, "the zip is split over several files"));
        }
        check_unicode_name(extra, name)?;
        // APPNOTE 4.4.2: 3 is Unix, 19 is macOS; others keep no mode here.
        let mode = if matches!(record[5], 3 | 19) { u32_at(record, 38) >> 16 } else { 0 };
        let slash = name.ends_with(b"/");
        let kind = match mode & 0o170_000 {
            0 | 0o100_000 if slash && sizes.size == 0 => Kind::Directory,
            0 | 0o100_000 if slash => return Err(disagree("the name is a directory's, but it holds data")),
            0 | 0o100_000 => Kind::File,
            0o040_000 if slash && sizes.size == 0 => Kind::Directory,
            0o040_000 => return Err(disagree("the mode is a directory's, but the name or size is not")),
            0o120_000 if !slash => Kind::Symlink,
            0o120_000 => return Err(disagree("the mode is a link's, but the name is a directory's")),
            0o020_000 | 0o060_000 => return Err(Rejection::new(Rule::Kind, "it is a device, which is never unpacked")),
            0o010_000 => return Err(Rejection::new(Rule::Kind, "it is a FIFO, which is never unpacked")),
            _ => return Err(Rejection::new(Rule::Kind, "it is of a kind that is never unpacked")),
        };
        Ok(Entry {
            name: name.to_vec(),
            kind,
            executable: mode & 0o111 != 0,
            flags,
            method,
            crc: u32_at(record, 16),
            compressed: sizes.compressed,
            size: sizes.size,
            offset: sizes.offset,
        })
    }
}

/// Figures that may be in the zip64 extra field (APPNOTE 4.5.3).
pub struct Zip64 {
    pub size: u64,
    pub compressed: u64,
    pub offset: u64,
}

impl Zip64 {
    /// Replaces those figures that are all ones by what the extra field says. A local header has no offset: leave it 0.
    pub fn widen(&mut self, extra: &[u8]) -> Result<(), Rejection> {
        let mut field = field(extra, 1)?.unwrap_or_default();
        for figure in [&mut self.size, &mut self.compressed, &mut self.offset] {
            if *figure == 0xffff_ffff {
                let Some((value, rest)) = field.split_first_chunk() else {
                    return Err(Rejection::new(Rule::Corrupt, "its zip64 field is missing or too short"));
                };
                *figure = u64::from_le_bytes(*value);
                field = rest;
            }
        }
        Ok(())
    }
}

/// The extra field of that id. Two of one id are refused, a malformed rest is not: some writers pad with zeros.
fn field(mut extra: &[u8], id: u16) -> Result<Option<&[u8]>, Rejection> {
    let mut found = None;
    while extra.len() >= 4 {
        let length = usize::from(u16_at(extra, 2));
        let Some(data) = extra.get(4..4 + length) else { break };
        if u16_at(extra, 0) == id && found.replace(data).is_some() {
            return Err(disagree("an extra field comes twice"));
        }
        extra = &extra[4 + length..];
    }
    Ok(found)
}

/// Info-ZIP's second name (APPNOTE 4.6.9), which some readers prefer: it must not be another one. It counts only with
/// the checksum of the first.
fn check_unicode_name(extra: &[u8], name: &[u8]) -> Result<(), Rejection> {
    let Some(field) = field(extra, 0x7075)? else { return Ok(()) };
    let mut crc = flate2::Crc::new();
    crc.update(name);
    if field.len() > 5 && u32_at(field, 1) == crc.sum() && &field[5..] != name {
        return Err(disagree(format!("an extra field names it `{}`", shown(&field[5..]))));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zip64_figures_replace_only_what_is_all_ones() {
        let extra = [&[1, 0, 8, 0][..], &7_u64.to_le_bytes()].concat();
        let mut sizes = Zip64 { size: 5, compressed: 0xffff_ffff, offset: 9 };
        sizes.widen(&extra).unwrap();
        assert_eq!((sizes.size, sizes.compressed, sizes.offset), (5, 7, 9));
        let mut both = Zip64 { size: 0xffff_ffff, compressed: 0xffff_ffff, offset: 9 };
        assert_eq!(both.widen(&extra).unwrap_err().rule, Rule::Corrupt);
        let twice = [&extra[..], &extra[..]].concat();
        assert_eq!(sizes.widen(&twice).unwrap_err().rule, Rule::Disagreement);
    }

    #[test]
    fn the_end_record_is_the_one_whose_comment_ends_the_file() {
        let mut end = [0; END_LENGTH];
        end[..4].copy_from_slice(END);
        assert_eq!(find_end(&end), Some(0));
        assert_eq!(find_end(&[&b"PK\x05\x06"[..], &end].concat()), Some(4));
        assert_eq!(find_end(&[&end[..], b"x"].concat()), None);
        end[20] = 3;
        assert_eq!(find_end(&[&end[..], b"abc"].concat()), Some(0));
        assert_eq!(find_end(&end[..21]), None);
        assert_eq!(find_end(b""), None);
    }
}

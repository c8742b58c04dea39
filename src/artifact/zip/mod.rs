//! Unpacks zip.
//!
//! Main type: [`Archive`], the central directory read and checked; then [`Archive::unpack`]. The `zip` crate is not used:
//! it answers for one entry at a time and doesn't look at what lies between and before them, which is where archives that
//! look different to different readers hide (concatenated ones, overlapping ones, local headers that contradict).
//!
//! An archive is accepted only in the one shape that every ordinary writer makes: entries back to back from the first
//! byte, each with its local header (and data descriptor, when flagged) saying what the central directory says; then
//! the central directory; then the end records and a comment; nothing before, between or after. So every byte has one
//! meaning, the check is one pass in order of offsets, and the input is hashed while it is unpacked.
//!
//! The central directory is the authority. Names are UTF-8 whether or not the flag for it is set: Info-ZIP writes UTF-8
//! without saying so, and what isn't UTF-8 is refused. Facts: PKWARE APPNOTE 6.3.10, by section.

mod central;
mod entry;

use std::io::{BufReader, Read, Seek};

use central::Directory;
use entry::{Buffers, EntryReader};

use super::budget::{Budget, Meter};
use super::destination::Destination;
use super::digest::Source;
use super::format::Format;
use super::path::{Dialect, MemberPath};
use super::rejection::{Error, Rejection, Rule};
use super::stream;

pub use central::has_end_record;

/// A zip whose central directory is read and checked.
pub struct Archive {
    directory: Directory,
}

impl Archive {
    /// Reads the end records and the central directory.
    pub fn open<R: Read + Seek>(source: &mut Source<R>, budget: &Budget) -> Result<Self, Error> {
        Ok(Archive { directory: Directory::read(source, budget)? })
    }

    /// The format of the tar that is this archive's only member, if it is just that.
    pub fn single_tar<R: Read + Seek>(&self, source: &mut Source<R>, meter: &Meter) -> Result<Option<Format>, Error> {
        let [entry] = &self.directory.entries[..] else { return Ok(None) };
        if entry.kind != central::Kind::File {
            return Ok(None);
        }
        let input = source.unhashed(entry.offset).map_err(|e| Error::failed("read the artifact", e))?;
        let mut input = BufReader::with_capacity(stream::CHUNK, input);
        let mut buffers = Buffers::default();
        let found = EntryReader::open(&mut input, entry, self.directory.end_of(0), &mut buffers, meter)
            .and_then(|reader| stream::holds_tar(reader).map_err(Error::from_read));
        drop(input);
        source.resume().map_err(|e| Error::failed("read the artifact", e))?;
        // A damaged member is refused where it is unpacked, with its name.
        Ok(found.unwrap_or(None))
    }

    /// Unpacks every member, or the tar that is the only one.
    pub fn unpack<R: Read + Seek>(
        &self,
        source: &mut Source<R>,
        inner: Option<Format>,
        destination: &mut Destination<'_>,
        meter: &Meter,
    ) -> Result<(), Error> {
        let mut input = BufReader::with_capacity(stream::CHUNK, source);
        let mut buffers = Buffers::default();
        for (index, entry) in self.directory.entries.iter().enumerate() {
            let end = self.directory.end_of(index);
            let done = (|| {
                let mut reader = EntryReader::open(&mut input, entry, end, &mut buffers, meter)?;
                match inner {
                    Some(format) => {
                        let whole = BufReader::with_capacity(stream::CHUNK, &mut reader);
                        let decoder = stream::decoder(format, whole).map_err(Error::from_read)?;
                        let decoded = BufReader::with_capacity(stream::CHUNK, decoder);
                        let mut tar = stream::Metered::new(decoded, meter);
                        super::tar::unpack(&mut tar, destination, meter.budget())?;
                    }
                    None => place(&mut reader, entry, destination, meter.budget())?,
                }
                reader.finish()
            })();
            done.map_err(|e| e.at(&entry.name))?;
        }
        self.directory.check_unchanged(&mut input)
    }
}

fn place<R: std::io::BufRead>(
    reader: &mut EntryReader<'_, R>,
    entry: &central::Entry,
    destination: &mut Destination<'_>,
    budget: &Budget,
) -> Result<(), Error> {
    let path = MemberPath::parse(&entry.name, Dialect::Zip, budget)?;
    match entry.kind {
        central::Kind::Directory => destination.directory(&path),
        central::Kind::Symlink => {
            // One more than allowed, so that a longer target is seen as such.
            let target = stream::read_up_to(reader, 4096).map_err(Error::from_read)?;
            destination.symlink(&path, &target)
        }
        central::Kind::File => {
            let mut file = destination.file(&path, entry.executable, entry.size)?;
            reader.copy(|bytes| file.write(bytes))?;
            file.finish()
        }
    }
}

/// A rejection because two places of the archive contradict each other.
fn disagree(message: impl Into<String>) -> Rejection {
    Rejection::new(Rule::Disagreement, message)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |chunk| u16::from_le_bytes(*chunk))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |chunk| u32::from_le_bytes(*chunk))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |chunk| u64::from_le_bytes(*chunk))
}

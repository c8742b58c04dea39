//! Unpacks one input into one empty directory.
//!
//! Main function: [`unpack`]. It needs two open files and nothing else: no path and no `/proc`, so it runs inside the jail (see
//! [`super::helper`]). On any error the destination is empty again.

use std::io::{BufRead, BufReader, Read, Seek};
use std::os::fd::{AsFd, OwnedFd};

use serde::{Deserialize, Serialize};

use super::ahead::ahead;
use super::beneath;
use super::budget::{Budget, Meter};
use super::destination::Destination;
use super::digest::{Digest, Source};
use super::format::{Format, SNIFF, sniff};
use super::path::{Dialect, MemberPath};
use super::rejection::{Error, Rejection, Rule};
use super::tree::Purpose;
use super::{stream, tar, zip};

/// What to unpack and how much of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The name that a single file, which is no archive, gets in the tree: the last component of the artifact's path.
    pub file_name: String,
    /// Whether that single file is executable.
    pub executable: bool,
    /// What the tree is for.
    pub purpose: Purpose,
    /// The limits.
    pub budget: Budget,
    /// The digest that the input must have. It is then read twice: first only to compare.
    pub sha256: Option<Digest>,
}

/// What was unpacked: with the source's name, the report's `artifact`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Summary {
    /// What the input is packed as.
    pub format: Format,
    /// What the archive is packed as that was the only member of the input, a zip.
    pub inner: Option<Format>,
    /// Of the input's bytes as they were unpacked; for a directory, of its content ([`super::digest::TreeDigest`]).
    pub sha256: Digest,
    /// Regular files in the tree, hard links included.
    pub files: u64,
    /// Their logical bytes (a hard link's count once, a file that a later member replaced counts).
    pub bytes: u64,
}

impl Summary {
    /// The word for reports: `tar.zst`, or `zip(tar.zst)` for an archive inside another.
    pub fn packing(&self) -> String {
        match self.inner {
            Some(inner) => format!("{}({inner})", self.format),
            None => self.format.to_string(),
        }
    }
}

/// Unpacks `input`, from its beginning, into the empty directory `destination`.
///
/// # Errors
/// [`Error::Rejected`] names member and rule. On any error everything in the destination is removed; should that fail
/// as well, the error says so.
pub fn unpack(input: impl Read + Seek + Send, destination: OwnedFd, request: &Request) -> Result<Summary, Error> {
    let copy = destination.try_clone().map_err(|e| Error::failed("duplicate the destination", e))?;
    let mut source = Source::new(input).map_err(|e| Error::failed("read the artifact", e))?;
    if let Some(expected) = request.sha256 {
        verify(&mut source, expected)?;
    }
    let meter = Meter::new(&request.budget, source.length());
    let writer = Destination::new(copy, request.purpose, &meter)?;
    fill(source, writer, &meter, request).map_err(|error| undo(destination, error))
}

/// Empties the destination after an error.
pub(super) fn undo(destination: impl AsFd, error: Error) -> Error {
    match beneath::empty(destination.as_fd()) {
        Ok(()) => error,
        Err(source) => Error::failed(format!("empty the destination after: {error}"), source),
    }
}

/// Compares the digest of the whole input before a byte of it is parsed.
fn verify<R: Read + Seek + Send>(source: &mut Source<R>, expected: Digest) -> Result<(), Error> {
    let input = source.unhashed(0).map_err(|e| Error::failed("read the artifact", e))?;
    let found = Digest::of_reader(input).map_err(|e| Error::failed("read the artifact", e))?;
    source.resume().map_err(|e| Error::failed("read the artifact", e))?;
    if found != expected {
        return Err(mismatch(expected, found).into());
    }
    Ok(())
}

pub(super) fn mismatch(expected: Digest, found: Digest) -> Rejection {
    Rejection::new(Rule::Sha256, format!("its sha256 is {found}, not {expected}"))
}

fn fill<R: Read + Seek + Send>(
    mut source: Source<R>,
    mut writer: Destination<'_>,
    meter: &Meter,
    request: &Request,
) -> Result<Summary, Error> {
    let head = source.look(0, SNIFF).map_err(|e| Error::failed("read the artifact", e))?;
    let format = sniff(&head)?;
    let mut inner = None;
    match format {
        Format::Zip => {
            let archive = zip::Archive::open(&mut source, meter.budget())?;
            inner = archive.single_tar(&mut source, meter)?;
            archive.unpack(&mut source, inner, &mut writer, meter)?;
        }
        Format::File | Format::Directory => {
            if zip::has_end_record(&mut source)? {
                let message = "a zip with something in front of it, which readers treat differently";
                return Err(Rejection::new(Rule::TrailingData, message).into());
            }
            single(&mut source, &mut writer, meter, request)?;
        }
        Format::Tar | Format::TarGz | Format::TarZst | Format::TarXz => {
            unpack_tar(format, &mut source, &mut writer, meter)?;
        }
    }
    let files = writer.files();
    let _tree = writer.finish()?;
    let length = source.length();
    let (sha256, read) = source.finish().map_err(|e| Error::failed("read the artifact", e))?;
    if read != length {
        return Err(Rejection::new(Rule::Changed, "the file's length changed while it was read").into());
    }
    if let Some(expected) = request.sha256
        && sha256 != expected
    {
        return Err(Rejection::new(
            Rule::Changed,
            "the file changed between the check of its sha256 and the unpacking",
        )
        .into());
    }
    Ok(Summary { format, inner, sha256, files, bytes: meter.bytes() })
}

/// Reads, hashes and decompresses on one thread, parses and writes on this one. Where no second thread can be had, this
/// one does it all.
fn unpack_tar<R: Read + Send>(
    format: Format,
    source: &mut Source<R>,
    writer: &mut Destination<'_>,
    meter: &Meter,
) -> Result<(), Error> {
    let input = BufReader::with_capacity(stream::CHUNK, source);
    let decoder = stream::decoder(format, input).map_err(Error::from_read)?;
    std::thread::scope(|scope| match ahead(scope, decoder) {
        Ok(ahead) => members(format, ahead, writer, meter),
        Err(decoder) => members(format, BufReader::with_capacity(stream::CHUNK, decoder), writer, meter),
    })
}

fn members(format: Format, stream: impl BufRead, writer: &mut Destination<'_>, meter: &Meter) -> Result<(), Error> {
    let mut archive = stream::Metered::new(stream, meter);
    let begin = archive.fill_buf().map_err(Error::from_read)?;
    if begin.is_empty() || begin.first_chunk().is_some_and(|block| !tar::is_start(block)) {
        return Err(Rejection::new(Rule::Format, format!("it begins like a {format} but holds no tar")).into());
    }
    tar::unpack(&mut archive, writer, meter.budget())
}

/// A single file that is no archive.
fn single<R: Read>(
    source: &mut Source<R>,
    writer: &mut Destination<'_>,
    meter: &Meter,
    request: &Request,
) -> Result<(), Error> {
    let path = MemberPath::parse(request.file_name.as_bytes(), Dialect::Unix, meter.budget())?;
    let mut file = writer.file(&path, request.executable, source.length())?;
    let mut input = BufReader::with_capacity(stream::CHUNK, source);
    loop {
        let chunk = input.fill_buf().map_err(Error::from_read)?;
        if chunk.is_empty() {
            return file.finish();
        }
        file.write(chunk)?;
        let length = chunk.len();
        input.consume(length);
    }
}

//! Walks the members of a tar and hands them to the destination.
//!
//! The rules, where real tars and real readers differ:
//! - The pax `size` counts where it is given, so that a member's data is never taken for headers.
//! - An extended header (`x`, `L`, `K`) belongs to the next member, also with other extended headers between; two
//!   of one kind for one member, two that disagree, or one without a member are refused.
//! - A global header (`g`) may hold comments and times, nothing that names or sizes a member.
//! - Directories and links that carry data are refused: readers disagree whether it is there.
//! - The archive ends with two zero blocks. Only zeros may follow; an end without them is a truncated archive.
//! - A file of a name that came before replaces it, as `tar -r` means it; any other repetition is refused.

use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};

use super::header::{Block, Header, Type};
use super::pax::{self, Extension};
use super::sparse::Map;
use crate::artifact::budget::Budget;
use crate::artifact::destination::Members;
use crate::artifact::path::{Dialect, MemberPath};
use crate::artifact::rejection::{Error, Rejection, Rule};
use crate::artifact::stream;

/// Longest GNU long name or link, bytes; a longer path is beyond any budget.
const MAX_LONG: u64 = 64 << 10;

/// Unpacks the whole archive and reads its input to the end.
pub fn unpack(input: &mut impl BufRead, destination: &mut impl Members, budget: &Budget) -> Result<(), Error> {
    while let Some((member, block)) = next(input)? {
        let name = member.name.clone();
        place(member, &block, input, destination, budget).map_err(|e| e.at(&name))?;
    }
    end(input)?;
    stream::drain_zeros(input).map_err(Error::from_read)
}

/// A member of a tar that is not unpacked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// As the archive spells it.
    pub name: Vec<u8>,
    /// The target, if it is a link of either kind.
    pub link: Option<Vec<u8>>,
    /// Where its data is in the archive.
    pub offset: u64,
    /// Bytes of data.
    pub size: u64,
}

/// Lists the files and links of an uncompressed tar, of which only the headers are read.
///
/// # Errors
/// As for unpacking; also for more than `most` members and for sparse files.
pub fn list<R: Read + Seek>(input: &mut BufReader<R>, most: usize) -> Result<Vec<Listed>, Error> {
    let io = |e| Error::failed("read the archive", e);
    let length = input.get_mut().seek(SeekFrom::End(0)).map_err(io)?;
    input.seek(SeekFrom::Start(0)).map_err(io)?;
    let mut listed = Vec::new();
    for count in 0.. {
        let Some((member, _)) = next(input)? else { break };
        if count == most {
            return Err(Rejection::new(Rule::BudgetFiles, format!("more than {most} members")).into());
        }
        let offset = input.stream_position().map_err(io)?;
        let padded = member.size.checked_next_multiple_of(512).and_then(|size| offset.checked_add(size));
        let Some(after) = padded.filter(|&after| after <= length) else {
            return Err(Rejection::new(Rule::Truncated, "the archive is cut short").at(&member.name).into());
        };
        let link = match member.kind {
            Type::File if member.sparse.is_none() => None,
            Type::Symlink | Type::Hardlink if member.size == 0 => Some(member.link),
            Type::Directory if member.size == 0 => continue,
            _ => {
                let message = "it is neither a plain file nor a link nor a directory";
                return Err(Rejection::new(Rule::Kind, message).at(&member.name).into());
            }
        };
        let skip = i64::try_from(after - offset).map_err(|e| io(io::Error::other(e)))?;
        input.seek_relative(skip).map_err(io)?;
        listed.push(Listed { name: member.name, link, offset, size: member.size });
    }
    end(input)?;
    Ok(listed)
}

/// The next member and the block of its header; its data is next in the input. None once the first block of zeros is read.
fn next(input: &mut impl BufRead) -> Result<Option<(Member, Block)>, Error> {
    let mut pending = Pending::default();
    loop {
        let block = read_block(input)?;
        if block.iter().all(|&b| b == 0) {
            break;
        }
        let header = Header::parse(&block)?;
        match header.kind {
            Type::Pax => {
                let data = read_data(input, header.size, pax::MAX)?;
                put(&mut pending.pax, Extension::parse(&data)?)?;
            }
            Type::LongName => put(&mut pending.name, long(input, header.size)?)?,
            Type::LongLink => put(&mut pending.link, long(input, header.size)?)?,
            Type::PaxGlobal => {
                let data = read_data(input, header.size, pax::MAX)?;
                if Extension::parse(&data)?.is_specific() {
                    let message = "a global pax header gives a name or size to every member that follows";
                    return Err(Rejection::new(Rule::Disagreement, message).into());
                }
            }
            _ => return Ok(Some((pending.apply(header)?, block))),
        }
    }
    if pending != Pending::default() {
        return Err(
            Rejection::new(Rule::Truncated, "the archive ends after an extended header, before its member").into()
        );
    }
    Ok(None)
}

/// After the first block of zeros comes a second.
fn end(input: &mut impl Read) -> Result<(), Error> {
    if read_block(input)?.iter().any(|&b| b != 0) {
        let message = "a single zero block in the middle, where some readers stop and others go on";
        return Err(Rejection::new(Rule::TrailingData, message).into());
    }
    Ok(())
}

/// Extended headers that wait for their member.
#[derive(Debug, Default, PartialEq, Eq)]
struct Pending {
    pax: Option<Extension>,
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
}

/// A header with its extensions applied.
struct Member {
    kind: Type,
    name: Vec<u8>,
    link: Vec<u8>,
    size: u64,
    executable: bool,
    sparse: Option<pax::Sparse>,
}

impl Pending {
    fn apply(self, header: Header) -> Result<Member, Rejection> {
        let mut extension = self.pax.unwrap_or_default();
        let sparse = extension.sparse.take();
        let name = one(extension.path, self.name, header.name, "names")?;
        let link = one(extension.link, self.link, header.link, "link targets")?;
        // The real name of a sparse pax member; `path` is then a made-up one for readers that know no better.
        let name = sparse.as_ref().and_then(|sparse| sparse.name.clone()).unwrap_or(name);
        let size = extension.size.unwrap_or(header.size);
        // Old tars say file and end the name in a slash. Only the whole name tells: a short one may be cut behind one.
        let kind = match header.kind {
            Type::File if name.ends_with(b"/") => Type::Directory,
            kind => kind,
        };
        Ok(Member { kind, name, link, size, executable: header.executable, sparse })
    }
}

/// What counts of three spellings: pax, then GNU, then the header's own; the first two must not disagree.
fn one(pax: Option<Vec<u8>>, gnu: Option<Vec<u8>>, own: Vec<u8>, what: &str) -> Result<Vec<u8>, Rejection> {
    match (pax, gnu) {
        (Some(pax), Some(gnu)) if pax != gnu => {
            let message = format!("its pax and GNU headers give different {what}");
            Err(Rejection::new(Rule::Disagreement, message).at(&pax))
        }
        (Some(long), _) | (None, Some(long)) => Ok(long),
        (None, None) => Ok(own),
    }
}

fn put<T>(slot: &mut Option<T>, value: T) -> Result<(), Rejection> {
    if slot.replace(value).is_some() {
        return Err(Rejection::new(Rule::Disagreement, "two extended headers of one kind stand before one member"));
    }
    Ok(())
}

fn place(
    member: Member,
    block: &Block,
    input: &mut impl BufRead,
    destination: &mut impl Members,
    budget: &Budget,
) -> Result<(), Error> {
    if let Type::Refused(what) = member.kind {
        return Err(Rejection::new(Rule::Kind, format!("it is {what}, which is never unpacked")).into());
    }
    let path = MemberPath::parse(destination.spelled(&member.name), Dialect::Unix, budget)?;
    let is_file = matches!(member.kind, Type::File | Type::GnuSparse);
    if !is_file && member.size != 0 {
        let message = "it is a directory or link that carries data, which some readers skip and others don't";
        return Err(Rejection::new(Rule::Disagreement, message).into());
    }
    if member.sparse.is_some() && member.kind != Type::File {
        return Err(Rejection::new(Rule::Sparse, "it has a sparse map but is no file").into());
    }
    if member.kind != Type::Directory && path.is_directory() {
        return Err(Rejection::new(Rule::Path, "the name ends in a slash, but it is no directory").into());
    }
    match member.kind {
        Type::Directory => destination.directory(&path),
        Type::Special(what) => destination.special(what),
        Type::Symlink => destination.symlink(&path, &member.link),
        Type::Hardlink => {
            let target = MemberPath::parse(destination.spelled(&member.link), Dialect::Unix, budget)
                .map_err(|r| Rejection::new(Rule::Hardlink, format!("the link's target is refused: {}", r.message)))?;
            destination.hardlink(&path, &target)
        }
        _ => {
            let mut stored = member.size;
            let map = match &member.sparse {
                _ if member.kind == Type::GnuSparse => Some(Map::from_gnu(block, stored, input)?),
                Some(pax) => Some(Map::from_pax(pax, &mut stored, input)?),
                None => None,
            };
            let size = map.as_ref().map_or(stored, |map| map.size);
            let mut file = destination.file(&path, member.executable, size)?;
            let mut at = 0;
            match map {
                None => copy(input, stored, |bytes| file.write(bytes))?,
                Some(map) => {
                    for (offset, length) in map.segments {
                        file.hole(offset - at)?;
                        copy(input, length, |bytes| file.write(bytes))?;
                        at = offset + length;
                    }
                    file.hole(map.size - at)?;
                }
            }
            file.finish()?;
            skip_padding(input, stored)
        }
    }
}

/// Hands on exactly that many bytes.
fn copy(
    input: &mut impl BufRead,
    mut left: u64,
    mut sink: impl FnMut(&[u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    while left > 0 {
        let chunk = match input.fill_buf() {
            Ok(chunk) => chunk,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(Error::from_read(e)),
        };
        if chunk.is_empty() {
            return Err(Error::from_read(io::ErrorKind::UnexpectedEof.into()));
        }
        let length = chunk.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        sink(&chunk[..length])?;
        input.consume(length);
        left -= length as u64;
    }
    Ok(())
}

fn skip_padding(input: &mut impl BufRead, size: u64) -> Result<(), Error> {
    copy(input, size.next_multiple_of(512) - size, |_| Ok(()))
}

/// The data of an extended header.
fn read_data(input: &mut impl BufRead, size: u64, limit: u64) -> Result<Vec<u8>, Error> {
    if size > limit {
        let message = format!("an extended header of {size} bytes; {limit} are allowed");
        return Err(Rejection::new(Rule::BudgetName, message).into());
    }
    let mut data = Vec::new();
    copy(input, size, |bytes| {
        data.extend_from_slice(bytes);
        Ok(())
    })?;
    skip_padding(input, size)?;
    Ok(data)
}

/// A GNU long name: one NUL at its end is the form's, any other refuses the name later.
fn long(input: &mut impl BufRead, size: u64) -> Result<Vec<u8>, Error> {
    let mut name = read_data(input, size, MAX_LONG)?;
    if name.last() == Some(&0) {
        name.pop();
    }
    if name.is_empty() {
        return Err(Rejection::new(Rule::Path, "a GNU long name is empty").into());
    }
    Ok(name)
}

/// The next block.
pub fn read_block(input: &mut impl Read) -> Result<Block, Error> {
    let mut block = [0; 512];
    input.read_exact(&mut block).map_err(Error::from_read)?;
    Ok(block)
}

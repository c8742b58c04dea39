//! Applies the layers of an image, each a tar, to one empty directory: the OCI image specification's `layer.md`.
//!
//! Main function: [`apply`]; it needs open files and a directory's fd and nothing else, so it runs in the jail ([`super::helper`]).
//! [`tree`] decides what the image is. While layers are read, contents lie on disk under numbers, in one directory; at the
//! end they get their names. So nothing that a layer says is ever a path on disk before all of them are read, and what a
//! later layer hides or replaces is one file to remove.
//!
//! As container engines have it, and other than in an archive that is an artifact: a member replaces whatever was there (a
//! directory keeps its members if it comes again), a path may lead through the image's own symbolic links, names may
//! begin with a slash, and a hard link may be to a symbolic link or to a file of a layer below.

pub mod tree;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, RenameFlags};
use serde::{Deserialize, Serialize};

use super::ahead::ahead;
use super::beneath::{self, DIRECTORY, confined};
use super::budget::{Budget, Meter};
use super::destination::{FileWriter, Members, link_target};
use super::digest::{Digest, Hasher};
use super::format::{Format, SNIFF, sniff};
use super::path::MemberPath;
use super::rejection::{Error, Rejection, Rule};
use super::{stream, tar, unpack};
use tree::{Content, Kind, NodeId, ROOT, Tree};

/// Most layers: what overlay mounts of container engines allow.
pub const MAX_LAYERS: usize = 127;
/// Begin of the names that hide others.
const WHITEOUT: &str = ".wh.";
/// Begin of names that only aufs had a meaning for.
const AUFS: &str = ".wh..wh.";
/// Hides all that its directory has from below.
const OPAQUE: &str = ".wh..wh..opq";
/// Where contents lie meanwhile.
const STAGING: &str = ".plimsoll-layers";

/// One layer: a part of one of the files that come with the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// Index of the file.
    pub file: usize,
    /// Where the layer begins in it.
    pub offset: u64,
    /// Its bytes there.
    pub length: u64,
    /// Digest of those bytes, which the runner compares; none when it is not known other than by `diff_id`.
    pub sha256: Option<Digest>,
    /// Digest of the tar inside, which is compared once it is read.
    pub diff_id: Digest,
}

/// What to apply and how much of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// From the lowest to the topmost.
    pub layers: Vec<Layer>,
    /// The limits, over all layers: also what a later one hides counts.
    pub budget: Budget,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Applied {
    /// Regular files in the tree, hard links included.
    pub files: u64,
    /// Logical bytes of all files of all layers.
    pub bytes: u64,
}

/// Applies all layers to the empty directory `destination`.
///
/// # Errors
/// [`Error::Rejected`] names layer, member and rule. The destination is then empty again.
pub fn apply(files: &[File], destination: OwnedFd, request: &Request) -> Result<Applied, Error> {
    let kept = destination.try_clone().map_err(|e| Error::failed("duplicate the destination", e))?;
    fill(files, destination, request).map_err(|error| unpack::undo(kept, error))
}

fn fill(files: &[File], destination: OwnedFd, request: &Request) -> Result<Applied, Error> {
    let total = request.layers.iter().fold(0_u64, |sum, layer| sum.saturating_add(layer.length));
    let meter = Meter::new(&request.budget, total);
    let mut image = Image::new(destination, &meter)?;
    for (index, layer) in request.layers.iter().enumerate() {
        let Some(file) = files.get(layer.file) else {
            return Err(Rejection::new(Rule::Missing, format!("layer {index} is in no file")).into());
        };
        image.tree.next_layer();
        one(file, layer, &mut image, &meter).map_err(|error| match error {
            Error::Rejected(mut rejection) => {
                rejection.message = format!("layer {} ({}): {}", index + 1, layer.diff_id, rejection.message);
                Error::Rejected(rejection)
            }
            failed => failed,
        })?;
    }
    let files = image.finish()?;
    Ok(Applied { files, bytes: meter.bytes() })
}

fn one(mut file: &File, layer: &Layer, image: &mut Image<'_>, meter: &Meter) -> Result<(), Error> {
    file.seek(SeekFrom::Start(layer.offset)).map_err(|e| Error::failed("read a layer", e))?;
    let mut input = BufReader::with_capacity(stream::CHUNK, file.take(layer.length));
    let head = input.fill_buf().map_err(Error::from_read)?;
    let format = match sniff(&head[..head.len().min(SNIFF)])? {
        format @ (Format::Tar | Format::TarGz | Format::TarZst | Format::TarXz) => format,
        _ => return Err(Rejection::new(Rule::Format, "it is no tar").into()),
    };
    let decoder = stream::decoder(format, input).map_err(Error::from_read)?;
    let found = std::thread::scope(|scope| match ahead(scope, decoder) {
        Ok(ahead) => members(ahead, image, meter),
        Err(decoder) => members(BufReader::with_capacity(stream::CHUNK, decoder), image, meter),
    })?;
    if found != layer.diff_id {
        return Err(Rejection::new(Rule::Sha256, format!("the sha256 of its tar is {found}")).into());
    }
    Ok(())
}

/// Reads one tar to its end; says the digest of its bytes.
fn members(stream: impl BufRead, image: &mut Image<'_>, meter: &Meter) -> Result<Digest, Error> {
    let mut archive = Hashed { inner: stream::Metered::new(stream, meter), hasher: Hasher::default() };
    tar::unpack(&mut archive, image, meter.budget())?;
    Ok(archive.hasher.finish())
}

/// Hashes what is consumed.
struct Hashed<R> {
    inner: R,
    hasher: Hasher,
}

impl<R: BufRead> BufRead for Hashed<R> {
    fn fill_buf(&mut self) -> std::io::Result<&[u8]> {
        self.inner.fill_buf()
    }

    fn consume(&mut self, amount: usize) {
        // What was shown before is shown again until it is consumed.
        if let Ok(shown) = self.inner.fill_buf() {
            self.hasher.update(&shown[..amount.min(shown.len())]);
        }
        self.inner.consume(amount);
    }
}

impl<R: BufRead> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.fill_buf()?.read(buffer)?;
        self.consume(n);
        Ok(n)
    }
}

/// The image while its layers are applied.
struct Image<'m> {
    root: OwnedFd,
    staging: OwnedFd,
    /// The staging directory's name in the root.
    name: String,
    tree: Tree<'m>,
    meter: &'m Meter,
}

/// What a member's name means.
enum Meaning<'p> {
    Member,
    Hides(&'p str, &'p str),
    HidesAll(&'p str),
    Nothing,
}

fn meaning(path: &MemberPath) -> Result<Meaning<'_>, Rejection> {
    let Some((directory, name)) = path.split() else { return Ok(Meaning::Member) };
    if directory.split('/').any(|component| component.starts_with(AUFS)) {
        return Ok(Meaning::Nothing);
    }
    if directory.split('/').any(|component| component.starts_with(WHITEOUT)) {
        return Err(Rejection::new(Rule::Path, "its path goes through a name that hides another"));
    }
    match name.strip_prefix(WHITEOUT) {
        None => Ok(Meaning::Member),
        Some(_) if name == OPAQUE => Ok(Meaning::HidesAll(directory)),
        Some(_) if name.starts_with(AUFS) => Ok(Meaning::Nothing),
        Some("" | "." | "..") => Err(Rejection::new(Rule::Path, "it would hide no member of its directory")),
        Some(hidden) => Ok(Meaning::Hides(directory, hidden)),
    }
}

impl<'m> Image<'m> {
    fn new(root: OwnedFd, meter: &'m Meter) -> Result<Self, Error> {
        super::inspect::is_empty(root.as_fd())?;
        let staging = directory(root.as_fd(), STAGING)?;
        Ok(Image { root, staging, name: STAGING.to_owned(), tree: Tree::new(meter), meter })
    }

    /// A member, unless its name means something else, which is then done.
    fn is_member(&mut self, path: &MemberPath, size: u64) -> Result<bool, Error> {
        match meaning(path)? {
            Meaning::Member => return Ok(true),
            Meaning::Hides(..) | Meaning::HidesAll(_) if size > 0 => {
                return Err(Rejection::new(Rule::Disagreement, "it hides another member but has content").into());
            }
            Meaning::Hides(directory, name) => self.tree.whiteout(directory, name)?,
            Meaning::HidesAll(directory) => self.tree.opaque(directory)?,
            Meaning::Nothing => {}
        }
        self.meter.member()?;
        self.sweep()?;
        Ok(false)
    }

    /// Removes contents that nothing names any more.
    fn sweep(&mut self) -> Result<(), Error> {
        for Content(number) in self.tree.take_unnamed() {
            rustix::fs::unlinkat(&self.staging, number.to_string(), AtFlags::empty())
                .map_err(|e| Error::failed("remove what a later layer hides", e))?;
        }
        Ok(())
    }

    /// Gives everything its name.
    fn finish(mut self) -> Result<u64, Error> {
        self.rename_staging()?;
        let top = confined(self.root.as_fd(), ".", DIRECTORY, Mode::empty())
            .map_err(|e| Error::failed("open the destination", e))?;
        let mut files = 0;
        let mut levels = vec![(top, self.members(ROOT).into_iter())];
        while let Some((at, todo)) = levels.last_mut() {
            let Some((name, node)) = todo.next() else {
                levels.pop();
                continue;
            };
            match self.tree.kind(node) {
                Kind::Directory(_) => {
                    let below = directory(at.as_fd(), &name)?;
                    levels.push((below, self.members(node).into_iter()));
                }
                Kind::File(content) => {
                    files += 1;
                    self.name(*content, at.as_fd(), &name)?;
                }
                Kind::Symlink(target) => rustix::fs::symlinkat(&**target, at.as_fd(), &*name)
                    .map_err(|e| Error::failed("make a symbolic link", e))?,
            }
        }
        beneath::empty(self.staging.as_fd()).map_err(|e| Error::failed("clear the layers", e))?;
        rustix::fs::unlinkat(&self.root, &*self.name, AtFlags::REMOVEDIR)
            .map_err(|e| Error::failed("clear the layers", e))?;
        Ok(files)
    }

    /// Nothing but it is in the root, and nothing of the image may be in its way.
    fn rename_staging(&mut self) -> Result<(), Error> {
        let taken = |name: &str| matches!(self.tree.kind(ROOT), Kind::Directory(members) if members.contains_key(name));
        if let Some(free) = (0_u32..).map(|n| format!("{STAGING}-{n}")).find(|name| !taken(name))
            && taken(&self.name)
        {
            rustix::fs::renameat_with(&self.root, &*self.name, &self.root, &*free, RenameFlags::NOREPLACE)
                .map_err(|e| Error::failed("rename the directory of the layers", e))?;
            self.name = free;
        }
        Ok(())
    }

    fn members(&self, node: NodeId) -> Vec<(Box<str>, NodeId)> {
        match self.tree.kind(node) {
            Kind::Directory(members) => members.iter().map(|(name, node)| (name.clone(), *node)).collect(),
            _ => Vec::new(),
        }
    }

    fn name(&self, content: Content, at: BorrowedFd<'_>, name: &str) -> Result<(), Error> {
        let number = content.0.to_string();
        let named = if self.tree.names(content) == 1 {
            rustix::fs::renameat_with(&self.staging, &*number, at, name, RenameFlags::NOREPLACE)
        } else {
            rustix::fs::linkat(&self.staging, &*number, at, name, AtFlags::empty())
        };
        named.map_err(|e| Error::failed("give a file its name", e))
    }
}

/// Makes and opens a directory.
fn directory(at: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, Error> {
    let mode = Mode::from_raw_mode(0o777);
    rustix::fs::mkdirat(at, name, mode).map_err(|e| Error::failed("make a directory", e))?;
    let fd = confined(at, name, DIRECTORY, Mode::empty()).map_err(|e| Error::failed("open a directory", e))?;
    rustix::fs::fchmod(&fd, mode).map_err(|e| Error::failed("set a directory's mode", e))?;
    Ok(fd)
}

impl Members for Image<'_> {
    fn spelled<'n>(&self, name: &'n [u8]) -> &'n [u8] {
        match name.iter().position(|&b| b != b'/') {
            Some(begin) => &name[begin..],
            None if name.is_empty() => name,
            None => b".",
        }
    }

    fn directory(&mut self, path: &MemberPath) -> Result<(), Error> {
        if self.is_member(path, 0)? {
            self.tree.directory(path)?;
            self.sweep()?;
        }
        Ok(())
    }

    fn file(&mut self, path: &MemberPath, executable: bool, size: u64) -> Result<FileWriter, Error> {
        let staging = self.staging.try_clone().map_err(|e| Error::failed("duplicate a directory", e))?;
        if !self.is_member(path, size)? {
            return Ok(FileWriter::nowhere(size));
        }
        self.meter.file(size)?;
        let content = self.tree.file(path)?;
        self.sweep()?;
        FileWriter::create(staging.as_fd(), &content.0.to_string(), executable, size)
    }

    fn hardlink(&mut self, path: &MemberPath, target: &MemberPath) -> Result<(), Error> {
        if self.is_member(path, 0)? {
            self.tree.hardlink(path, target)?;
            self.sweep()?;
        }
        Ok(())
    }

    fn symlink(&mut self, path: &MemberPath, target: &[u8]) -> Result<(), Error> {
        let target = link_target(target)?;
        if self.is_member(path, 0)? {
            self.tree.symlink(path, target)?;
            self.sweep()?;
        }
        Ok(())
    }

    fn special(&mut self, _what: &str) -> Result<(), Error> {
        Ok(self.meter.member()?)
    }
}

#[cfg(test)]
pub(crate) mod tests;

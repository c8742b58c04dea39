//! Packs a directory tree into a squashfs image, which is how a microVM gets files: as a read-only disk.
//!
//! Main function: [`pack`]. Nothing is compressed: the image is read once or a few times by one guest, from the host's
//! page cache, so compressing would cost more than it saves on either side. Blocks of zeros take no room.
//!
//! The tree is hostile content, unpacked before and not interpreted here: everything is opened relative to directory
//! fds, beneath the root and without following a link, so a link leads nowhere, whoever changes the tree meanwhile. Regular
//! files, directories and symbolic links are kept, with their permissions (set-id bits are not, since everything belongs to
//! root in the image); devices, FIFOs and sockets are left out, and what this user may not read is there but
//! empty, with no permissions. Times are one constant, so the same tree gives the same bytes.

mod format;

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Dir, FileType, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use crate::artifact::beneath::{confined, entry_kind};
use format::{BLOCK, Child, File as FileInode, Kind, SUPERBLOCK, Tables};

/// Deepest directory; each level above the one that is read holds an fd.
const MAX_DEPTH: usize = 256;
/// Most files, directories and links.
const MAX_MEMBERS: u32 = 4_000_000;
/// What is written at once, bytes.
const BATCH: usize = 8 * BLOCK;
static ZEROS: [u8; BLOCK] = [0; BLOCK];

/// What was packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packed {
    /// Size of the image, bytes: a multiple of 4096.
    pub bytes: u64,
    /// Regular files in it.
    pub files: u64,
    /// Files and directories that this user may not read: empty in the image.
    pub unreadable: u64,
    /// Devices, FIFOs and sockets, which are not in it.
    pub left_out: u64,
}

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// Something can't be read or written.
    #[error("failed to {action} {}", shown(path))]
    Io {
        /// Completes "failed to …".
        action: &'static str,
        /// What; relative to the tree if it is in there.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It became another kind of thing, or shorter, while it was read.
    #[error("{} changed while it was packed", shown(.0))]
    Changed(PathBuf),
    /// Too deep.
    #[error("{} is deeper than {MAX_DEPTH} directories", shown(.0))]
    Deep(PathBuf),
    /// Too many.
    #[error("there are more than {MAX_MEMBERS} files, directories and links")]
    Members,
    /// The tree is neither a directory nor a file.
    #[error("{} is neither a directory nor a file", shown(.0))]
    Kind(PathBuf),
}

fn shown(path: &Path) -> String {
    crate::artifact::rejection::shown(path.as_os_str().as_bytes())
}

/// Packs what is at `tree` (a link there is followed) into a new file `into`, mode 0444. A regular file gives an image whose
/// root holds that one file, under its own name.
///
/// # Errors
/// As [`PackError`] says. What was written is removed.
pub fn pack(tree: &Path, into: &Path) -> Result<Packed, PackError> {
    pack_with(tree, into, 0)
}

/// As [`pack`]; directories and files have those permissions too, beside their own.
///
/// # Errors
/// As [`PackError`] says. What was written is removed.
pub fn pack_with(tree: &Path, into: &Path, also: u16) -> Result<Packed, PackError> {
    let io = |action, path: &Path| {
        let path = path.to_owned();
        move |source| PackError::Io { action, path, source }
    };
    let source = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(tree).map_err(io("open", tree))?;
    let meta = source.metadata().map_err(io("examine", tree))?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o444).open(into).map_err(io("make", into))?;
    let packed = (|| {
        let mut packer = Packer::new(&file, also);
        let root = if meta.is_dir() {
            packer.tree(source.into())?
        } else if meta.is_file() {
            let name = tree.file_name().unwrap_or_default().as_bytes().to_vec();
            packer.single(name, &source, meta.len(), meta.mode())?
        } else {
            return Err(PackError::Kind(tree.to_owned()));
        };
        packer.finish(root)
    })();
    if packed.is_err() {
        let _ = std::fs::remove_file(into);
    }
    packed
}

/// A directory that is being read.
struct Level {
    fd: OwnedFd,
    name: Vec<u8>,
    mode: u16,
    number: u32,
    todo: std::vec::IntoIter<(Vec<u8>, FileType)>,
    children: Vec<Child>,
}

struct Packer<'f> {
    file: &'f File,
    /// Permissions that everything gets.
    also: u16,
    /// Bytes of data that are not written yet, how many they are, and where they go.
    batch: Vec<u8>,
    held: usize,
    position: u64,
    tables: Tables,
    /// Inodes used, the root included.
    members: u32,
    /// Content of files that have several names.
    linked: HashMap<(u64, u64), FileInode>,
    packed: Packed,
}

impl<'f> Packer<'f> {
    fn new(file: &'f File, also: u16) -> Self {
        Packer {
            file,
            also,
            batch: vec![0; BATCH],
            held: 0,
            position: SUPERBLOCK,
            tables: Tables::default(),
            members: 0,
            linked: HashMap::new(),
            packed: Packed { bytes: 0, files: 0, unreadable: 0, left_out: 0 },
        }
    }

    fn mode(&self, mode: u32) -> u16 {
        permissions(mode) | self.also
    }

    fn number(&mut self) -> Result<u32, PackError> {
        if self.members == MAX_MEMBERS {
            return Err(PackError::Members);
        }
        self.members += 1;
        Ok(self.members)
    }

    /// Packs a directory with everything below; returns the root's inode.
    fn tree(&mut self, root: OwnedFd) -> Result<Child, PackError> {
        let stat = rustix::fs::fstat(&root).map_err(|e| fault("examine", &[], b"", e))?;
        let number = self.number()?;
        let todo = names(root.as_fd()).map_err(|e| fault("list", &[], b"", e))?;
        let mut levels = vec![Level {
            fd: root,
            name: Vec::new(),
            mode: self.mode(stat.st_mode),
            number,
            todo: todo.into_iter(),
            children: Vec::new(),
        }];
        loop {
            let Some(level) = levels.last_mut() else { return Err(PackError::Members) };
            let Some((name, kind)) = level.todo.next() else {
                let Some(done) = levels.pop() else { return Err(PackError::Members) };
                // The root's parent is a number that no inode has.
                let parent = levels.last().map_or(self.members + 1, |above| above.number);
                let inode = self.tables.directory(done.number, parent, done.mode, &done.children);
                let child = Child { name: done.name, inode, number: done.number, kind: Kind::Directory };
                match levels.last_mut() {
                    Some(above) => above.children.push(child),
                    None => return Ok(child),
                }
                continue;
            };
            if let Some(below) = self.member(&levels, name, kind)? {
                match below {
                    Member::Below(level) => levels.push(level),
                    Member::Done(child) => {
                        if let Some(level) = levels.last_mut() {
                            level.children.push(child);
                        }
                    }
                }
            }
        }
    }

    /// Packs one member; a directory is returned to be walked.
    fn member(&mut self, levels: &[Level], name: Vec<u8>, kind: FileType) -> Result<Option<Member>, PackError> {
        let Some(level) = levels.last() else { return Ok(None) };
        let at = level.fd.as_fd();
        let fail = |action, e| fault(action, levels, &name, e);
        match kind {
            FileType::Directory => {
                if levels.len() >= MAX_DEPTH {
                    return Err(PackError::Deep(path(levels, &name)));
                }
                let number = self.number()?;
                let opened = open(at, &name, OFlags::DIRECTORY).and_then(|fd| {
                    let todo = names(fd.as_fd())?;
                    let mode = rustix::fs::fstat(&fd)?.st_mode;
                    Ok((fd, todo, self.mode(mode)))
                });
                match opened {
                    Ok((fd, todo, mode)) => {
                        let (todo, children) = (todo.into_iter(), Vec::new());
                        Ok(Some(Member::Below(Level { fd, name, mode, number, todo, children })))
                    }
                    Err(Errno::ACCESS | Errno::PERM) => {
                        self.packed.unreadable += 1;
                        let inode = self.tables.directory(number, level.number, 0, &[]);
                        Ok(Some(Member::Done(Child { name, inode, number, kind: Kind::Directory })))
                    }
                    Err(e) => Err(fail("open", e)),
                }
            }
            FileType::RegularFile => {
                let (content, mode) = match open(at, &name, OFlags::NONBLOCK) {
                    Ok(fd) => {
                        let stat = rustix::fs::fstat(&fd).map_err(|e| fail("examine", e))?;
                        if !FileType::from_raw_mode(stat.st_mode).is_file() {
                            return Err(PackError::Changed(path(levels, &name)));
                        }
                        let size = u64::try_from(stat.st_size).unwrap_or(0);
                        let key = (stat.st_dev, stat.st_ino);
                        let content = match self.linked.get(&key) {
                            Some(known) => known.clone(),
                            None => self.content(&File::from(fd), size).map_err(|e| match e.kind() {
                                io::ErrorKind::UnexpectedEof => PackError::Changed(path(levels, &name)),
                                _ => PackError::Io { action: "pack", path: path(levels, &name), source: e },
                            })?,
                        };
                        if stat.st_nlink > 1 {
                            self.linked.insert(key, content.clone());
                        }
                        (content, self.mode(stat.st_mode))
                    }
                    Err(Errno::ACCESS | Errno::PERM) => {
                        self.packed.unreadable += 1;
                        (FileInode::default(), 0)
                    }
                    Err(e) => return Err(fail("open", e)),
                };
                let number = self.number()?;
                self.packed.files += 1;
                let inode = self.tables.file(number, mode, &content);
                Ok(Some(Member::Done(Child { name, inode, number, kind: Kind::File })))
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(at, &*name, Vec::new()).map_err(|e| fail("read", e))?;
                let number = self.number()?;
                let inode = self.tables.symlink(number, target.to_bytes());
                Ok(Some(Member::Done(Child { name, inode, number, kind: Kind::Symlink })))
            }
            _ => {
                self.packed.left_out += 1;
                Ok(None)
            }
        }
    }

    /// Packs one file into a root of its own.
    fn single(&mut self, name: Vec<u8>, file: &File, size: u64, mode: u32) -> Result<Child, PackError> {
        let (root, number) = (self.number()?, self.number()?);
        let content = self.content(file, size).map_err(|source| PackError::Io {
            action: "pack",
            path: path(&[], &name),
            source,
        })?;
        self.packed.files += 1;
        let inode = self.tables.file(number, self.mode(mode), &content);
        let child = Child { name, inode, number, kind: Kind::File };
        let inode = self.tables.directory(root, self.members + 1, 0o755, &[child]);
        Ok(Child { name: Vec::new(), inode, number: root, kind: Kind::Directory })
    }

    /// Writes a file's blocks.
    fn content(&mut self, mut file: &File, size: u64) -> io::Result<FileInode> {
        let mut content = FileInode { start: self.position + self.held as u64, size, blocks: Vec::new() };
        let mut at = 0;
        // Where the file is known to have data next.
        let mut data = 0;
        while at < size {
            let length = usize::try_from(size - at).unwrap_or(BLOCK).min(BLOCK);
            let end = at + length as u64;
            if size > BLOCK as u64 && data <= at {
                data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
                    Ok(data) => data,
                    Err(Errno::NXIO) if file.metadata()?.len() >= size => size,
                    // Not every file system knows its holes; every one has its position where it was.
                    Err(_) => at,
                };
                rustix::fs::seek(file, SeekFrom::Start(at))?;
            }
            if data >= end {
                rustix::fs::seek(file, SeekFrom::Start(end))?;
                content.blocks.push(0);
                at = end;
                continue;
            }
            if self.held + length > self.batch.len() {
                self.flush()?;
            }
            let block = &mut self.batch[self.held..self.held + length];
            file.read_exact(block)?;
            if *block == ZEROS[..length] {
                content.blocks.push(0);
            } else {
                content.blocks.push(format::stored(length));
                self.held += length;
            }
            at = end;
        }
        Ok(content)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.batch[..self.held], self.position)?;
        self.position += self.held as u64;
        self.held = 0;
        Ok(())
    }

    fn finish(mut self, root: Child) -> Result<Packed, PackError> {
        let mut write = || -> io::Result<u64> {
            self.flush()?;
            let (tail, superblock, bytes) = self.tables.finish(self.position, root.inode, self.members);
            self.file.write_all_at(&tail, self.position)?;
            self.file.write_all_at(&superblock, 0)?;
            Ok(bytes)
        };
        let bytes = write().map_err(|source| PackError::Io { action: "write", path: "the image".into(), source })?;
        Ok(Packed { bytes, ..self.packed })
    }
}

enum Member {
    Below(Level),
    Done(Child),
}

fn permissions(mode: u32) -> u16 {
    (mode & 0o1777) as u16
}

/// For messages only.
fn path(levels: &[Level], name: &[u8]) -> PathBuf {
    let names = levels.iter().skip(1).map(|level| &*level.name).chain([name]);
    names.map(std::ffi::OsStr::from_bytes).collect()
}

fn fault(action: &'static str, levels: &[Level], name: &[u8], e: Errno) -> PackError {
    match e {
        Errno::NOENT | Errno::LOOP | Errno::NOTDIR => PackError::Changed(path(levels, name)),
        e => PackError::Io { action, path: path(levels, name), source: e.into() },
    }
}

fn open(at: BorrowedFd<'_>, name: &[u8], flags: OFlags) -> rustix::io::Result<OwnedFd> {
    confined(at, name, flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// Names and kinds in a directory, in the order that squashfs wants: that of their bytes.
fn names(directory: BorrowedFd<'_>) -> rustix::io::Result<Vec<(Vec<u8>, FileType)>> {
    let mut names = Vec::new();
    for entry in Dir::new(open(directory, b".", OFlags::DIRECTORY)?)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        names.push((name.to_bytes().to_vec(), entry_kind(directory, &entry)?));
    }
    names.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    Ok(names)
}

#[cfg(test)]
mod tests;

//! The tables of a squashfs image, version 4.0 (the kernel's `fs/squashfs/squashfs_fs.h` and
//! `Documentation/filesystems/squashfs.rst`).
//!
//! Main type: [`Tables`]. An image is a superblock, the files' blocks, then the tables of inodes, directories and owners. A table
//! is a row of metadata blocks of 8 KiB, each behind a two-byte header; a place in it is the offset of such a block and one
//! within it. Nothing is compressed, which flags say and each header repeats; the compressor that has to be named
//! all the same is zlib, which every kernel with squashfs has. There are no fragments, attributes or export table.

/// Size of a data block, bytes, and its logarithm.
pub const BLOCK: usize = 1 << BLOCK_LOG;
const BLOCK_LOG: u16 = 17;
/// Size of the superblock, bytes.
pub const SUPERBLOCK: u64 = 96;
/// Size of a metadata block, bytes, without its header.
const METADATA: usize = 8192;
/// Set in the size of a data block that is not compressed, and in a metadata block's header.
const STORED: u32 = 1 << 24;
const STORED_METADATA: u16 = 1 << 15;
/// Inodes, data, fragments and owners not compressed; no fragments; no extended attributes.
const FLAGS: u16 = 0x0001 | 0x0002 | 0x0008 | 0x0010 | 0x0200 | 0x0800;
const ZLIB: u16 = 1;
/// Of everything: 2 January 1980. Before 1980 some archivers refuse a file.
const TIME: u32 = 315_619_200;
const NONE: u32 = u32::MAX;
const NO_TABLE: u64 = u64::MAX;
/// Most entries under one header of a directory.
const RUN: usize = 256;
/// A directory's size is said to be this much larger: room for `.` and `..` that nobody stores.
const DOTS: usize = 3;

/// What a directory's entry says about its inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A directory.
    Directory = 1,
    /// A regular file.
    File = 2,
    /// A symbolic link.
    Symlink = 3,
}

/// An entry of a directory.
#[derive(Debug)]
pub struct Child {
    /// One to 255 bytes.
    pub name: Vec<u8>,
    /// Where its inode is.
    pub inode: Place,
    /// The inode's number.
    pub number: u32,
    /// What it is.
    pub kind: Kind,
}

/// Content of a regular file.
#[derive(Debug, Clone, Default)]
pub struct File {
    /// Where its blocks begin in the image.
    pub start: u64,
    /// Logical bytes.
    pub size: u64,
    /// For each block its size with a flag, or 0 for zeros ([`stored`]).
    pub blocks: Vec<u32>,
}

/// What stands for a block that is stored as it is.
pub const fn stored(length: usize) -> u32 {
    length as u32 | STORED
}

/// A place in a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    block: u32,
    offset: u16,
}

/// Inodes and directories, in the order in which they come.
#[derive(Debug, Default)]
pub struct Tables {
    inodes: Vec<u8>,
    directories: Vec<u8>,
}

/// Where the next byte of a table will be.
fn place(table: &[u8]) -> Place {
    let blocks = table.len() / METADATA * (METADATA + 2);
    Place { block: blocks as u32, offset: (table.len() % METADATA) as u16 }
}

fn put16(to: &mut Vec<u8>, value: u16) {
    to.extend_from_slice(&value.to_le_bytes());
}

fn put32(to: &mut Vec<u8>, value: u32) {
    to.extend_from_slice(&value.to_le_bytes());
}

fn put64(to: &mut Vec<u8>, value: u64) {
    to.extend_from_slice(&value.to_le_bytes());
}

impl Tables {
    /// Begins an inode. Extended ones have a type of 7 more.
    fn inode(&mut self, kind: u16, mode: u16, number: u32) -> Place {
        let place = place(&self.inodes);
        let to = &mut self.inodes;
        put16(to, kind);
        put16(to, mode);
        // Indices into the table of owners, which holds only root.
        put16(to, 0);
        put16(to, 0);
        put32(to, TIME);
        put32(to, number);
        place
    }

    /// Adds a regular file.
    pub fn file(&mut self, number: u32, mode: u16, file: &File) -> Place {
        let place = match (u32::try_from(file.start), u32::try_from(file.size)) {
            (Ok(start), Ok(size)) => {
                let place = self.inode(Kind::File as u16, mode, number);
                for value in [start, NONE, 0, size] {
                    put32(&mut self.inodes, value);
                }
                place
            }
            _ => {
                let place = self.inode(Kind::File as u16 + 7, mode, number);
                let sparse = file.blocks.iter().filter(|&&b| b == 0).count() as u64 * BLOCK as u64;
                for value in [file.start, file.size, sparse.min(file.size)] {
                    put64(&mut self.inodes, value);
                }
                // One name, no fragment, no attributes.
                for value in [1, NONE, 0, NONE] {
                    put32(&mut self.inodes, value);
                }
                place
            }
        };
        for block in &file.blocks {
            put32(&mut self.inodes, *block);
        }
        place
    }

    /// Adds a symbolic link.
    pub fn symlink(&mut self, number: u32, target: &[u8]) -> Place {
        let place = self.inode(Kind::Symlink as u16, 0o777, number);
        put32(&mut self.inodes, 1);
        put32(&mut self.inodes, target.len() as u32);
        self.inodes.extend_from_slice(target);
        place
    }

    /// Adds a directory of these children, which are in the order of their names' bytes.
    pub fn directory(&mut self, number: u32, parent: u32, mode: u16, children: &[Child]) -> Place {
        let start = place(&self.directories);
        let begin = self.directories.len();
        let mut index = Index::default();
        let mut rest = children;
        while let Some(first) = rest.first() {
            let here = place(&self.directories);
            index.header(here, start, self.directories.len() - begin, &first.name);
            // Entries of one header have their inodes in one block, and numbers near the first one's; and a header of
            // its own at each metadata block lets lookups skip to it.
            let mut bytes = 0;
            let fits = |child: &&Child| {
                let difference = i64::from(child.number) - i64::from(first.number);
                let room = usize::from(here.offset) + bytes < METADATA;
                bytes += 8 + child.name.len();
                child.inode.block == first.inode.block && i16::try_from(difference).is_ok() && room
            };
            let run = rest.iter().take(RUN).take_while(fits).count();
            let to = &mut self.directories;
            put32(to, run as u32 - 1);
            put32(to, first.inode.block);
            put32(to, first.number);
            for child in &rest[..run] {
                put16(to, child.inode.offset);
                put16(to, child.number.wrapping_sub(first.number) as u16);
                put16(to, child.kind as u16);
                put16(to, child.name.len() as u16 - 1);
                to.extend_from_slice(&child.name);
            }
            rest = &rest[run..];
        }
        let size = self.directories.len() - begin + DOTS;
        let links = 2 + children.iter().filter(|c| c.kind == Kind::Directory).count() as u32;
        match u16::try_from(size) {
            Ok(size) if index.count == 0 => {
                let place = self.inode(Kind::Directory as u16, mode, number);
                put32(&mut self.inodes, start.block);
                put32(&mut self.inodes, links);
                put16(&mut self.inodes, size);
                put16(&mut self.inodes, start.offset);
                put32(&mut self.inodes, parent);
                place
            }
            _ => {
                let place = self.inode(Kind::Directory as u16 + 7, mode, number);
                for value in [links, size as u32, start.block, parent] {
                    put32(&mut self.inodes, value);
                }
                put16(&mut self.inodes, index.count);
                put16(&mut self.inodes, start.offset);
                put32(&mut self.inodes, NONE);
                self.inodes.extend_from_slice(&index.bytes);
                place
            }
        }
    }

    /// What follows the data, which ends at `at`; the superblock; and the image's size.
    pub fn finish(&self, at: u64, root: Place, members: u32) -> (Vec<u8>, Vec<u8>, u64) {
        let mut tail = Vec::with_capacity(self.inodes.len() + self.directories.len() + 8192);
        let inodes = at;
        metadata(&self.inodes, &mut tail);
        let directories = at + tail.len() as u64;
        metadata(&self.directories, &mut tail);
        let owners = at + tail.len() as u64;
        metadata(&0_u32.to_le_bytes(), &mut tail);
        let owners_index = at + tail.len() as u64;
        put64(&mut tail, owners);
        let used = at + tail.len() as u64;
        let bytes = used.next_multiple_of(4096);
        tail.resize((bytes - at) as usize, 0);

        let mut head = Vec::with_capacity(SUPERBLOCK as usize);
        head.extend_from_slice(b"hsqs");
        for value in [members, TIME, BLOCK as u32, 0] {
            put32(&mut head, value);
        }
        for value in [ZLIB, BLOCK_LOG, FLAGS, 1, 4, 0] {
            put16(&mut head, value);
        }
        put64(&mut head, u64::from(root.block) << 16 | u64::from(root.offset));
        for value in [used, owners_index, NO_TABLE, inodes, directories, NO_TABLE, NO_TABLE] {
            put64(&mut head, value);
        }
        (tail, head, bytes)
    }
}

/// A table as it stands in the image.
fn metadata(table: &[u8], to: &mut Vec<u8>) {
    for block in table.chunks(METADATA) {
        put16(to, block.len() as u16 | STORED_METADATA);
        to.extend_from_slice(block);
    }
}

/// For a directory of several metadata blocks: where to begin looking for a name.
#[derive(Debug, Default)]
struct Index {
    bytes: Vec<u8>,
    count: u16,
    last: u32,
}

impl Index {
    /// Notes a header that is the first in its metadata block, other than the first of all.
    fn header(&mut self, here: Place, start: Place, offset: usize, name: &[u8]) {
        if self.count == 0 && self.last == 0 {
            self.last = start.block;
        }
        if here.block == self.last || self.count == u16::MAX {
            return;
        }
        self.last = here.block;
        self.count += 1;
        put32(&mut self.bytes, offset as u32);
        put32(&mut self.bytes, here.block);
        put32(&mut self.bytes, name.len() as u32 - 1);
        self.bytes.extend_from_slice(name);
    }
}

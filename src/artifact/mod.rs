//! Brings an artifact into a directory of our own: the files that a step will run.
//!
//! An artifact is a directory, an archive (zip, tar, tar.gz, tar.zst, tar.xz; a zip that holds exactly one tar is
//! unpacked through, deeper nesting is left alone) or a single file that is none of these, such as a WebAssembly
//! module or a script: a tree of that one file. What it is, its bytes say ([`format`]).
//!
//! Whoever made it is not trusted with anything. In the order of the flow:
//!
//! 0. [`fetch`] downloads one that a forge keeps.
//! 1. [`acquire`] opens the path once and decides by what is open.
//! 2. [`helper`] starts a process that jails itself and unpacks there ([`unpack`](mod@unpack)); [`directory`] copies
//!    directories, which nothing parses.
//! 3. [`tar`] and [`zip`] read the archive, [`stream`] decompresses, [`digest`] hashes what is read, [`budget`] counts.
//! 4. [`path`] makes checked names of bytes, [`tree`] knows what is there already, and [`destination`] alone writes,
//!    confined by the kernel ([`beneath`]).
//!    Where the members of a tar go is the caller's: [`layers`] lays the layers of an image over each other.
//! 5. [`inspect`] looks at the finished tree from outside.
//!
//! A refusal names the member and the [`Rule`], and leaves nothing in the destination, nor outside of it ever. Refused
//! rather than guessed is also whatever two ordinary readers would understand differently.

pub mod acquire;
mod ahead;
pub mod beneath;
pub mod budget;
pub mod destination;
pub mod digest;
pub mod directory;
pub mod fetch;
pub mod format;
pub mod helper;
pub mod inspect;
pub mod layers;
pub mod path;
pub mod rejection;
pub mod stream;
pub mod tar;
pub mod tree;
pub mod unpack;
pub mod zip;

pub use acquire::{Acquire, acquire};
pub use budget::Budget;
pub use digest::Digest;
pub use directory::FileId;
pub use format::Format;
pub use rejection::{Error, Rejection, Rule};
pub use tree::Purpose;
pub use unpack::{Request, Summary, unpack};

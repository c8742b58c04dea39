//! SHA-256 digests of artifacts: of a file's bytes, and of a directory's content.
//!
//! Main types: [`Digest`], [`Source`] (hashes an input while it is read, once and in order) and [`TreeDigest`].

use std::io::{self, Read, Seek, SeekFrom};

use sha2::{Digest as _, Sha256};

pub use crate::spec::Sha256Digest as Digest;

/// An input that is hashed as it is consumed from its beginning, so that the digest is of the very bytes that
/// were unpacked. Readers may [look elsewhere](Source::look) first; that isn't hashed.
#[derive(Debug)]
pub struct Source<R> {
    inner: R,
    length: u64,
    position: u64,
    hasher: Sha256,
}

impl<R: Read + Seek> Source<R> {
    /// Takes an input, at its beginning.
    pub fn new(mut inner: R) -> io::Result<Self> {
        let length = inner.seek(SeekFrom::End(0))?;
        inner.rewind()?;
        Ok(Source { inner, length, position: 0, hasher: Sha256::new() })
    }

    /// Reads up to that many bytes at an offset without hashing and without moving the position.
    pub fn look(&mut self, offset: u64, bytes: usize) -> io::Result<Vec<u8>> {
        self.inner.seek(SeekFrom::Start(offset))?;
        let mut found = Vec::new();
        let read = (&mut self.inner).take(bytes as u64).read_to_end(&mut found).map(|_| ());
        self.inner.seek(SeekFrom::Start(self.position))?;
        read.map(|()| found)
    }

    /// A reader of the input from an offset that doesn't hash; call [`Source::resume`] afterwards.
    pub fn unhashed(&mut self, offset: u64) -> io::Result<&mut R> {
        self.inner.seek(SeekFrom::Start(offset))?;
        Ok(&mut self.inner)
    }

    /// Goes back to where hashing stopped.
    pub fn resume(&mut self) -> io::Result<()> {
        self.inner.seek(SeekFrom::Start(self.position)).map(|_| ())
    }

    /// The digest of the whole input and its bytes: reads and hashes what is left.
    pub fn finish(mut self) -> io::Result<(Digest, u64)> {
        io::copy(&mut self, &mut io::sink())?;
        Ok((Digest::from_bytes(self.hasher.finalize().into()), self.position))
    }
}

impl<R: Read> Read for Source<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..n]);
        self.position += n as u64;
        Ok(n)
    }
}

impl<R> Source<R> {
    /// Bytes in total, as at the beginning.
    pub fn length(&self) -> u64 {
        self.length
    }
}

/// What a directory artifact holds, as one digest that doesn't depend on the order of reading, on owners, times or
/// modes beyond the execute bit.
///
/// It is the SHA-256 of `plimsoll-tree-v1\n` and then, in bytewise order of the paths, one record for each member:
/// `KIND EXEC SIZE SHA256 PATH\0`, where KIND is `f`, `d` or `l`; EXEC is `1` for a file with an execute bit, else
/// `0`; SIZE and SHA256 (hex) are of the file's content or the link's target, `0` and `-` for directories; PATH is
/// relative, its components joined by `/`.
#[derive(Debug, Default)]
pub struct TreeDigest {
    records: Vec<(String, String)>,
}

impl TreeDigest {
    /// A directory.
    pub fn directory(&mut self, path: &str) {
        self.records.push((path.to_owned(), "d 0 0 -".to_owned()));
    }

    /// A regular file with the digest of its content.
    pub fn file(&mut self, path: &str, executable: bool, size: u64, digest: Digest) {
        self.records.push((path.to_owned(), format!("f {} {size} {digest}", u8::from(executable))));
    }

    /// A symbolic link.
    pub fn symlink(&mut self, path: &str, target: &str) {
        let digest = Digest::of(target.as_bytes());
        self.records.push((path.to_owned(), format!("l 0 {} {digest}", target.len())));
    }

    /// The digest of all of them.
    pub fn finish(mut self) -> Digest {
        self.records.sort();
        let mut hasher = Sha256::new();
        hasher.update(b"plimsoll-tree-v1\n");
        for (path, facts) in &self.records {
            hasher.update(facts);
            hasher.update(b" ");
            hasher.update(path);
            hasher.update(b"\0");
        }
        Digest::from_bytes(hasher.finalize().into())
    }
}

/// Hashes a stream piece by piece; for callers that have no reader.
#[derive(Debug, Default)]
pub struct Hasher(Sha256);

impl Hasher {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest so far.
    pub fn finish(self) -> Digest {
        Digest::from_bytes(self.0.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn looking_elsewhere_changes_no_digest() {
        let mut source = Source::new(io::Cursor::new(b"abc".to_vec())).unwrap();
        assert_eq!(source.length(), 3);
        assert_eq!(source.look(1, 99).unwrap(), b"bc");
        let mut one = [0; 1];
        source.read_exact(&mut one).unwrap();
        assert_eq!(source.look(0, 2).unwrap(), b"ab");
        assert_eq!(source.finish().unwrap().0.to_string(), ABC);
    }

    #[test]
    fn a_tree_digest_ignores_order_and_sees_every_fact() {
        let digest = |change: fn(&mut TreeDigest)| {
            let mut tree = TreeDigest::default();
            change(&mut tree);
            tree.finish()
        };
        let base = digest(|t| {
            t.directory("d");
            t.file("d/x", false, 1, Digest::of(b"a"));
        });
        let turned = digest(|t| {
            t.file("d/x", false, 1, Digest::of(b"a"));
            t.directory("d");
        });
        assert_eq!(base, turned);
        let others: [fn(&mut TreeDigest); 4] = [
            |t| t.file("d/x", false, 1, Digest::of(b"a")),
            |t| {
                t.directory("d");
                t.file("d/x", true, 1, Digest::of(b"a"));
            },
            |t| {
                t.directory("d");
                t.file("d/y", false, 1, Digest::of(b"a"));
            },
            |t| {
                t.directory("d");
                t.symlink("d/x", "a");
            },
        ];
        for other in others {
            assert_ne!(digest(other), base);
        }
    }
}

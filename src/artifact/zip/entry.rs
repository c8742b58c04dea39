//! One member of a zip: its local header compared with the central directory, its data decoded and its checksum
//! verified, its data descriptor compared.
//!
//! Main type: [`EntryReader`]. It reads its part of the input from the first byte to the last, and an entry that
//! leaves a byte over or runs beyond its end is refused.

use std::io::{self, BufRead, Read};

use flate2::{Crc, Decompress, FlushDecompress, Status};
use zstd::stream::raw::{Decoder, InBuffer, Operation, OutBuffer};

use super::central::{Entry, Zip64};
use super::{disagree, u16_at, u32_at, u64_at};
use crate::artifact::budget::Meter;
use crate::artifact::rejection::{Error, Rejection, Rule};
use crate::artifact::stream::CHUNK;

/// Bit 3: figures are zero in the local header and follow the data (APPNOTE 4.4.4).
const DESCRIPTOR: u16 = 1 << 3;

/// Flags that both headers must agree in: encryption, descriptor, patches, strong encryption, UTF-8, masking.
const COMPARED: u16 = 1 | DESCRIPTOR | 1 << 5 | 1 << 6 | 1 << 11 | 1 << 13;

/// What is reused from entry to entry.
pub struct Buffers {
    inflate: Decompress,
    output: Vec<u8>,
}

impl Default for Buffers {
    fn default() -> Self {
        Buffers { inflate: Decompress::new(false), output: vec![0; CHUNK] }
    }
}

enum Codec<'b> {
    Stored,
    Deflate(&'b mut Decompress),
    Zstd(Box<Decoder<'static>>),
}

/// Reads one member.
pub struct EntryReader<'a, R> {
    input: &'a mut R,
    entry: &'a Entry,
    codec: Codec<'a>,
    output: &'a mut Vec<u8>,
    meter: &'a Meter,
    crc: Crc,
    /// Compressed bytes not read yet.
    left: u64,
    /// The decoder has said that its stream is complete.
    ended: bool,
    produced: u64,
    /// Bytes between the data and the next entry.
    behind: u64,
    /// Whether the local header has the real figures, so that a descriptor may be absent.
    complete: bool,
}

impl<'a, R: BufRead> EntryReader<'a, R> {
    /// Reads the local header at the input's position and checks it against the entry; `end` is where the next
    /// entry or the central directory begins.
    pub fn open(
        input: &'a mut R,
        entry: &'a Entry,
        end: u64,
        buffers: &'a mut Buffers,
        meter: &'a Meter,
    ) -> Result<Self, Error> {
        let mut fixed = [0; 30];
        input.read_exact(&mut fixed).map_err(Error::from_read)?;
        if &fixed[..4] != b"PK\x03\x04" {
            return Err(disagree("the central directory says that it begins where no local header is").into());
        }
        let mut variable = vec![0; usize::from(u16_at(&fixed, 26)) + usize::from(u16_at(&fixed, 28))];
        input.read_exact(&mut variable).map_err(Error::from_read)?;
        let (name, extra) = variable.split_at(usize::from(u16_at(&fixed, 26)));
        let complete = compare(&fixed, name, extra, entry)?;
        let begin = entry.offset + 30 + variable.len() as u64;
        let Some(behind) = end.checked_sub(begin).and_then(|room| room.checked_sub(entry.compressed)) else {
            return Err(Rejection::new(Rule::Overlap, "it runs into what comes after it").into());
        };
        let codec = match entry.method {
            0 if entry.size != entry.compressed => {
                return Err(disagree("it is stored, but its two sizes differ").into());
            }
            0 => Codec::Stored,
            8 => {
                buffers.inflate.reset(false);
                Codec::Deflate(&mut buffers.inflate)
            }
            93 => Codec::Zstd(Box::new(Decoder::new().map_err(|e| Error::failed("start a decoder", e))?)),
            method => return Err(unsupported(method).into()),
        };
        let left = entry.compressed;
        let output = &mut buffers.output;
        Ok(EntryReader {
            input,
            entry,
            codec,
            output,
            meter,
            crc: Crc::new(),
            left,
            ended: false,
            produced: 0,
            behind,
            complete,
        })
    }

    /// Hands all data on in pieces, which must be as long together as the entry says.
    pub fn copy(&mut self, mut sink: impl FnMut(&[u8]) -> Result<(), Error>) -> Result<(), Error> {
        let mut output = std::mem::take(self.output);
        let done = loop {
            match self.read(&mut output) {
                Ok(0) if self.produced != self.entry.size => {
                    let message = format!("it holds {} bytes, not the {} it says", self.produced, self.entry.size);
                    break Err(disagree(message).into());
                }
                Ok(0) => break Ok(()),
                Ok(n) => {
                    if let Err(e) = sink(&output[..n]) {
                        break Err(e);
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => break Err(Error::from_read(e)),
            }
        };
        *self.output = output;
        done
    }

    /// Reads what is left, then checks checksum and descriptor. The input is then at the next entry.
    pub fn finish(mut self) -> Result<(), Error> {
        self.copy(|_| Ok(()))?;
        if self.left > 0 {
            return Err(disagree("compressed data follows the end of its stream").into());
        }
        if self.crc.sum() != self.entry.crc {
            return Err(Rejection::new(Rule::Corrupt, "its checksum is wrong").into());
        }
        self.descriptor()
    }

    /// The descriptor may have a signature or not, and 32-bit or 64-bit sizes; the room it has tells which.
    fn descriptor(self) -> Result<(), Error> {
        let wanted = self.entry.flags & DESCRIPTOR != 0;
        if self.behind == 0 && (!wanted || self.complete) {
            return Ok(());
        }
        let mut bytes = [0; 24];
        let room = match self.behind {
            room @ (12 | 16 | 20 | 24) if wanted => &mut bytes[..room as usize],
            room => {
                let message = format!("{room} bytes after it belong to no entry");
                return Err(Rejection::new(Rule::TrailingData, message).into());
            }
        };
        self.input.read_exact(room).map_err(Error::from_read)?;
        let figures = match room.len() {
            16 | 24 => {
                room.strip_prefix(b"PK\x07\x08").ok_or_else(|| disagree("what follows it is no data descriptor"))?
            }
            _ => room,
        };
        let sizes = match figures.len() {
            12 => [u32_at(figures, 4).into(), u32_at(figures, 8).into()],
            _ => [u64_at(figures, 4), u64_at(figures, 12)],
        };
        if u32_at(figures, 0) != self.entry.crc || sizes != [self.entry.compressed, self.entry.size] {
            return Err(disagree("its data descriptor contradicts the central directory").into());
        }
        Ok(())
    }

    fn decode(&mut self, output: &mut [u8]) -> io::Result<usize> {
        if output.is_empty() {
            return Ok(0);
        }
        loop {
            if self.ended || (self.left == 0 && matches!(self.codec, Codec::Stored)) {
                return Ok(0);
            }
            let chunk = if self.left == 0 { &[][..] } else { self.input.fill_buf()? };
            if chunk.is_empty() && self.left > 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let chunk = &chunk[..chunk.len().min(usize::try_from(self.left).unwrap_or(usize::MAX))];
            let (read, written) = match &mut self.codec {
                Codec::Stored => {
                    let length = chunk.len().min(output.len());
                    output[..length].copy_from_slice(&chunk[..length]);
                    (length, length)
                }
                Codec::Deflate(inflate) => {
                    let (before_in, before_out) = (inflate.total_in(), inflate.total_out());
                    let status = inflate.decompress(chunk, output, FlushDecompress::None).map_err(io::Error::other)?;
                    self.ended = status == Status::StreamEnd;
                    ((inflate.total_in() - before_in) as usize, (inflate.total_out() - before_out) as usize)
                }
                Codec::Zstd(decoder) => {
                    let mut from = InBuffer::around(chunk);
                    let mut to = OutBuffer::around(&mut *output);
                    let hint = decoder.run(&mut from, &mut to)?;
                    // 0 says that a frame is complete and flushed; another may follow.
                    self.ended = hint == 0 && from.pos() as u64 == self.left;
                    (from.pos(), to.pos())
                }
            };
            self.input.consume(read);
            self.left -= read as u64;
            if written > 0 || self.ended {
                return Ok(written);
            }
            if read == 0 {
                // No progress: the decoder wants more than the entry has.
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

impl<R: BufRead> Read for EntryReader<'_, R> {
    fn read(&mut self, output: &mut [u8]) -> io::Result<usize> {
        let n = self.decode(output)?;
        self.produced += n as u64;
        if self.produced > self.entry.size {
            let message = format!("it holds more than the {} bytes that it says", self.entry.size);
            return Err(disagree(message).into());
        }
        self.meter.decoded(n as u64)?;
        self.crc.update(&output[..n]);
        Ok(n)
    }
}

/// Compares the two headers. True when the local one has the real figures.
fn compare(fixed: &[u8; 30], name: &[u8], extra: &[u8], entry: &Entry) -> Result<bool, Rejection> {
    let contradicts =
        |what: &str| Err(disagree(format!("its local header and the central directory give different {what}")));
    if name != entry.name {
        return contradicts("names");
    }
    if u16_at(fixed, 8) != entry.method {
        return contradicts("compression methods");
    }
    let flags = u16_at(fixed, 6);
    if flags & COMPARED != entry.flags & COMPARED {
        return contradicts("flags");
    }
    let mut sizes = Zip64 { size: u32_at(fixed, 22).into(), compressed: u32_at(fixed, 18).into(), offset: 0 };
    sizes.widen(extra)?;
    let found = (u32_at(fixed, 14), sizes.compressed, sizes.size);
    let complete = found == (entry.crc, entry.compressed, entry.size);
    // With a descriptor the figures may be missing (zero), each for itself: some writers know the size already.
    let missing = (found.0 == 0 || found.0 == entry.crc)
        && (found.1 == 0 || found.1 == entry.compressed)
        && (found.2 == 0 || found.2 == entry.size);
    let deferred = flags & DESCRIPTOR != 0 && missing;
    if !(complete || deferred) {
        return contradicts("sizes or checksums");
    }
    Ok(complete)
}

fn unsupported(method: u16) -> Rejection {
    let name = match method {
        1 => "shrink",
        2..=5 => "reduce",
        6 => "implode",
        9 => "deflate64",
        12 => "bzip2",
        14 => "lzma",
        20 => "old zstd",
        95 => "xz",
        96 => "jpeg",
        97 => "wavpack",
        98 => "ppmd",
        _ => "unknown",
    };
    Rejection::new(Rule::Method, format!("its compression method {method} ({name}) is not supported"))
}

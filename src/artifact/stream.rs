//! Decompression of whole streams: gzip (all members), Zstandard (all frames), xz (all streams).
//!
//! [`decoder`] gives a reader, [`Metered`] counts what comes out, and [`holds_tar`] tells whether a stream is a tar without unpacking
//! it. Memory is bounded: 128 MiB of zstd window (`zstd --long=27`), 256 MiB for an xz decoder (`xz -9` needs 65).

use std::io::{self, BufRead, BufReader, Read};

use super::budget::Meter;
use super::format::{Format, SNIFF, sniff};
use super::rejection::{Rejection, Rule};
use super::tar::header;

/// The pieces in which input is read and output handed on.
pub const CHUNK: usize = 256 << 10;

/// Memory for one xz decoder, bytes.
const XZ_MEMORY: u64 = 256 << 20;

/// log2 of the largest zstd window; also the library's default.
const ZSTD_WINDOW_LOG: u32 = 27;

/// Decodes one input; see [`decoder`].
pub enum Decoder<R: BufRead> {
    /// Nothing to decode.
    Plain(R),
    /// gzip, member after member.
    Gzip(Box<flate2::bufread::MultiGzDecoder<R>>),
    /// Zstandard, frame after frame.
    Zstd(Box<zstd::stream::read::Decoder<'static, R>>),
    /// xz, stream after stream.
    Xz(Box<liblzma::bufread::XzDecoder<R>>),
}

/// A decoder of an input of that format; the input itself when it is a bare tar.
pub fn decoder<R: BufRead>(format: Format, input: R) -> io::Result<Decoder<R>> {
    Ok(match format {
        Format::TarGz => Decoder::Gzip(Box::new(flate2::bufread::MultiGzDecoder::new(input))),
        Format::TarZst => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(input)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG)?;
            Decoder::Zstd(Box::new(decoder))
        }
        Format::TarXz => {
            let stream = liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY, liblzma::stream::CONCATENATED)?;
            Decoder::Xz(Box::new(liblzma::bufread::XzDecoder::new_stream(input, stream)))
        }
        Format::Tar | Format::Zip | Format::File | Format::Directory => Decoder::Plain(input),
    })
}

impl<R: BufRead> Read for Decoder<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Decoder::Plain(input) => input.read(buffer),
            Decoder::Gzip(decoder) => decoder.read(buffer),
            Decoder::Zstd(decoder) => decoder.read(buffer),
            Decoder::Xz(decoder) => decoder.read(buffer),
        }
    }
}

/// Tells what a stream really is, given its head: a bare tar, or a compressed one whose content begins like a tar.
/// Anything else, damaged streams included, is none.
pub fn holds_tar(mut input: impl Read) -> io::Result<Option<Format>> {
    let head = read_up_to(&mut input, SNIFF)?;
    let Ok(format) = sniff(&head) else { return Ok(None) };
    match format {
        Format::Tar => return Ok(begins_tar(&head).then_some(format)),
        Format::TarGz | Format::TarZst | Format::TarXz => {}
        Format::Zip | Format::File | Format::Directory => return Ok(None),
    }
    let whole = BufReader::new(head.chain(input));
    let Ok(inner) = decoder(format, whole).and_then(|mut decoder| read_up_to(&mut decoder, SNIFF)) else {
        return Ok(None);
    };
    Ok(begins_tar(&inner).then_some(format))
}

/// Whether these are the first bytes of a tar with at least one member; a file of zeros is not.
fn begins_tar(head: &[u8]) -> bool {
    head.first_chunk().is_some_and(header::is_header)
}

/// Reads that many bytes, or what there is.
pub fn read_up_to(input: &mut impl Read, bytes: usize) -> io::Result<Vec<u8>> {
    let mut found = Vec::with_capacity(bytes);
    input.take(bytes as u64).read_to_end(&mut found)?;
    Ok(found)
}

/// Reads a compressed stream to its end, which is where its checksums are. Only zeros may come.
pub fn drain_zeros(input: &mut impl BufRead) -> io::Result<()> {
    loop {
        let chunk = input.fill_buf()?;
        if chunk.is_empty() {
            return Ok(());
        }
        if chunk.iter().any(|&b| b != 0) {
            let message = "data follows the end of the archive, which some readers ignore and others read";
            return Err(Rejection::new(Rule::TrailingData, message).into());
        }
        let length = chunk.len();
        input.consume(length);
    }
}

/// Counts what comes out of a decoder against the budget, before anybody looks at it.
pub struct Metered<'a, R> {
    inner: R,
    meter: &'a Meter,
    /// Bytes of the inner buffer that are counted but not consumed.
    counted: usize,
}

impl<'a, R: BufRead> Metered<'a, R> {
    /// Counts what `inner` gives. Reads fail with a [`Rejection`] inside the `io::Error` when the meter refuses.
    pub fn new(inner: R, meter: &'a Meter) -> Self {
        Metered { inner, meter, counted: 0 }
    }
}

impl<R: BufRead> BufRead for Metered<'_, R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        let chunk = self.inner.fill_buf()?;
        if chunk.len() > self.counted {
            self.meter.decoded((chunk.len() - self.counted) as u64)?;
            self.counted = chunk.len();
        }
        Ok(chunk)
    }

    fn consume(&mut self, amount: usize) {
        self.counted -= amount.min(self.counted);
        self.inner.consume(amount);
    }
}

impl<R: BufRead> Read for Metered<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.fill_buf()?.read(buffer)?;
        self.consume(n);
        Ok(n)
    }
}

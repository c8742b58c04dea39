//! Decompression of whole streams: gzip (all members), Zstandard (all frames), xz (all streams).
//!
//! [`open`] gives a reader whose output is metered, and [`holds_tar`] tells whether a stream is a tar without unpacking
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

/// A reader of the tar inside an input of that format; the input itself when it is a bare tar.
///
/// # Errors
/// Reading fails with a [`Rejection`] inside the `io::Error` when the meter refuses.
pub fn open<'a>(format: Format, input: impl BufRead + 'a, meter: &'a Meter) -> io::Result<impl BufRead + 'a> {
    Ok(BufReader::with_capacity(CHUNK, Metered { inner: decoder(format, input)?, meter }))
}

fn decoder<'a>(format: Format, input: impl BufRead + 'a) -> io::Result<Box<dyn Read + 'a>> {
    Ok(match format {
        Format::TarGz => Box::new(flate2::bufread::MultiGzDecoder::new(input)),
        Format::TarZst => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(input)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG)?;
            Box::new(decoder)
        }
        Format::TarXz => {
            let stream = liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY, liblzma::stream::CONCATENATED)?;
            Box::new(liblzma::bufread::XzDecoder::new_stream(input, stream))
        }
        Format::Tar | Format::Zip | Format::File | Format::Directory => Box::new(input),
    })
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

/// Counts what comes out of a decoder against the budget.
struct Metered<'a, R> {
    inner: R,
    meter: &'a Meter,
}

impl<R: Read> Read for Metered<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.meter.decoded(n as u64)?;
        Ok(n)
    }
}

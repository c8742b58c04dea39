//! One compressed stream, whole in memory: what is inside a bzImage, and a kernel module.
//!
//! Main function: [`decompress`]. The compression is told by its magic number. The bytes come from this host's
//! distribution, or from a file that a step names: so every size is bounded, and damage is an error with its offset.
//!
//! A kernel's build appends the size of what is compressed as four bytes, except to gzip, which ends in them anyway
//! (`scripts/Makefile.lib`, `size_append`).

use std::io::{self, Read};

/// Memory of one xz decoder, bytes: a kernel's dictionary has at most 128 MiB.
const XZ_MEMORY: u64 = 256 << 20;
/// log2 of the largest zstd window that a kernel is compressed with (`zstd --ultra -22`).
const ZSTD_WINDOW_LOG: u32 = 27;
/// First word of the LZ4 legacy format, which is what kernels use (lz4_Frame_format.md, "Legacy frame").
const LZ4_LEGACY: u32 = 0x184c_2102;
/// A block of it holds that many bytes, the last one fewer.
const LZ4_BLOCK: usize = 8 << 20;

/// How something is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// RFC 1952.
    Gzip,
    /// With or without a BCJ filter.
    Xz,
    /// Legacy frames.
    Lz4,
    /// RFC 8878.
    Zstd,
}

/// What is wrong with a stream, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Offset in the stream.
    pub offset: usize,
    /// A lowercase fragment.
    pub what: String,
}

impl Fault {
    /// A fault at that offset.
    pub fn at(offset: usize, what: impl Into<String>) -> Self {
        Fault { offset, what: what.into() }
    }
}

/// Tells a compression by its first bytes.
#[must_use]
pub fn sniff(input: &[u8]) -> Option<Compression> {
    let known: [(&[u8], Compression); 4] = [
        (b"\x1f\x8b\x08", Compression::Gzip),
        (b"\xfd7zXZ\0", Compression::Xz),
        (&LZ4_LEGACY.to_le_bytes(), Compression::Lz4),
        (b"\x28\xb5\x2f\xfd", Compression::Zstd),
    ];
    known.into_iter().find(|(magic, _)| input.starts_with(magic)).map(|(_, compression)| compression)
}

/// Decompresses one stream that gives at most `most` bytes. After it, only the size of its content may follow.
///
/// # Errors
/// Where the stream is no longer what it began as, or gives too much.
pub fn decompress(input: &[u8], most: usize) -> Result<Vec<u8>, Fault> {
    let Some(compression) = sniff(input) else {
        return Err(Fault::at(0, "neither gzip, xz, lz4 nor zstd begins there"));
    };
    let mut rest = input;
    let output = match compression {
        Compression::Gzip => all(flate2::bufread::GzDecoder::new(&mut rest), most),
        Compression::Xz => liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY, 0)
            .map_err(io::Error::from)
            .and_then(|stream| all(liblzma::bufread::XzDecoder::new_stream(&mut rest, stream), most)),
        Compression::Zstd => zstd::stream::read::Decoder::with_buffer(&mut rest).and_then(|mut decoder| {
            decoder.window_log_max(ZSTD_WINDOW_LOG)?;
            all(decoder.single_frame(), most)
        }),
        Compression::Lz4 => {
            let (output, used) = lz4(input, most)?;
            rest = &input[used..];
            Ok(output)
        }
    };
    let offset = input.len() - rest.len();
    let output = output.map_err(|e| Fault::at(offset, format!("damaged {compression:?} data: {e}")))?;
    if output.len() > most {
        return Err(Fault::at(offset, format!("more than {most} bytes come out of it")));
    }
    match rest {
        [] => Ok(output),
        [a, b, c, d] if u32::from_le_bytes([*a, *b, *c, *d]) as usize == output.len() => Ok(output),
        [_, _, _, _] => {
            Err(Fault::at(offset, format!("the size that follows is not the {} bytes found", output.len())))
        }
        more => Err(Fault::at(offset, format!("{} bytes follow its end", more.len()))),
    }
}

/// Everything that a decoder gives, or a little more than is allowed.
fn all(decoder: impl Read, most: usize) -> io::Result<Vec<u8>> {
    let mut output = Vec::new();
    decoder.take(most as u64 + 1).read_to_end(&mut output)?;
    Ok(output)
}

/// Blocks until fewer bytes are left than a block's size and a byte of it take; also how many bytes they were.
fn lz4(input: &[u8], most: usize) -> Result<(Vec<u8>, usize), Fault> {
    let mut output = Vec::new();
    let mut at = 4;
    while let Some((size, rest)) = input[at..].split_first_chunk() {
        let size = u32::from_le_bytes(*size);
        if rest.is_empty() {
            break;
        }
        if size == LZ4_LEGACY {
            at += 4;
            continue;
        }
        let Some(block) = usize::try_from(size).ok().filter(|&s| s > 0).and_then(|size| rest.get(..size)) else {
            return Err(Fault::at(at, format!("a block of {size} bytes where {} are left", rest.len())));
        };
        let start = output.len();
        let room = LZ4_BLOCK.min(most - start);
        output.resize(start + room, 0);
        let length = lz4_flex::block::decompress_into(block, &mut output[start..]).map_err(|e| match e {
            lz4_flex::block::DecompressError::OutputTooSmall { .. } if room < LZ4_BLOCK => {
                Fault::at(at, format!("more than {most} bytes come out of it"))
            }
            e => Fault::at(at, format!("damaged Lz4 data: {e}")),
        })?;
        output.truncate(start + length);
        at += 4 + block.len();
    }
    Ok((output, at))
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    const MOST: usize = 64 << 20;

    /// As a kernel's build compresses: the size appended, except to gzip.
    pub fn compress(compression: Compression, content: &[u8]) -> Vec<u8> {
        let mut output = match compression {
            Compression::Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(content).unwrap();
                return encoder.finish().unwrap();
            }
            Compression::Xz => {
                let mut filters = liblzma::stream::Filters::new();
                filters.x86().lzma2(&liblzma::stream::LzmaOptions::new_preset(1).unwrap());
                let stream =
                    liblzma::stream::Stream::new_stream_encoder(&filters, liblzma::stream::Check::Crc32).unwrap();
                let mut encoder = liblzma::write::XzEncoder::new_stream(Vec::new(), stream);
                encoder.write_all(content).unwrap();
                encoder.finish().unwrap()
            }
            Compression::Zstd => zstd::encode_all(content, 1).unwrap(),
            Compression::Lz4 => {
                let mut output = LZ4_LEGACY.to_le_bytes().to_vec();
                for block in content.chunks(LZ4_BLOCK) {
                    let block = lz4_flex::block::compress(block);
                    output.extend((block.len() as u32).to_le_bytes());
                    output.extend(block);
                }
                output
            }
        };
        output.extend((content.len() as u32).to_le_bytes());
        output
    }

    pub const ALL: [Compression; 4] = [Compression::Gzip, Compression::Xz, Compression::Lz4, Compression::Zstd];

    fn content(length: usize) -> Vec<u8> {
        (0..length).map(|n| (n / 7 * 31 % 251) as u8).collect()
    }

    #[test]
    fn every_compression_of_kernels_comes_back_whole() {
        let content = content(LZ4_BLOCK + 12_345);
        for compression in ALL {
            let packed = compress(compression, &content);
            assert_eq!(sniff(&packed), Some(compression));
            assert!(decompress(&packed, content.len()).unwrap() == content, "{compression:?}");
        }
    }

    #[test]
    fn more_than_is_allowed_is_an_error_before_it_is_memory() {
        let zeros = vec![0; 32 << 20];
        for compression in ALL {
            let packed = compress(compression, &zeros);
            let fault = decompress(&packed, 1 << 20).unwrap_err();
            assert!(fault.what.contains("more than 1048576 bytes"), "{compression:?}: {fault:?}");
        }
    }

    #[test]
    fn cut_short_or_followed_by_something_is_an_error_with_its_place() {
        let content = content(100_000);
        for compression in ALL {
            let packed = compress(compression, &content);
            for length in [0, 3, 5, 20, packed.len() / 2, packed.len() - 5, packed.len() - 2] {
                let fault = decompress(&packed[..length], MOST).unwrap_err();
                assert!(fault.offset <= length, "{compression:?} cut to {length}: {fault:?}");
            }
            let more = [&packed[..], b"more"].concat();
            assert!(decompress(&more, MOST).unwrap_err().offset > packed.len() / 2, "{compression:?}");
            if compression != Compression::Gzip {
                let mut wrong = packed.clone();
                *wrong.last_mut().unwrap() ^= 1;
                assert!(decompress(&wrong, MOST).unwrap_err().what.contains("size"), "{compression:?}");
            }
        }
    }

    #[test]
    fn lz4_blocks_with_lying_sizes_are_refused() {
        for size in [0, 5, u32::MAX, 1 << 31] {
            let hostile = [&LZ4_LEGACY.to_le_bytes()[..], &size.to_le_bytes(), b"\x10a"].concat();
            assert_eq!(decompress(&hostile, MOST).unwrap_err().offset, 4, "{size}");
        }
        // A match that reaches before the beginning.
        let hostile = [&LZ4_LEGACY.to_le_bytes()[..], &[4, 0, 0, 0], b"\x10a\xff\xff"].concat();
        assert!(decompress(&hostile, MOST).is_err());
    }

    proptest! {
        #[test]
        fn any_content_comes_back(content in prop::collection::vec(0u8..8, 1..3000), which in 0usize..4) {
            prop_assert_eq!(decompress(&compress(ALL[which], &content), 3000).unwrap(), content);
        }

        #[test]
        fn damage_is_an_error_or_harmless_never_a_panic(
            which in 0usize..4, at in any::<prop::sample::Index>(), bit in 0u8..8, tail in prop::collection::vec(any::<u8>(), 0..40)
        ) {
            let mut packed = compress(ALL[which], &content(5000));
            let at = at.index(packed.len());
            packed[at] ^= 1 << bit;
            packed.extend(tail);
            if let Ok(output) = decompress(&packed, 6000) {
                prop_assert!(output.len() <= 6000);
            }
        }

        #[test]
        fn rubbish_after_a_magic_number_never_panics(which in 0usize..4, rubbish in prop::collection::vec(any::<u8>(), 0..300)) {
            let head = &compress(ALL[which], b"x")[..4];
            let _ = decompress(&[head, &rubbish].concat(), 1 << 16);
        }
    }
}

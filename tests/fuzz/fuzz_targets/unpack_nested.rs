//! Any bytes as the one member of a well-formed zip, and as the content of a well-formed gzip: past the checksums of
//! the outer layer, which a fuzzer doesn't guess.
#![no_main]

use std::fs::{self, File};
use std::io::Cursor;

use libfuzzer_sys::fuzz_target;
use plimsoll::artifact::{Budget, Purpose, Request, unpack};

/// CRC-32 as zip and gzip use it, bit by bit: no dependency, and small inputs.
fn crc32(data: &[u8]) -> u32 {
    !data.iter().fold(!0_u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    })
}

fn zip(data: &[u8]) -> Vec<u8> {
    let size = (data.len() as u32).to_le_bytes();
    let common =
        [&[20, 0, 0, 0, 0, 0, 0, 0, 0x21, 0][..], &crc32(data).to_le_bytes(), &size, &size, &[1, 0, 0, 0]].concat();
    let local = [&b"PK\x03\x04"[..], &common, b"m", data].concat();
    let central = [&b"PK\x01\x02\x14\x03"[..], &common, &[0; 14], b"m"].concat();
    let (at, length) = ((local.len() as u32).to_le_bytes(), (central.len() as u32).to_le_bytes());
    [&local[..], &central, b"PK\x05\x06\0\0\0\0\x01\0\x01\0", &length, &at, &[0, 0]].concat()
}

/// One stored block: at most 65,535 bytes.
fn gzip(data: &[u8]) -> Vec<u8> {
    let data = &data[..data.len().min(0xffff)];
    let length = data.len() as u16;
    let head = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff, 1];
    let lengths = [length.to_le_bytes(), (!length).to_le_bytes()].concat();
    [&head[..], &lengths, data, &crc32(data).to_le_bytes(), &u32::from(length).to_le_bytes()].concat()
}

fuzz_target!(|data: &[u8]| {
    for bytes in [zip(data), gzip(data), zip(&gzip(data))] {
        let place = tempfile::tempdir().expect("a place");
        let request = Request {
            file_name: "file".to_owned(),
            executable: false,
            purpose: Purpose::Artifact,
            budget: Budget { bytes: 1 << 20, files: 64, ..Budget::default() },
            sha256: None,
        };
        let result = unpack(Cursor::new(bytes), File::open(place.path()).expect("opens").into(), &request);
        if result.is_err() {
            assert_eq!(fs::read_dir(place.path()).expect("lists").count(), 0, "left after a refusal");
        }
    }
});

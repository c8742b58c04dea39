//! A tar whose header checksums are made right, so that the fuzzer reaches what lies behind them.
#![no_main]

use std::fs::{self, File};
use std::io::Cursor;

use libfuzzer_sys::fuzz_target;
use plimsoll::artifact::{Budget, Purpose, Request, unpack};

fuzz_target!(|data: &[u8]| {
    let mut bytes = data.to_vec();
    bytes.resize(bytes.len().next_multiple_of(512) + 1024, 0);
    let end = bytes.len() - 1024;
    for block in bytes[..end].chunks_exact_mut(512) {
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|&b| u32::from(b)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
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
});

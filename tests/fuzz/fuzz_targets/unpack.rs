//! Any bytes as an artifact. No panic; nothing beside the destination; after a refusal nothing inside.
#![no_main]

use std::fs::{self, File};
use std::io::Cursor;

use libfuzzer_sys::fuzz_target;
use plimsoll::artifact::{Budget, Purpose, Request, unpack};

fuzz_target!(|data: &[u8]| {
    let place = tempfile::tempdir().expect("a place");
    let out = place.path().join("out");
    fs::create_dir(&out).expect("a destination");
    let request = Request {
        file_name: "file".to_owned(),
        executable: false,
        purpose: if data.first().is_some_and(|b| b & 1 == 1) { Purpose::RootFs } else { Purpose::Artifact },
        budget: Budget { bytes: 1 << 20, files: 64, ..Budget::default() },
        sha256: None,
    };
    let result = unpack(Cursor::new(data), File::open(&out).expect("opens").into(), &request);
    assert_eq!(fs::read_dir(place.path()).expect("lists").count(), 1, "written beside the destination");
    if result.is_err() {
        assert_eq!(fs::read_dir(&out).expect("lists").count(), 0, "left after a refusal");
    }
});

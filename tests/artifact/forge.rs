//! Archives as forges' artifact services make and serve them.

use plimsoll::artifact::Format;

use crate::support::{Entry, Tar, accepted, gzip, zip};

/// actions/upload-artifact streams: every entry deflated with a data descriptor, made by Unix, no execute bits, the
/// UTF-8 flag set, no directory entries, dotfiles dropped.
fn uploaded(name: &str, data: &[u8]) -> Entry {
    Entry::deflated(name, data).with(|e| {
        (e.flags, e.local_flags, e.mode) = (0x808, 0x808, 0o100_644);
        let mut descriptor = b"PK\x07\x08".to_vec();
        for value in [e.crc, e.data.len() as u32, e.size] {
            descriptor.extend_from_slice(&value.to_le_bytes());
        }
        e.descriptor = descriptor;
    })
}

#[test]
fn an_upload_unpacks_without_its_execute_bits() {
    let bytes = zip(&[uploaded("dist/run.sh", b"#!/bin/sh\necho hi\n"), uploaded("dist/data.txt", &[b'x'; 100_000])]);
    let (place, summary) = accepted(&bytes);
    assert_eq!((summary.files, summary.format), (2, Format::Zip));
    // Whether it still runs is the backend's matter: `sh run.sh` does. Nothing is guessed here.
    assert_eq!(place.mode("dist/run.sh"), 0o666);
}

#[test]
fn an_upload_of_one_tar_keeps_what_the_zip_would_drop() {
    let tar = Tar::default().raw(b'0', "run.sh", b"#!/bin/sh\n", |h| h.set_mode(0o755)).file(".env", b"A=1").end();
    let (place, summary) = accepted(&zip(&[uploaded("artifact.tar.gz", &gzip(&tar))]));
    assert_eq!((place.mode("run.sh"), place.text(".env").as_str()), (0o777, "A=1"));
    assert_eq!(summary.packing(), "zip(tar.gz)");
}

#[test]
fn a_service_that_serves_something_else_under_a_zips_name_is_no_problem() {
    // The content decides; a name or content type isn't even an argument.
    let tar = Tar::default().file("x", b"1").end();
    assert_eq!(accepted(&gzip(&tar)).1.format, Format::TarGz);
    assert_eq!(accepted(&tar).1.format, Format::Tar);
    assert_eq!(accepted(b"{\"message\": \"Not Found\"}").1.format, Format::File);
}

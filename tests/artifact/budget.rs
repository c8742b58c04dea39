//! Limits, counted while unpacking: the archive never gets to write what it may not.

use plimsoll::artifact::{Budget, Digest, Format, Request, Rule};

use crate::support::{Entry, Tar, accepted, attempt, refused_with, request, zip, zst};

fn limited(change: impl FnOnce(&mut Budget)) -> Request {
    let mut request = request();
    change(&mut request.budget);
    request
}

#[test]
fn bytes_members_depth_and_names_are_limited_in_every_format() {
    let tar = |name: &str, data: &[u8]| Tar::default().file(name, data).end();
    let zipped = |name: &str, data: &[u8]| zip(&[Entry::deflated(name, data)]);
    for pack in [&tar as &dyn Fn(&str, &[u8]) -> Vec<u8>, &zipped] {
        let at_limit = pack("a/b/name", &[1; 100]);
        let fits = limited(|b| (b.bytes, b.files, b.depth, b.name_bytes, b.path_bytes) = (100, 3, 3, 4, 8));
        attempt(&at_limit, &fits).1.unwrap();
        for (request, rule) in [
            (limited(|b| b.bytes = 99), Rule::BudgetBytes),
            (limited(|b| b.files = 2), Rule::BudgetFiles),
            (limited(|b| b.depth = 2), Rule::BudgetDepth),
            (limited(|b| b.name_bytes = 3), Rule::BudgetName),
            (limited(|b| b.path_bytes = 7), Rule::BudgetName),
        ] {
            let rejection = refused_with(&at_limit, &request, rule);
            assert_eq!(rejection.member.as_deref(), Some("a/b/name"), "{rejection}");
        }
    }
}

#[test]
fn every_kind_of_member_counts() {
    let request = limited(|b| b.files = 50);
    let repeat = |member: fn(Tar, usize) -> Tar| (0..60).fold(Tar::default().file("f", b""), member).end();
    for archive in [
        repeat(|tar, n| tar.dir(&format!("d{n}"))),
        repeat(|tar, _| tar.dir("same")),
        repeat(|tar, n| tar.symlink(&format!("l{n}"), "f")),
        repeat(|tar, n| tar.hardlink(&format!("h{n}"), "f")),
        repeat(|tar, _| tar.file("same", b"")),
        repeat(|tar, n| tar.file(&format!("{n}/implied"), b"")),
    ] {
        refused_with(&archive, &request, Rule::BudgetFiles);
    }
    let entries: Vec<Entry> = (0..60).map(|n| Entry::stored(&format!("{n}"), b"")).collect();
    refused_with(&zip(&entries), &request, Rule::BudgetFiles);
}

#[test]
fn bombs_are_stopped_by_their_ratio() {
    // 1 GiB of zeros in some kilobytes. Were it unpacked, the default budget of bytes would allow it.
    let size = 1_u64 << 30;
    let head = Tar::default().raw(b'0', "zeros", b"", |h| h.set_size(size)).0;
    let pack = || {
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
        std::io::Write::write_all(&mut encoder, &head).unwrap();
        std::io::copy(&mut std::io::Read::take(std::io::repeat(0), size + 1024), &mut encoder).unwrap();
        encoder.finish().unwrap()
    };
    refused_with(&pack(), &request(), Rule::BudgetRatio);
    // Announced in full by a zip: refused before a byte is inflated.
    let zeros = vec![0; 70 << 20];
    let bomb = zip(&[Entry::deflated("zeros", &zeros), Entry::stored("x", b"")]);
    refused_with(&bomb, &request(), Rule::BudgetRatio);
    attempt(&bomb, &limited(|b| b.ratio = 2000)).1.unwrap();
    // Not a file at all: padding after the end, which only the decoder sees.
    let mut padded = Tar::default().file("x", b"").end();
    padded.resize(70 << 20, 0);
    refused_with(&zst(&padded), &request(), Rule::BudgetRatio);
}

#[test]
fn what_decoders_put_out_is_bounded_even_when_it_is_no_file() {
    // Headers without end: extended headers cost nothing in files or bytes.
    let header = Tar::default().extended(b'g', &[]).0;
    let archive = Tar::default().file("x", b"").data(&header.repeat(3000)).end();
    let small = limited(|b| (b.bytes, b.files) = (1000, 10));
    refused_with(&zst(&archive), &small, Rule::BudgetBytes);
    attempt(&zst(&archive), &request()).1.unwrap();
}

#[test]
fn sha256_is_verified_before_anything_is_parsed() {
    let good = Tar::default().file("x", b"1").end();
    let pinned = Request { sha256: Some(Digest::of(&good)), ..request() };
    attempt(&good, &pinned).1.unwrap();
    let other = Tar::default().file("x", b"2").end();
    let rejection = refused_with(&other, &pinned, Rule::Sha256);
    assert!(rejection.message.contains(&Digest::of(&good).to_string()));
    // Also for what would be refused anyway: the digest comes first.
    refused_with(&Tar::default().file("../x", b"").end(), &pinned, Rule::Sha256);
    refused_with(b"", &pinned, Rule::Sha256);
}

#[test]
fn a_single_file_that_is_no_archive_is_a_tree_of_one() {
    let wasm = b"\0asm\x01\0\0\0rest";
    let named = Request { file_name: "hello.wasm".into(), executable: true, ..request() };
    let (place, result) = attempt(wasm, &named);
    let summary = result.unwrap();
    assert_eq!((summary.format, summary.files, summary.bytes), (Format::File, 1, 12));
    assert_eq!((place.listing().len(), place.mode("hello.wasm")), (1, 0o777));
    refused_with(wasm, &limited(|b| b.bytes = 11), Rule::BudgetBytes);
    for name in ["../x", "a/../b", ""] {
        refused_with(wasm, &Request { file_name: name.into(), ..request() }, Rule::Path);
    }
    refused_with(b"", &request(), Rule::Format);
    refused_with(b"BZh91AY", &request(), Rule::Format);
    refused_with(b"7z\xbc\xaf\x27\x1c", &request(), Rule::Format);
}

#[test]
fn names_in_refusals_are_safe_to_print() {
    let rejection =
        crate::support::refused(&Tar::default().file("../\x1b]8;;http://x\x07\u{202e}", b"").end(), Rule::Path);
    assert!(rejection.to_string().chars().all(|c| !c.is_control() && c != '\u{202e}'), "{rejection}");
    accepted(&Tar::default().file("fine", b"").end());
}

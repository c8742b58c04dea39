//! tar: what the headers may say, and where links may lead.

use plimsoll::artifact::{Format, Purpose, Request, Rule};

use crate::support::{
    Tar, accepted, attempt, gzip, pax_records, refused, refused_member, refused_with, request, xz, zst,
};

#[test]
fn every_compression_unpacks_alike_and_is_told_by_content() {
    let tar = Tar::default().dir("d").file("d/x", b"hello").symlink("l", "d/x").hardlink("h", "d/x").end();
    for (bytes, format) in [
        (tar.clone(), Format::Tar),
        (gzip(&tar), Format::TarGz),
        (zst(&tar), Format::TarZst),
        (xz(&tar), Format::TarXz),
    ] {
        let (place, summary) = accepted(&bytes);
        assert_eq!(place.text("d/x"), "hello");
        assert_eq!(place.text("l"), "hello");
        assert_eq!(place.text("h"), "hello");
        assert_eq!((summary.format, summary.inner, summary.files, summary.bytes), (format, None, 2, 5));
    }
}

#[test]
fn every_gzip_member_zstd_frame_and_xz_stream_is_read() {
    let tar = Tar::default().file("first", &[b'a'; 1000]).file("second", &[b'b'; 1000]).end();
    let (head, tail) = tar.split_at(700);
    for pack in [gzip as fn(&[u8]) -> Vec<u8>, zst, xz] {
        let (place, _) = accepted(&[pack(head), pack(tail)].concat());
        assert_eq!(place.listing().len(), 2);
        refused(&pack(head), Rule::Truncated);
    }
    // A skippable frame first, as pzstd writes.
    let skippable = [&b"\x50\x2a\x4d\x18\x04\0\0\0abcd"[..], &zst(&tar)].concat();
    assert_eq!(accepted(&skippable).1.format, Format::TarZst);
}

#[test]
fn compressed_streams_that_are_cut_damaged_or_followed_by_junk_are_refused() {
    let tar = Tar::default().file("x", &(0..=255).cycle().take(40_000).collect::<Vec<u8>>()).end();
    for pack in [gzip as fn(&[u8]) -> Vec<u8>, zst, xz] {
        let good = pack(&tar);
        accepted(&good);
        // The whole tar is out by then; only the trailer is missing.
        for cut in [good.len() - 1, good.len() / 2, 20] {
            let (_, result) = attempt(&good[..cut], &request());
            assert!(result.is_err(), "cut at {cut}");
        }
        let (_, result) = attempt(&[&good[..], b"junk"].concat(), &request());
        assert!(result.is_err(), "junk behind");
    }
    let mut wrong_crc = gzip(&tar);
    let at = wrong_crc.len() - 6;
    wrong_crc[at] ^= 1;
    refused(&wrong_crc, Rule::Corrupt);
}

#[test]
fn a_compressed_file_that_is_no_tar_says_so() {
    for pack in [gzip as fn(&[u8]) -> Vec<u8>, zst, xz] {
        let text = "some text\n".repeat(200);
        let rejection = refused(&pack(text.as_bytes()), Rule::Format);
        assert!(rejection.message.contains("holds no tar"), "{rejection}");
        refused(&pack(b""), Rule::Format);
    }
}

/// CVE-2026-33055: a reader that goes by the ustar size takes the second half of the data for headers.
#[test]
fn pax_size_counts_and_member_data_is_never_taken_for_headers() {
    let smuggled = Tar::default().file("smuggled", b"evil").0;
    let archive = |ustar: u64| {
        Tar::default()
            .pax(&[("size", &smuggled.len().to_string())])
            .raw(b'0', "carrier", &smuggled, |header| header.set_size(ustar))
            .file("after", b"ok")
            .end()
    };
    for ustar in [0, 512, smuggled.len() as u64, 1 << 30] {
        let (place, _) = accepted(&archive(ustar));
        assert_eq!(place.listing().into_keys().collect::<Vec<_>>(), ["after", "carrier"]);
        assert_eq!(place.listing()["carrier"], format!("{} bytes", smuggled.len()));
    }
}

#[test]
fn a_pax_header_belongs_to_the_next_member_only() {
    let (place, _) = accepted(&Tar::default().pax(&[("path", "renamed")]).file("a", b"1").file("b", b"2").end());
    assert_eq!(place.listing().into_keys().collect::<Vec<_>>(), ["b", "renamed"]);
    // Its size must not stick to a long name that comes between, nor to the member after.
    let long = format!("{}/name", "d".repeat(120));
    let between = Tar::default()
        .pax(&[("size", "3")])
        .extended(b'L', format!("{long}\0").as_bytes())
        .raw(b'0', "short", b"abc", |header| header.set_size(0))
        .file("after", b"12345")
        .end();
    let (place, _) = accepted(&between);
    assert_eq!((place.text(&long), place.text("after")), ("abc".into(), "12345".into()));
    // A global header between changes nothing either.
    let global = Tar::default()
        .pax(&[("path", "renamed")])
        .extended(b'g', &pax_records(&[("comment", "0123456789abcdef")]))
        .file("a", b"1")
        .end();
    assert_eq!(accepted(&global).0.text("renamed"), "1");
}

#[test]
fn extended_headers_that_readers_apply_differently_are_refused() {
    let x = |path: &str| pax_records(&[("path", path)]);
    for (archive, rule) in [
        (Tar::default().pax(&[("path", "a")]).pax(&[("path", "b")]).file("c", b""), Rule::Disagreement),
        (Tar::default().extended(b'L', b"a\0").extended(b'L', b"b\0").file("c", b""), Rule::Disagreement),
        (Tar::default().extended(b'L', b"a\0").extended(b'x', &x("b")).file("c", b""), Rule::Disagreement),
        (Tar::default().extended(b'g', &x("b")).file("c", b""), Rule::Disagreement),
        (Tar::default().extended(b'g', &pax_records(&[("size", "9")])).file("c", b""), Rule::Disagreement),
        (Tar::default().file("c", b"").extended(b'x', &x("b")), Rule::Truncated),
        (Tar::default().file("c", b"").extended(b'L', b"b\0"), Rule::Truncated),
        (Tar::default().extended(b'L', b"").file("c", b""), Rule::Path),
        (Tar::default().extended(b'x', b"nonsense").file("c", b""), Rule::Corrupt),
        (Tar::default().extended(b'L', b"a\0b").file("c", b""), Rule::Path),
    ] {
        refused(&archive.end(), rule);
    }
    let agree = Tar::default().extended(b'L', b"same\0").extended(b'x', &x("same")).file("c", b"1").end();
    assert_eq!(accepted(&agree).0.text("same"), "1");
}

#[test]
fn huge_extended_headers_are_refused_before_they_are_read() {
    for kind in [b'x', b'g', b'L', b'K'] {
        let archive = Tar::default().raw(kind, "x", b"", |header| header.set_size(1 << 40)).end();
        refused(&archive, Rule::BudgetName);
    }
}

#[test]
fn gnu_long_names_are_whole_whatever_the_version_bytes() {
    let name = format!("{}/{}/file", "a".repeat(100), "b".repeat(100));
    let target = format!("{}/target", "t".repeat(150));
    for version in [*b" \0", *b"00", *b"\0\0", *b"xy"] {
        let odd = |header: &mut tar::Header| header.as_mut_bytes()[263..265].copy_from_slice(&version);
        let archive = Tar::default()
            .raw(b'L', "././@LongLink", format!("{name}\0").as_bytes(), odd)
            .raw(b'0', &name[..100], b"content", odd)
            .raw(b'K', "././@LongLink", format!("{target}\0").as_bytes(), odd)
            .raw(b'2', "link", b"", odd)
            .end();
        let (place, _) = accepted(&archive);
        assert_eq!(place.text(&name), "content");
        assert_eq!(place.listing()["link"], format!("-> {target}"));
    }
    // What is cut at 100 bytes ends in a slash: the long name says that it is a file, not the header's rest of it.
    let name = format!("{}/{}", "a".repeat(99), "b".repeat(50));
    let archive = Tar::default().extended(b'L', format!("{name}\0").as_bytes()).file(&name[..100], b"content").end();
    assert_eq!(accepted(&archive).0.text(&name), "content");
}

#[test]
fn names_that_leave_are_refused_and_named() {
    for name in ["../secret", "/etc/passwd", "a/../../secret", "../out_backup/x", "a/..", ".."] {
        refused_member(&Tar::default().file("before", b"1").file(name, b"x").end(), Rule::Path, name);
        refused_member(&Tar::default().pax(&[("path", name)]).file("ok", b"x").end(), Rule::Path, name);
        refused_member(&Tar::default().dir(name).end(), Rule::Path, name);
        refused_member(&Tar::default().symlink(name, "x").end(), Rule::Path, name);
        refused_member(&Tar::default().file("x", b"1").hardlink(name, "x").end(), Rule::Path, name);
    }
    refused(
        &Tar::default().raw(b'0', "", b"x", |h| h.as_mut_bytes()[..4].copy_from_slice(b"caf\xe9")).end(),
        Rule::Path,
    );
    accepted(&Tar::default().file("./a/./b//c", b"x").file("..a", b"x").dir("./").end());
}

#[test]
fn nothing_is_written_through_a_symlink() {
    for (archive, rule) in [
        (Tar::default().symlink("x", "../secret").file("x", b"evil"), Rule::Duplicate),
        (Tar::default().symlink("x", "inside").file("x", b"evil"), Rule::Duplicate),
        (Tar::default().dir("d").symlink("x", "d").file("x/file", b"evil"), Rule::ThroughLink),
        (Tar::default().symlink("x", "..").dir("x/made"), Rule::ThroughLink),
        (Tar::default().symlink("x", "../out_backup").file("x/a/b/c", b""), Rule::ThroughLink),
        (Tar::default().symlink("x", "/tmp").file("x/evil", b""), Rule::Symlink),
        (Tar::default().dir("d").symlink("d", ".."), Rule::Duplicate),
        (Tar::default().file("d/x", b"").symlink("d", ".."), Rule::Duplicate),
        (Tar::default().symlink("x", "d").dir("x"), Rule::Duplicate),
        (Tar::default().file("f", b"").file("f/x", b""), Rule::ThroughLink),
        (Tar::default().symlink("x", "../secret").hardlink("y", "x"), Rule::Hardlink),
        (Tar::default().dir("d").file("d/f", b"").symlink("x", "d").hardlink("y", "x/f"), Rule::Hardlink),
    ] {
        // A duplicate directory over a link is refused as going through it.
        let bytes = archive.end();
        let (_, result) = attempt(&bytes, &request());
        let Err(plimsoll::artifact::Error::Rejected(rejection)) = result else { panic!("{result:?}") };
        let through = rejection.rule == Rule::ThroughLink && rule == Rule::Duplicate;
        assert!(rejection.rule == rule || through, "{rejection}, wanted {rule}");
        assert!(rejection.member.is_some(), "{rejection}");
    }
    accepted(&Tar::default().dir("d").file("d/f", b"").symlink("x", "d").symlink("y", "x/f").end());
}

#[test]
fn symlinks_that_leave_are_refused_also_through_others_and_also_later() {
    for archive in [
        Tar::default().symlink("l", "/etc/passwd"),
        Tar::default().symlink("l", "../secret"),
        Tar::default().dir("d").symlink("d/l", "../../secret"),
        Tar::default().symlink("l", "missing/../../secret"),
        Tar::default().symlink("l", "later/../secret").symlink("later", "."),
        Tar::default().symlink("a", ".").symlink("b", "a/..").file("x", b""),
        Tar::default().symlink("l", "l"),
        Tar::default().pax(&[("linkpath", "../secret")]).symlink("l", "fine"),
        Tar::default().symlink("l", ""),
    ] {
        let rejection = refused(&archive.end(), Rule::Symlink);
        assert!(rejection.member.is_some(), "{rejection}");
    }
    accepted(&Tar::default().symlink("d/l", "../x").symlink("dangling", "nowhere").file("x", b"").end());
}

#[test]
fn hardlinks_name_only_a_regular_member_that_is_there() {
    for (target, archive) in [
        ("../secret", Tar::default()),
        ("/etc/passwd", Tar::default()),
        ("missing", Tar::default()),
        ("d", Tar::default().dir("d")),
        ("l", Tar::default().file("f", b"").symlink("l", "f")),
        ("later", Tar::default()),
        ("h", Tar::default()),
        (".", Tar::default()),
    ] {
        let archive = archive.hardlink("h", target).file("later", b"").end();
        refused_member(&archive, Rule::Hardlink, "h");
    }
    let (place, summary) = accepted(&Tar::default().file("d/f", b"12").hardlink("e/h", "./d/f").end());
    assert_eq!((place.text("e/h").as_str(), summary.files, summary.bytes), ("12", 2, 2));
}

#[test]
fn devices_fifos_and_unknown_types_are_refused() {
    for kind in [b'3', b'4', b'6', b'V', b'M', b'D', b'Z', b'!'] {
        refused_member(&Tar::default().file("ok", b"").raw(kind, "odd", b"", |_| ()).end(), Rule::Kind, "odd");
    }
    accepted(&Tar::default().raw(b'7', "contiguous", b"1", |_| ()).raw(0, "old", b"1", |_| ()).end());
}

#[test]
fn a_root_file_system_may_be_one() {
    let archive = Tar::default()
        .symlink("var/run", "/run")
        .symlink("up", "../../etc")
        .file("terminfo/E", b"1")
        .file("terminfo/e", b"2")
        .raw(b'3', "dev/null", b"", |_| ())
        .raw(b'6', "run/initctl", b"", |_| ());
    let request = Request { purpose: Purpose::RootFs, ..request() };
    let (place, result) = attempt(&archive.clone().end(), &request);
    assert_eq!(result.unwrap().files, 2);
    let listing: Vec<String> = place.listing().into_keys().collect();
    assert_eq!(listing, ["terminfo", "terminfo/E", "terminfo/e", "up", "var", "var/run"]);
    // What confines is the same.
    for (hostile, rule) in [
        (archive.clone().file("var/run/x", b"evil"), Rule::ThroughLink),
        (archive.clone().file("../x", b"evil"), Rule::Path),
        (archive.clone().hardlink("x", "up"), Rule::Hardlink),
        (archive.clone().file("up", b"evil"), Rule::Duplicate),
    ] {
        refused_with(&hostile.end(), &request, rule);
    }
    refused(&archive.end(), Rule::Symlink);
}

#[test]
fn links_and_directories_that_carry_data_are_refused() {
    let hidden = Tar::default().file("hidden", b"").0;
    for kind in [b'1', b'2', b'5'] {
        let archive = Tar::default().file("f", b"").raw(kind, "x", &hidden, |h| h.as_mut_bytes()[157] = b'f').end();
        refused_member(&archive, Rule::Disagreement, "x");
    }
    // An old-style directory: type file, name with a slash.
    assert_eq!(accepted(&Tar::default().file("d/", b"").end()).0.listing()["d"], "dir");
    refused_member(&Tar::default().file("d/", b"data").end(), Rule::Disagreement, "d/");
    refused_member(&Tar::default().symlink("l/", "x").end(), Rule::Path, "l/");
}

#[test]
fn modes_are_masked_and_only_execute_survives() {
    let archive = Tar::default()
        .raw(b'0', "plain", b"", |h| h.set_mode(0o000))
        .raw(b'0', "suid", b"", |h| h.set_mode(0o6755))
        .raw(b'5', "dir", b"", |h| h.set_mode(0o7000))
        .raw(b'0', "implied/x", b"", |h| h.set_mode(0o100))
        .end();
    let (place, _) = accepted(&archive);
    for (path, mode) in [("plain", 0o666), ("suid", 0o777), ("dir", 0o777), ("implied", 0o777), ("implied/x", 0o777)] {
        assert_eq!(place.mode(path), mode, "{path}: {:o}", place.mode(path));
    }
}

#[test]
fn the_last_of_several_files_of_one_name_counts() {
    // `tar -r` and `tar -u` make these. A hard link to the older content keeps it.
    let archive = Tar::default().file("a", b"old").hardlink("kept", "a").file("a", b"newer").dir("d").dir("d/").end();
    let (place, summary) = accepted(&archive);
    assert_eq!((place.text("a").as_str(), place.text("kept").as_str(), summary.files), ("newer", "old", 2));
    let links = Tar::default().symlink("l", "a").symlink("l", "b").end();
    assert_eq!(accepted(&links).0.listing()["l"], "-> b");
    refused(&Tar::default().file("a", b"").dir("a").end(), Rule::ThroughLink);
    refused(&Tar::default().dir("a").file("a", b"").end(), Rule::Duplicate);
    refused(&Tar::default().file("a", b"").symlink("a", "b").end(), Rule::Duplicate);
}

#[test]
fn names_that_fold_together_are_refused() {
    for (first, second) in [("README", "readme"), ("Dir/a", "dir/b"), ("stra\u{df}e", "STRASSE")] {
        refused_member(&Tar::default().file(first, b"1").file(second, b"2").end(), Rule::NameCollision, second);
    }
    let twins = Tar::default().file("caf\u{e9}", b"1").file("cafe\u{301}", b"2").end();
    refused_member(&twins, Rule::NameCollision, "cafe\\u{301}");
    refused(&Tar::default().dir("Cafe\u{301}").symlink("caf\u{e9}", "x").end(), Rule::NameCollision);
    refused(&Tar::default().symlink("A", "x").dir("a").end(), Rule::NameCollision);
    refused(&Tar::default().file("x", b"").hardlink("X", "x").end(), Rule::NameCollision);
    accepted(&Tar::default().file("a/x", b"").file("b/X", b"").file("caf\u{e9}", b"").end());
}

#[test]
fn truncated_archives_are_errors() {
    let whole = Tar::default().file("a", &[1; 600]).file("b", b"2").end();
    let blocks = (0..whole.len()).step_by(512).flat_map(|at| [at, at + 1, at + 511]);
    for length in blocks.chain((512..1024).step_by(41)) {
        let (_, result) = attempt(&whole[..length], &request());
        // A file that is shorter than a block isn't known to be a tar.
        assert!(result.is_err() || length < 512, "cut at {length}");
    }
    // Without end marker, and with half of one.
    refused(&whole[..whole.len() - 1024], Rule::Truncated);
    refused(&whole[..whole.len() - 512], Rule::Truncated);
}

#[test]
fn what_follows_the_end_is_zeros_or_refused() {
    let tar = Tar::default().file("a", b"1").end();
    let padded = [&tar[..], &[0; 10_240]].concat();
    accepted(&padded);
    accepted(&gzip(&padded));
    let second = Tar::default().file("b", b"2").end();
    refused(&[&tar[..], &second].concat(), Rule::TrailingData);
    refused(&gzip(&[&tar[..], &second].concat()), Rule::TrailingData);
    refused(&[&tar[..], b"x"].concat(), Rule::TrailingData);
    // One zero block, then more.
    let lone = Tar::default().file("a", b"1").data(&[0; 512]).file("b", b"2").end();
    refused(&lone, Rule::TrailingData);
    let empty = accepted(&[0; 1024]);
    assert_eq!((empty.0.listing().len(), empty.1.files), (0, 0));
}

#[test]
fn sparse_files_are_expanded_right() {
    let zeros = |n: usize| "\0".repeat(n);
    let expected = format!("{}abc{}de{}", zeros(1000), zeros(2000), zeros(500));
    let realsize = expected.len().to_string();
    let v00 = pax_records(&[
        ("GNU.sparse.size", &realsize),
        ("GNU.sparse.numblocks", "2"),
        ("GNU.sparse.offset", "1000"),
        ("GNU.sparse.numbytes", "3"),
        ("GNU.sparse.offset", "3003"),
        ("GNU.sparse.numbytes", "2"),
    ]);
    let v01 = pax_records(&[
        ("GNU.sparse.size", &realsize),
        ("GNU.sparse.name", "sparse"),
        ("GNU.sparse.map", "1000,3,3003,2"),
    ]);
    let v10 = pax_records(&[
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.name", "sparse"),
        ("GNU.sparse.realsize", &realsize),
    ]);
    let mut map = b"2\n1000\n3\n3003\n2\n".to_vec();
    map.resize(512, 0);
    map.extend_from_slice(b"abcde");
    let gnu = |header: &mut tar::Header| {
        let bytes = header.as_mut_bytes();
        for (at, value) in [(386, 1000), (398, 3), (410, 3003), (422, 2), (483, expected.len())] {
            bytes[at..at + 11].copy_from_slice(format!("{value:011o}").as_bytes());
        }
    };
    for archive in [
        Tar::default().extended(b'x', &v00).file("sparse", b"abcde"),
        Tar::default().extended(b'x', &v01).file("GNUSparseFile.1/sparse", b"abcde"),
        Tar::default().extended(b'x', &v10).file("GNUSparseFile.1/sparse", &map),
        Tar::default().raw(b'S', "sparse", b"abcde", gnu),
    ] {
        let (place, summary) = accepted(&archive.file("after", b"ok").end());
        assert!(place.text("sparse") == expected);
        assert_eq!((place.text("after").as_str(), summary.bytes), ("ok", expected.len() as u64 + 2));
    }
}

#[test]
fn sparse_maps_that_lie_are_refused() {
    let v01 = |size: &str, map: &str| {
        Tar::default().pax(&[("GNU.sparse.size", size), ("GNU.sparse.map", map)]).file("sparse", b"abcde").end()
    };
    accepted(&v01("100", "10,5"));
    for (size, map) in [
        ("100", "10,4"),
        ("100", "10,6"),
        ("12", "10,5"),
        ("100", "10,3,11,2"),
        ("100", "50,3,10,2"),
        ("100", "10,5,1"),
        ("18446744073709551615", "18446744073709551614,5"),
    ] {
        refused_member(&v01(size, map), Rule::Sparse, "sparse");
    }
    // The logical size counts, whatever is stored.
    refused_member(&v01("1099511627776", "10,5"), Rule::BudgetBytes, "sparse");
    refused(&v01("9223372036854775808", "10,5"), Rule::BudgetBytes);
    let on_link = Tar::default().pax(&[("GNU.sparse.size", "1"), ("GNU.sparse.map", "0,0")]).symlink("l", "x").end();
    refused(&on_link, Rule::Sparse);
}

#[test]
fn damaged_headers_are_refused() {
    let mut bytes = Tar::default().file("a", b"1").file("b", b"2").end();
    bytes[1024] ^= 1;
    refused(&bytes, Rule::Corrupt);
    refused(
        &Tar::default().file("a", b"").raw(b'0', "b", b"", |h| h.as_mut_bytes()[124..136].fill(0xff)).end(),
        Rule::Corrupt,
    );
}

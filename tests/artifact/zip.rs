//! zip: two descriptions of each member, and room to hide between them.

use plimsoll::artifact::{Format, Rule};

use crate::support::{Entry, Tar, accepted, gzip, refused, refused_member, refused_with, zip, zip_at, zst};

#[test]
fn ordinary_archives_unpack() {
    let text = "some text that repeats\n".repeat(10_000);
    let zstd =
        Entry { data: zst(text.as_bytes()), method: 93, local_method: 93, ..Entry::stored("d/zstd", text.as_bytes()) };
    let bytes = zip(&[
        Entry { mode: 0o040_755, ..Entry::stored("d/", b"") },
        Entry::deflated("d/deflated", text.as_bytes()).with(|e| e.mode = 0o100_755),
        Entry::stored("stored", b"abc"),
        Entry::stored("empty", b""),
        zstd,
        Entry::symlink("link", "d/deflated"),
        Entry::stored("dos", b"1").with(|e| (e.made_by, e.mode) = (0, 0)),
        Entry::stored("no-mode", b"1").with(|e| e.mode = 0),
    ]);
    let (place, summary) = accepted(&bytes);
    for path in ["d/deflated", "d/zstd", "link"] {
        assert!(place.text(path) == text, "{path}");
    }
    assert_eq!((place.text("stored").as_str(), place.text("empty").as_str()), ("abc", ""));
    assert_eq!(
        (place.mode("d"), place.mode("d/deflated"), place.mode("stored"), place.mode("dos")),
        (0o777, 0o777, 0o666, 0o666)
    );
    assert_eq!((summary.format, summary.inner, summary.files), (Format::Zip, None, 6));
    assert_eq!(accepted(&zip(&[])).1.files, 0);
}

/// CVE-2025-29787.
#[test]
fn an_earlier_symlink_redirects_no_later_file() {
    for target in ["../out_backup", "inside", "/tmp", "."] {
        let bytes = zip(&[Entry::symlink("l", target), Entry::stored("l/x", b"evil")]);
        let (_, result) = crate::support::attempt(&bytes, &crate::support::request());
        let Err(plimsoll::artifact::Error::Rejected(rejection)) = result else { panic!("{result:?}") };
        assert!(matches!(rejection.rule, Rule::ThroughLink | Rule::Symlink), "{rejection}");
    }
    // Also when the directory lists them the other way round.
    let mut later = zip(&[Entry::symlink("l", "../out_backup"), Entry::stored("l/x", b"evil")]);
    swap_directory_records(&mut later);
    refused_member(&later, Rule::ThroughLink, "l/x");
    refused_member(&zip(&[Entry::symlink("l", "../secret")]), Rule::Symlink, "l");
    accepted(&zip(&[Entry::symlink("l", "d"), Entry::stored("d/x", b"fine")]));
}

/// The two records of a central directory of a one-letter and a three-letter name.
fn swap_directory_records(bytes: &mut [u8]) {
    let start = bytes.windows(4).position(|w| w == b"PK\x01\x02").unwrap();
    bytes[start..start + 47 + 49].rotate_left(47);
}

#[test]
fn names_that_leave_are_refused_by_components() {
    for name in ["../secret", "../out_backup/x", "/etc/passwd", "a/../../x", "a\\..\\..\\x", "C:\\x", "a\0b", ".."] {
        let shown = name.replace('\0', "\\0");
        refused_member(&zip(&[Entry::stored("ok", b"1"), Entry::stored(name, b"x")]), Rule::Path, &shown);
    }
    refused(&zip(&[Entry::stored("", b"x")]), Rule::Path);
    let latin = Entry::stored("x", b"1").with(|e| {
        e.name = b"caf\xe9".to_vec();
        e.local_name = e.name.clone();
    });
    refused_member(&zip(&[latin]), Rule::Path, "caf\\xe9");
    accepted(&zip(&[Entry::stored("..a/b..", b"1"), Entry::stored("./c", b"1"), Entry::stored("日本", b"1")]));
}

#[test]
fn headers_that_contradict_each_other_are_refused() {
    let base = || Entry::deflated("name", b"some data, some data, some data");
    accepted(&zip(&[base()]));
    for entry in [
        base().with(|e| e.local_name = b"nama".to_vec()),
        base().with(|e| e.local_name = b"longer-name".to_vec()),
        base().with(|e| e.local_method = 0),
        base().with(|e| e.local_flags = 1 << 11),
        base().with(|e| e.local_flags = 8),
        base().with(|e| e.flags = 8),
        base().with(|e| e.local_size += 1),
        Entry::stored("name", b"abc").with(|e| (e.size, e.local_size) = (2, 2)),
        base().with(|e| (e.size, e.local_size) = (5, 5)),
        base().with(|e| (e.size, e.local_size) = (500, 500)),
        base().with(|e| e.data.push(0)),
        // The second name that Info-ZIP knows.
        base().with(|e| e.extra = unicode_name(&e.name, b"../evil")),
    ] {
        refused_member(&zip(&[Entry::stored("ok", b"1"), entry]), Rule::Disagreement, "name");
    }
    accepted(&zip(&[base().with(|e| e.extra = unicode_name(&e.name, &e.name))]));
    refused_member(&zip(&[base().with(|e| e.crc ^= 1)]), Rule::Corrupt, "name");
    let mut counted = zip(&[base()]);
    let at = counted.len() - 14;
    (counted[at], counted[at + 2]) = (2, 2);
    refused(&counted, Rule::Disagreement);
}

fn unicode_name(name: &[u8], other: &[u8]) -> Vec<u8> {
    let mut crc = flate2::Crc::new();
    crc.update(name);
    [&[0x75, 0x70, 5 + other.len() as u8, 0, 1][..], &crc.sum().to_le_bytes(), other].concat()
}

#[test]
fn kinds_and_names_that_contradict_are_refused() {
    for entry in
        [Entry::stored("d/", b"data"), Entry::stored("d", b"").with(|e| e.mode = 0o040_755), Entry::symlink("l/", "x")]
    {
        refused(&zip(&[entry]), Rule::Disagreement);
    }
    for mode in [0o020_666, 0o060_666, 0o010_644, 0o140_644] {
        refused_member(&zip(&[Entry::stored("odd", b"").with(|e| e.mode = mode)]), Rule::Kind, "odd");
    }
}

#[test]
fn two_entries_of_one_name_are_refused() {
    let rejection = refused_member(&zip(&[Entry::stored("a", b"1"), Entry::stored("a", b"2")]), Rule::Duplicate, "a");
    assert!(rejection.message.contains("readers differ"));
    refused(
        &zip(&[Entry::stored("a", b"1"), Entry::stored("./a", b"2"), Entry::symlink("a/", "x")]),
        Rule::Disagreement,
    );
    refused(&zip(&[Entry::stored("A", b"1"), Entry::stored("a", b"2")]), Rule::NameCollision);
    refused(&zip(&[Entry::stored("caf\u{e9}/x", b"1"), Entry::symlink("cafe\u{301}", ".")]), Rule::NameCollision);
}

#[test]
fn overlapping_entries_are_refused() {
    // Two names for one entry's data.
    let shared = [Entry::stored("a", b"data"), Entry::stored("b", b"data").with(|e| e.offset = Some(0))];
    refused(&zip(&shared), Rule::Overlap);
    // One entry whose data holds another whole entry (the kernel of "a better zip bomb").
    let inner = zip(&[Entry::stored("inner", b"data")]);
    let local = &inner[..30 + 5 + 4];
    let quoted = [Entry::stored("outer", local), Entry::stored("inner", b"data").with(|e| e.offset = Some(35))];
    refused(&zip(&quoted), Rule::Overlap);
    refused(&zip(&[Entry::stored("a", b"data").with(|e| e.offset = Some(4_000_000))]), Rule::TrailingData);
    accepted(&zip(&[Entry::stored("outer", local), Entry::stored("inner", b"data")]));
}

/// A quadratic check takes minutes here, the right one a moment. Nothing is timed: the suite would hang.
#[test]
fn many_overlapping_entries_are_refused_in_near_linear_time() {
    let mut entries = vec![Entry::stored("kernel", &[0; 1000])];
    for n in 0..60_000 {
        entries.push(Entry::stored(&format!("{n:05}"), b"").with(|e| e.offset = Some(0)));
    }
    refused(&zip(&entries), Rule::Overlap);
    let many: Vec<Entry> = (0..5_000).map(|n| Entry::stored(&format!("{:02}/{n:05}", n % 100), b"")).collect();
    assert_eq!(accepted(&zip(&many)).1.files, 5_000);
}

#[test]
fn joined_and_prefixed_archives_are_refused() {
    let one = zip(&[Entry::stored("one", b"1")]);
    let two = zip(&[Entry::stored("two", b"2")]);
    refused(&[&one[..], &two].concat(), Rule::TrailingData);
    // With offsets that fit the whole, many readers see the second archive only.
    let fitted = zip_at(one.len() as u32, &[Entry::stored("two", b"2")]);
    refused(&[&one[..], &fitted].concat(), Rule::TrailingData);
    refused(&[&b"#!/bin/sh\nexit\n"[..], &one].concat(), Rule::TrailingData);
    let shifted = zip_at(15, &[Entry::stored("two", b"2")]);
    refused(&[&b"#!/bin/sh\nexit\n"[..], &shifted].concat(), Rule::TrailingData);
    refused(&[&one[..], b"x"].concat(), Rule::Truncated);
    refused(&[&b"PK\x03\x04"[..], &one].concat(), Rule::TrailingData);
    // A hole between two entries.
    let mut gap = Entry::stored("a", b"1");
    gap.descriptor = b"hidden".to_vec();
    refused_member(&zip(&[gap.clone(), Entry::stored("b", b"2")]), Rule::TrailingData, "a");
    refused_member(&zip(&[gap]), Rule::TrailingData, "a");
    for length in [one.len() - 1, one.len() - 22, 30, 4] {
        refused(&one[..length], Rule::Truncated);
    }
}

#[test]
fn a_second_end_record_is_refused_a_comment_is_not() {
    let commented = |comment: &[u8]| {
        let mut bytes = zip(&[Entry::stored("a", b"1")]);
        let at = bytes.len() - 2;
        bytes[at..].copy_from_slice(&(comment.len() as u16).to_le_bytes());
        bytes.extend_from_slice(comment);
        bytes
    };
    accepted(&commented(b"built by a job"));
    accepted(&commented(&[b'x'; 65_535]));
    let other = zip(&[Entry::stored("b", b"2")]);
    refused(&commented(&other), Rule::TrailingData);
    refused(&commented(&other[other.len() - 22..]), Rule::TrailingData);
    refused(&commented(b"PK\x05\x06"), Rule::TrailingData);
    // A zip as a stored member has an end record too, but in its place.
    accepted(&zip(&[Entry::stored("inner.zip", &other), Entry::stored("x", b"")]));
    accepted(&zip(&[Entry::stored("x", b""), Entry::stored("inner.zip", &other)]));
}

#[test]
fn data_descriptors_are_read_by_the_central_directory() {
    let with = |wide: bool, signature: bool, change: fn(&mut Vec<u8>)| {
        let deferred = |name: &str, data: &[u8]| {
            Entry::deflated(name, data).with(|e| {
                (e.flags, e.local_flags) = (8, 8);
                let mut descriptor = if signature { b"PK\x07\x08".to_vec() } else { Vec::new() };
                descriptor.extend_from_slice(&e.crc.to_le_bytes());
                for size in [e.data.len() as u64, u64::from(e.size)] {
                    descriptor.extend_from_slice(&size.to_le_bytes()[..if wide { 8 } else { 4 }]);
                }
                change(&mut descriptor);
                e.descriptor = descriptor;
            })
        };
        // Data that looks like a descriptor and a header must not end the entry.
        zip(&[deferred("a", b"PK\x07\x08 PK\x03\x04 PK\x01\x02"), deferred("b", b""), Entry::stored("c", b"3")])
    };
    for (wide, signature) in [(false, true), (false, false), (true, true), (true, false)] {
        let (place, _) = accepted(&with(wide, signature, |_| ()));
        assert_eq!(place.text("a"), "PK\x07\x08 PK\x03\x04 PK\x01\x02");
        refused_member(&with(wide, signature, |d| *d.last_mut().unwrap() ^= 1), Rule::Disagreement, "a");
        refused_member(&with(wide, signature, |d| d.push(0)), Rule::TrailingData, "a");
        refused_member(&with(wide, signature, Vec::clear), Rule::TrailingData, "a");
    }
}

#[test]
fn encryption_and_unknown_methods_are_named() {
    let encrypted = Entry::stored("secret", b"xxxxxxxxxxxxabc").with(|e| (e.flags, e.local_flags) = (1, 1));
    assert!(refused_member(&zip(&[encrypted]), Rule::Encrypted, "secret").message.contains("encrypted"));
    for (method, name) in [(12, "bzip2"), (9, "deflate64"), (14, "lzma"), (95, "xz"), (4242, "unknown")] {
        let entry = Entry::stored("m", b"data").with(|e| (e.method, e.local_method) = (method, method));
        let rejection = refused_member(&zip(&[entry]), Rule::Method, "m");
        assert!(rejection.message.contains(name) && rejection.message.contains(&method.to_string()), "{rejection}");
    }
    refused(&zip(&[Entry::stored("m", b"data").with(|e| (e.method, e.local_method) = (99, 99))]), Rule::Encrypted);
}

#[test]
fn damaged_data_is_refused() {
    let text = b"some data, some data, some data, some data";
    for damage in 0..12 {
        let entry = Entry::deflated("x", text).with(|e| e.data[damage] ^= 0x55);
        let (_, result) = crate::support::attempt(&zip(&[entry]), &crate::support::request());
        assert!(result.is_err(), "byte {damage}");
    }
    refused_member(&zip(&[Entry::deflated("x", text).with(|e| e.data.truncate(5))]), Rule::Truncated, "x");
    let zstd = Entry { data: zst(text), method: 93, local_method: 93, ..Entry::stored("x", text) };
    refused_member(&zip(&[zstd.with(|e| e.data.truncate(20))]), Rule::Truncated, "x");
}

#[test]
fn zip64_works_and_contradictions_in_it_are_refused() {
    // Sizes in the extra field of the local header only, as writers do that don't know the size beforehand.
    let large = Entry::stored("large", b"content").with(|e| {
        e.local_extra = [&[1, 0, 16, 0][..], &7_u64.to_le_bytes(), &7_u64.to_le_bytes()].concat();
        e.local_sentinel = true;
    });
    assert_eq!(accepted(&zip(std::slice::from_ref(&large))).0.text("large"), "content");
    refused_member(&zip(&[large.clone().with(|e| e.local_extra[4] = 8)]), Rule::Disagreement, "large");
    refused_member(&zip(&[large.with(|e| e.local_extra.clear())]), Rule::Corrupt, "large");
    // End records as a writer makes them that always does zip64.
    let plain = zip(&[Entry::stored("a", b"1")]);
    let (body, end) = plain.split_at(plain.len() - 22);
    let start = u64::from(u32::from_le_bytes(end[16..20].try_into().unwrap()));
    let zip64 = |change: fn(&mut Vec<u8>)| {
        let mut record = b"PK\x06\x06".to_vec();
        record.extend_from_slice(&44_u64.to_le_bytes());
        record.extend_from_slice(&[45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        for value in [1, 1, body.len() as u64 - start, start] {
            record.extend_from_slice(&value.to_le_bytes());
        }
        record.extend_from_slice(b"PK\x06\x07\0\0\0\0");
        record.extend_from_slice(&(body.len() as u64).to_le_bytes());
        record.extend_from_slice(&[1, 0, 0, 0]);
        record.extend_from_slice(&end[..8]);
        record.extend_from_slice(&[0xff; 12]);
        record.extend_from_slice(&[0, 0]);
        change(&mut record);
        [body, &record].concat()
    };
    assert_eq!(accepted(&zip64(|_| ())).0.text("a"), "1");
    // The small record contradicts, the locator points elsewhere, the counts differ.
    refused(&zip64(|r| r[76 + 16] = 7), Rule::Disagreement);
    refused(&zip64(|r| r[56 + 8] ^= 1), Rule::TrailingData);
    refused(&zip64(|r| r[32] = 2), Rule::Format);
    refused(&zip64(|r| (r[24], r[32]) = (2, 2)), Rule::Disagreement);
    refused(&zip64(|r| r[48] ^= 1), Rule::TrailingData);
    refused(&zip64(|r| r[47] = 0xff), Rule::TrailingData);
}

/// An upload of one tar through an artifact store that packs everything as zip.
#[test]
fn a_zip_of_exactly_one_tar_is_unpacked_through() {
    let tar = Tar::default().file("run.sh", b"echo").raw(b'0', "bin", b"x", |h| h.set_mode(0o755)).end();
    for (inner, format) in [
        (tar.clone(), Format::Tar),
        (gzip(&tar), Format::TarGz),
        (zst(&tar), Format::TarZst),
        (crate::support::xz(&tar), Format::TarXz),
    ] {
        for entry in [Entry::stored("any/name", &inner), Entry::deflated("any/name", &inner)] {
            let (place, summary) = accepted(&zip(&[entry]));
            assert_eq!(place.listing().into_keys().collect::<Vec<_>>(), ["bin", "run.sh"]);
            assert_eq!((summary.format, summary.inner, place.mode("bin")), (Format::Zip, Some(format), 0o777));
            assert_eq!(summary.packing(), format!("zip({format})"));
        }
    }
    refused(&zip(&[Entry::deflated("t", &Tar::default().file("../x", b"").end())]), Rule::Path);
    let cut = zip(&[Entry::stored("t", &gzip(&tar)[..40])]);
    assert_eq!(accepted(&cut).0.listing().len(), 1, "not a tar as far as one can tell: a file");
}

#[test]
fn deeper_nesting_is_left_alone() {
    let tar = Tar::default().file("x", b"").end();
    // Two members; a tar in a tar; a zip in a zip; a tar in a zip in a zip; a gzip that holds no tar.
    let two = zip(&[Entry::stored("a.tar", &tar), Entry::stored("b", b"")]);
    assert_eq!(accepted(&two).0.listing().into_keys().collect::<Vec<_>>(), ["a.tar", "b"]);
    let tar_in_tar = Tar::default().file("inner.tar", &tar).end();
    assert_eq!(accepted(&tar_in_tar).0.listing().into_keys().collect::<Vec<_>>(), ["inner.tar"]);
    assert_eq!(
        accepted(&zip(&[Entry::stored("t", &tar_in_tar)])).0.listing().into_keys().collect::<Vec<_>>(),
        ["inner.tar"]
    );
    let nested = zip(&[Entry::stored("inner.zip", &zip(&[Entry::stored("t", &tar)]))]);
    assert_eq!(accepted(&nested).0.listing().into_keys().collect::<Vec<_>>(), ["inner.zip"]);
    for content in [gzip(b"{}"), vec![0; 2048], gzip(&[0; 2048]), b"text".to_vec(), Vec::new()] {
        let (place, summary) = accepted(&zip(&[Entry::deflated("data", &content)]));
        assert_eq!((place.listing()["data"].clone(), summary.inner), (format!("{} bytes", content.len()), None));
    }
}

#[test]
fn sizes_beyond_32_bits_are_an_error_not_a_wrap() {
    // The central directory says 4 GiB and more by zip64; the data isn't there.
    let entry = Entry::stored("huge", b"").with(|e| {
        (e.size, e.local_size) = (u32::MAX, u32::MAX);
        let field = [&[1, 0, 8, 0][..], &(5_u64 << 32).to_le_bytes()].concat();
        (e.extra, e.local_extra) = (field.clone(), field);
    });
    let mut request = crate::support::request();
    (request.budget.bytes, request.budget.ratio) = (u64::MAX, u64::MAX);
    let deflated = entry.clone().with(|e| {
        (e.method, e.local_method) = (8, 8);
        e.data = vec![3, 0];
    });
    for entry in [entry, deflated] {
        let stored = entry.method == 0;
        let bytes = zip(&[entry]);
        refused_with(&bytes, &request, Rule::Disagreement);
        refused_member(&bytes, if stored { Rule::Disagreement } else { Rule::BudgetBytes }, "huge");
    }
}

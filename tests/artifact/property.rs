//! Whatever bytes come: no panic, nothing outside, and after a refusal nothing inside.

use std::path::Path;

use plimsoll::artifact::Budget;
use proptest::prelude::*;

use crate::support::{Entry, Tar, attempt, gzip, request, zip, zst};

fn names() -> impl Strategy<Value = String> {
    let component = prop_oneof![
        4 => "[ab]{1,2}",
        1 => Just("..".to_owned()),
        1 => Just(".".to_owned()),
        1 => Just(String::new()),
        1 => Just("A".to_owned()),
        1 => "\\PC{1,4}",
    ];
    prop::collection::vec(component, 1..4).prop_map(|components| components.join("/"))
}

fn tars() -> impl Strategy<Value = Vec<u8>> {
    let member =
        (prop::sample::select(b"0125LKxgS73\0".to_vec()), names(), names(), prop::collection::vec(any::<u8>(), 0..600));
    prop::collection::vec(member, 0..12).prop_map(|members| {
        let mut tar = Tar::default();
        for (kind, name, target, data) in members {
            let data = match kind {
                b'1' | b'2' | b'5' => Vec::new(),
                b'x' => crate::support::pax_records(&[("path", &name), ("size", "7")]),
                b'L' | b'K' => name.clone().into_bytes(),
                _ => data,
            };
            tar = tar.raw(kind, &name, &data, |header| {
                let target = &target.as_bytes()[..target.len().min(100)];
                header.as_mut_bytes()[157..157 + target.len()].copy_from_slice(target);
            });
        }
        tar.end()
    })
}

fn zips() -> impl Strategy<Value = Vec<u8>> {
    let entry = (names(), names(), 0..4_u8, any::<bool>());
    prop::collection::vec(entry, 0..8).prop_map(|entries| {
        let entries: Vec<Entry> = entries
            .into_iter()
            .map(|(name, target, kind, deflated)| match kind {
                0 => Entry::symlink(&name, &target),
                1 => Entry::stored(&format!("{name}/"), b""),
                _ if deflated => Entry::deflated(&name, target.as_bytes()),
                _ => Entry::stored(&name, target.as_bytes()),
            })
            .collect();
        zip(&entries)
    })
}

/// Every link of an accepted tree leads to a place inside, also as the kernel follows it.
fn check(bytes: &[u8]) {
    let (place, result) = attempt(bytes, &request());
    if result.is_err() {
        return;
    }
    let root = place.out().canonicalize().unwrap();
    for (path, kind) in place.listing() {
        if kind.starts_with("->")
            && let Ok(real) = root.join(&path).canonicalize()
        {
            assert!(real.starts_with(&root), "{path} {kind} leads to {}", real.display());
        }
        assert!(Path::new(&path).components().count() <= Budget::default().depth as usize);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tars_of_odd_members(bytes in tars()) {
        check(&bytes);
        check(&gzip(&bytes));
    }

    #[test]
    fn zips_of_odd_members(bytes in zips()) {
        check(&bytes);
    }

    #[test]
    fn damaged_archives(
        bytes in prop_oneof![tars(), zips(), tars().prop_map(|t| gzip(&t)), tars().prop_map(|t| zst(&t)), tars().prop_map(|t| zip(&[Entry::deflated("t", &t)]))],
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        shorten in any::<bool>(),
    ) {
        let mut bytes = bytes;
        prop_assume!(!bytes.is_empty());
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if shorten {
            bytes.truncate(cut.index(bytes.len()));
        }
        check(&bytes);
    }

    #[test]
    fn any_bytes_behind_a_magic(
        magic in prop::sample::select(vec![&b"PK\x03\x04"[..], b"PK\x05\x06", b"\x1f\x8b\x08\0", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b""]),
        rest in prop::collection::vec(any::<u8>(), 0..800),
    ) {
        check(&[magic, &rest].concat());
    }
}

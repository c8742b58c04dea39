//! Layers laid over each other, as the specification has it and as an attacker would.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;

use proptest::prelude::*;

use super::*;

/// A member: path, and what it is. `/` at the end: a directory; `-> x`: a symbolic link; `=> x`: a hard link; else content.
pub type Entry<'a> = (&'a str, &'a str);

pub fn tar_of(members: &[Entry<'_>]) -> Vec<u8> {
    let mut builder = ::tar::Builder::new(Vec::new());
    for (name, what) in members {
        let mut header = ::tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(0);
        let (kind, link, content) = if name.ends_with('/') {
            (::tar::EntryType::Directory, None, "")
        } else if let Some(target) = what.strip_prefix("-> ") {
            (::tar::EntryType::Symlink, Some(target), "")
        } else if let Some(target) = what.strip_prefix("=> ") {
            (::tar::EntryType::Link, Some(target), "")
        } else {
            (::tar::EntryType::Regular, None, *what)
        };
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        if let Some(link) = link {
            header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        }
        header.set_cksum();
        builder.append(&header, content.as_bytes()).unwrap();
    }
    builder.into_inner().unwrap()
}

fn applied_with(
    tars: &[Vec<u8>],
    budget: Budget,
    change: impl FnOnce(&mut Request),
) -> (tempfile::TempDir, Result<Applied, Error>) {
    let dir = tempfile::tempdir().unwrap();
    let (mut files, mut layers) = (Vec::new(), Vec::new());
    for tar in tars {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"something before").unwrap();
        file.write_all(tar).unwrap();
        let (offset, length) = (16, tar.len() as u64);
        layers.push(Layer { file: files.len(), offset, length, sha256: None, diff_id: Digest::of(tar) });
        files.push(file);
    }
    let mut request = Request { layers, budget };
    change(&mut request);
    let result = apply(&files, File::open(dir.path()).unwrap().into(), &request);
    (dir, result)
}

/// Every path in a tree: `/`, `-> target` or content.
pub fn listing(root: &std::path::Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut todo = vec![root.to_owned()];
    while let Some(directory) = todo.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            let meta = fs::symlink_metadata(&path).unwrap();
            let what = if meta.is_symlink() {
                format!("-> {}", fs::read_link(&path).unwrap().display())
            } else if meta.is_dir() {
                todo.push(path);
                "/".to_owned()
            } else {
                fs::read_to_string(&path).unwrap()
            };
            found.insert(name, what);
        }
    }
    found
}

/// What comes of layers, without directories that only hold something.
fn image(layers: &[&[Entry<'_>]]) -> Vec<String> {
    let tars: Vec<_> = layers.iter().map(|layer| tar_of(layer)).collect();
    let (dir, result) = applied_with(&tars, Budget::default(), |_| ());
    let applied = result.unwrap_or_else(|e| panic!("{layers:?}: {e}"));
    let found = listing(dir.path());
    assert_eq!(applied.files, found.values().filter(|w| *w != "/" && !w.starts_with("->")).count() as u64);
    let holds = |name: &str| found.keys().any(|k| k.starts_with(&format!("{name}/")));
    found
        .iter()
        .filter(|(name, what)| *what != "/" || !holds(name))
        .map(|(name, what)| format!("{name} {what}"))
        .collect()
}

fn refused(layers: &[&[Entry<'_>]]) -> Rejection {
    let tars: Vec<_> = layers.iter().map(|layer| tar_of(layer)).collect();
    let (dir, result) = applied_with(&tars, Budget::default(), |_| ());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing stays");
    match result {
        Err(Error::Rejected(rejection)) => rejection,
        other => panic!("{layers:?}: {other:?}"),
    }
}

#[test]
fn a_whiteout_hides_what_lower_layers_have() {
    let lower: &[Entry] = &[("d/", ""), ("d/a", "1"), ("d/b", "2"), ("d/e/f", "3"), ("link", "-> d")];
    assert_eq!(image(&[lower, &[("d/.wh.a", "")]]), ["d/b 2", "d/e/f 3", "link -> d"]);
    assert_eq!(image(&[lower, &[(".wh.d", "")]]), ["link -> d"]);
    assert_eq!(image(&[lower, &[(".wh.link", ""), ("d/.wh.e", "")]]), ["d/a 1", "d/b 2"]);
    assert_eq!(image(&[lower, &[("no/such/.wh.thing", ""), (".wh.nothing", "")]]), image(&[lower]));
    // And what comes later comes back.
    assert_eq!(image(&[lower, &[(".wh.d", "")], &[("d/new", "4")]]), ["d/new 4", "link -> d"]);
}

#[test]
fn a_whiteout_hides_nothing_of_its_own_layer_wherever_it_stands() {
    let lower: &[Entry] = &[("d/a", "old"), ("d/b", "old")];
    let members: [Entry; 3] = [(".wh.d", ""), ("d/", ""), ("d/a", "new")];
    for order in [[0, 1, 2], [1, 0, 2], [1, 2, 0]] {
        let layer: Vec<_> = order.iter().map(|&n| members[n]).collect();
        assert_eq!(image(&[lower, &layer]), ["d/a new"], "{order:?}");
    }
    let members: [Entry; 3] = [("d/.wh..wh..opq", ""), ("d/a", "new"), ("d/c", "new")];
    for order in [[0, 1, 2], [1, 0, 2], [1, 2, 0]] {
        let layer: Vec<_> = order.iter().map(|&n| members[n]).collect();
        assert_eq!(image(&[lower, &layer]), ["d/a new", "d/c new"], "{order:?}");
    }
    assert_eq!(image(&[lower, &[("d/.wh..wh..opq", "")]]), ["d /"]);
    assert_eq!(image(&[lower, &[("x", "1"), (".wh..wh..opq", "")]]), ["x 1"]);
}

#[test]
fn anything_replaces_anything_but_a_directory_keeps_what_it_has() {
    let lower: &[Entry] = &[("d/a", "1"), ("f", "2"), ("l", "-> d")];
    assert_eq!(image(&[lower, &[("d", "file")]]), ["d file", "f 2", "l -> d"]);
    assert_eq!(image(&[lower, &[("d", "-> f")]]), ["d -> f", "f 2", "l -> d"]);
    assert_eq!(image(&[lower, &[("f/", ""), ("f/x", "3")]]), ["d/a 1", "f/x 3", "l -> d"]);
    assert_eq!(image(&[lower, &[("f/x", "3")]]), ["d/a 1", "f/x 3", "l -> d"]);
    assert_eq!(image(&[lower, &[("d/", "")]]), ["d/a 1", "f 2", "l -> d"]);
    assert_eq!(image(&[lower, &[("l", "now a file")]]), ["d/a 1", "f 2", "l now a file"]);
    assert_eq!(image(&[lower, &[("l/", ""), ("l/x", "3")]]), ["d/a 1", "f 2", "l/x 3"]);
}

#[test]
fn paths_lead_through_the_images_own_links_and_never_out_of_it() {
    let lower: &[Entry] =
        &[("usr/lib/a", "1"), ("lib", "-> usr/lib"), ("abs", "-> /usr/lib"), ("up", "-> ../../../../usr")];
    assert_eq!(
        image(&[lower, &[("lib/b", "2"), ("abs/c", "3"), ("up/d", "4"), ("lib/.wh.a", "")]]),
        ["abs -> /usr/lib", "lib -> usr/lib", "up -> ../../../../usr", "usr/d 4", "usr/lib/b 2", "usr/lib/c 3"]
    );
    // A link to the host's files means the image's own.
    assert_eq!(image(&[&[("etc", "-> /etc"), ("e", "-> /tmp/x"), ("e/y", "1")]]).last().unwrap(), "tmp/x/y 1");
    for circle in [&[("a", "-> b"), ("b", "-> a"), ("a/x", "1")][..], &[("a", "-> a/a"), ("a/x", "1")]] {
        assert_eq!(refused(&[circle]).rule, Rule::ThroughLink);
    }
    assert_eq!(refused(&[&[("f", "1"), ("f/x", "2")]]).rule, Rule::ThroughLink);
}

#[test]
fn hard_links_reach_across_layers_and_outlive_their_targets() {
    let lower: &[Entry] = &[("a", "1"), ("l", "-> a")];
    assert_eq!(image(&[lower, &[("b", "=> a"), (".wh.a", "")]]), ["b 1", "l -> a"]);
    assert_eq!(image(&[lower, &[("b", "=> a")], &[("a", "2")]]), ["a 2", "b 1", "l -> a"]);
    assert_eq!(image(&[lower, &[("m", "=> l")]]), ["a 1", "l -> a", "m -> a"]);
    // The target makes room for the directory that the link goes to.
    assert_eq!(image(&[lower, &[("a/b", "=> a")]]), ["a/b 1", "l -> a"]);
    let tars = [tar_of(lower), tar_of(&[("b", "=> a"), ("d/c", "=> /a")])];
    let (dir, result) = applied_with(&tars, Budget::default(), |_| ());
    result.unwrap();
    assert_eq!(fs::metadata(dir.path().join("d/c")).unwrap().nlink(), 3);
    for (layer, rule) in [
        (&[("b", "=> nothing")][..], Rule::Hardlink),
        (&[("b", "=> .")], Rule::Hardlink),
        (&[("a", "=> a")], Rule::Hardlink),
        (&[("b", "=> ../../etc/passwd")], Rule::Hardlink),
    ] {
        assert_eq!(refused(&[lower, layer]).rule, rule, "{layer:?}");
    }
    assert_eq!(refused(&[lower, &[("b", "=> a")], &[(".wh.a", ""), ("c", "=> a")]]).rule, Rule::Hardlink);
}

#[test]
fn names_that_mean_something_else_and_names_that_climb() {
    assert_eq!(image(&[&[("/etc/x", "1"), ("//y", "2"), ("/", ""), ("./", "")]]), ["etc/x 1", "y 2"]);
    assert_eq!(
        image(&[&[(".wh..wh.plnk/", ""), (".wh..wh.plnk/1.2", "x"), (".wh..wh.aufs", ""), ("a", "1")]]),
        ["a 1"]
    );
    assert_eq!(
        image(&[&[(".plimsoll-layers/x", "1"), (".plimsoll-layers-0", "2")]]),
        [".plimsoll-layers-0 2", ".plimsoll-layers/x 1"]
    );
    for name in [".wh.", "d/.wh..", ".wh...", "../x", "a/../../x", ".wh.d/x"] {
        assert_eq!(refused(&[&[("d/x", "1")], &[(name, "")]]).rule, Rule::Path, "{name}");
    }
    assert_eq!(refused(&[&[("a", "1")], &[(".wh.a", "content")]]).rule, Rule::Disagreement);
}

#[test]
fn digests_of_the_content_are_compared_and_compressions_told_by_content() {
    let tar = tar_of(&[("a", "1")]);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&tar).unwrap();
    for packed in [gzip.finish().unwrap(), zstd::encode_all(&tar[..], 1).unwrap()] {
        let diff_id = Digest::of(&tar);
        let (dir, result) =
            applied_with(std::slice::from_ref(&packed), Budget::default(), |r| r.layers[0].diff_id = diff_id);
        assert_eq!((result.unwrap().files, listing(dir.path()).len()), (1, 1));
        let (_, result) = applied_with(&[packed], Budget::default(), |_| ());
        assert!(matches!(result, Err(Error::Rejected(r)) if r.rule == Rule::Sha256 && r.message.contains("layer 1")));
    }
    for other in [&b"\0asm"[..], b"PK\x03\x04", b""] {
        assert!(matches!(applied_with(&[other.to_vec()], Budget::default(), |_| ()).1, Err(Error::Rejected(_))));
    }
}

#[test]
fn budgets_are_over_all_layers_and_over_what_is_hidden() {
    let layers: Vec<_> = (0..10).map(|n| tar_of(&[("same", "1234567890"), (&format!("{n}"), "x")])).collect();
    let with = |budget| applied_with(&layers, budget, |_| ()).1;
    assert_eq!(with(Budget::default()).unwrap(), Applied { files: 11, bytes: 110 });
    for (budget, rule) in [
        (Budget { bytes: 100, ..Budget::default() }, Rule::BudgetBytes),
        (Budget { files: 15, ..Budget::default() }, Rule::BudgetFiles),
    ] {
        assert!(matches!(with(budget), Err(Error::Rejected(r)) if r.rule == rule));
    }
    // Through links a path gets deeper than it is written.
    let deep = "d/".repeat(40);
    assert_eq!(
        refused(&[&[(&deep, ""), ("l", &format!("-> {deep}")), (&format!("l/{deep}x"), "1")]]).rule,
        Rule::BudgetDepth
    );
    let (_, result) = applied_with(&[tar_of(&[])], Budget::default(), |r| r.layers[0].file = 7);
    assert!(matches!(result, Err(Error::Rejected(r)) if r.rule == Rule::Missing));
}

fn names() -> impl Strategy<Value = String> {
    let name = prop::sample::select(vec!["a", "b", "c", ".wh.a", ".wh.b", ".wh..wh..opq", "..", "."]);
    prop::collection::vec(name, 1..4).prop_map(|names| names.join("/"))
}

proptest! {
    #[test]
    fn whatever_layers_say_it_is_a_tree_or_nothing(
        layers in prop::collection::vec(prop::collection::vec((names(), 0u8..4, names()), 0..8), 1..4)
    ) {
        let outside = tempfile::tempdir().unwrap();
        let before = fs::read_dir(outside.path()).unwrap().count();
        let tars: Vec<_> = layers.iter().map(|layer| {
            let members: Vec<(String, String)> = layer.iter().map(|(name, kind, other)| match kind {
                0 => (format!("{name}/"), String::new()),
                1 => (name.clone(), format!("-> {other}")),
                2 => (name.clone(), format!("=> {other}")),
                _ => (name.clone(), if name.contains(".wh.") { String::new() } else { "content".to_owned() }),
            }).collect();
            tar_of(&members.iter().map(|(n, w)| (n.as_str(), w.as_str())).collect::<Vec<_>>())
        }).collect();
        let (dir, result) = applied_with(&tars, Budget::default(), |_| ());
        let found = listing(dir.path());
        match result {
            Ok(applied) => {
                let files = found.values().filter(|what| *what == "content").count() as u64;
                prop_assert_eq!(applied.files, files);
                prop_assert!(found.keys().all(|name| !name.contains(".wh.") && !name.contains(".plimsoll")));
            }
            Err(Error::Rejected(_)) => prop_assert!(found.is_empty()),
            Err(failed) => prop_assert!(false, "{failed}: {}", crate::text::chain(&failed)),
        }
        prop_assert_eq!(before, 0);
    }
}

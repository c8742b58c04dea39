//! The unpacking helper in its real jail: every format, refusals, and what the jail itself forbids.
//!
//! The test program is also the helper: it is started again with an internal word, as the runner starts itself. As root
//! everything runs a second time as a plain user.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "tests"
)]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use plimsoll::artifact::helper::apply_in_helper;
use plimsoll::artifact::layers::{self, Applied, Layer};
use plimsoll::artifact::{Acquire, Budget, Digest, Error, Purpose, Rule, Summary, acquire};
use plimsoll::env::Env;
use plimsoll::image::Cache;
use plimsoll::run::{image, unpacker};
use plimsoll::spec::ImageSource;

/// Says that this process is the plain user's turn.
const PLAIN: &str = "--as-a-plain-user";

fn main() -> ExitCode {
    if let Some(code) = plimsoll::internal_entry() {
        return code;
    }
    let (plain, rest): (Vec<String>, Vec<String>) = std::env::args().partition(|argument| argument == PLAIN);
    if let Err(blocker) = plimsoll::backend::jail::userns_probe(unpacker::ENTRY) {
        let must = std::env::var("PLIMSOLL_MUST_WORK").unwrap_or_default();
        eprintln!("skipped: no jail on this host: {blocker}; fix: {}", blocker.help);
        let demanded = must.split(',').any(|name| matches!(name, "wasm" | "all"));
        return if demanded { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    let tests: [(&str, fn()); 8] = [
        ("every_format_unpacks_in_the_jail", every_format_unpacks_in_the_jail),
        ("a_refusal_comes_out_of_the_jail_and_nothing_stays", a_refusal_comes_out_of_the_jail_and_nothing_stays),
        ("many_files_in_many_directories", many_files_in_many_directories),
        ("the_largest_windows_fit_in_the_jail", the_largest_windows_fit_in_the_jail),
        ("a_file_that_only_its_owner_may_read", a_file_that_only_its_owner_may_read),
        ("layers_are_applied_in_the_jail", layers_are_applied_in_the_jail),
        ("a_layer_that_is_refused_leaves_nothing", a_layer_that_is_refused_leaves_nothing),
        ("an_image_is_unpacked_once_and_found_again", an_image_is_unpacked_once_and_found_again),
    ];
    let mut trials: Vec<Trial> = tests
        .into_iter()
        .map(|(name, test)| {
            Trial::test(name, move || {
                std::panic::catch_unwind(test).map_err(|panic| {
                    let text = panic.downcast_ref::<String>().cloned();
                    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&s| s.to_owned()));
                    Failed::from(text.unwrap_or_else(|| "it panicked".to_owned()))
                })
            })
        })
        .collect();
    if plain.is_empty() && rustix::process::geteuid().is_root() {
        trials.push(Trial::test("everything_again_as_a_plain_user", as_a_plain_user));
    }
    libtest_mimic::run(&Arguments::from_iter(rest), trials).exit_code()
}

fn as_a_plain_user() -> Result<(), Failed> {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    const USER: u32 = 54_322;
    let home = tempfile::tempdir()?;
    std::os::unix::fs::chown(home.path(), Some(USER), Some(USER))?;
    let program = home.path().join("tests");
    fs::copy(std::env::current_exe()?, &program)?;
    fs::set_permissions(&program, PermissionsExt::from_mode(0o755))?;
    let mut command = std::process::Command::new(&program);
    command.arg(PLAIN).uid(USER).gid(USER).env("HOME", home.path()).env("TMPDIR", home.path()).current_dir(home.path());
    let ran = command.output()?;
    let said = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    print!("{said}");
    if ran.status.success() { Ok(()) } else { Err(format!("failed as a plain user:\n{said}").into()) }
}

/// Unpacks bytes by the jailed helper; the directory is removed with the place.
fn unpack(bytes: &[u8], change: impl FnOnce(&Path)) -> (tempfile::TempDir, Result<Summary, Error>) {
    let place = tempfile::tempdir().unwrap();
    let (path, out) = (place.path().join("artifact"), place.path().join("out"));
    fs::write(&path, bytes).unwrap();
    change(&path);
    fs::create_dir(&out).unwrap();
    let what = Acquire {
        path: &path,
        purpose: Purpose::Artifact,
        sha256: None,
        budget: Budget::default(),
        deadline: Duration::from_secs(300),
        exclude: &[],
    };
    let result = acquire(&what, File::open(&out).unwrap().as_fd(), &AtomicBool::new(false), unpacker::start);
    (place, result)
}

fn tar(members: impl IntoIterator<Item = (String, Vec<u8>)>) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (name, content) in members {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o755);
        header.set_size(content.len() as u64);
        tar.append_data(&mut header, name, &content[..]).unwrap();
    }
    let mut link = tar::Header::new_gnu();
    link.set_entry_type(tar::EntryType::Symlink);
    link.set_size(0);
    tar.append_link(&mut link, "link", "a/file").unwrap();
    let mut link = tar::Header::new_gnu();
    link.set_entry_type(tar::EntryType::Link);
    link.set_size(0);
    tar.append_link(&mut link, "b/hard", "a/file").unwrap();
    tar.into_inner().unwrap()
}

fn small() -> Vec<u8> {
    tar([("a/file".to_owned(), b"content".to_vec()), ("b/other".to_owned(), Vec::new())])
}

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

fn xz(data: &[u8], level: u32) -> Vec<u8> {
    let mut found = Vec::new();
    liblzma::read::XzEncoder::new(data, level).read_to_end(&mut found).unwrap();
    found
}

/// A zip of one stored member.
fn zip(name: &str, data: &[u8]) -> Vec<u8> {
    let mut crc = flate2::Crc::new();
    crc.update(data);
    let mut common = vec![20, 0, 0, 0, 0, 0, 0, 0, 0x21, 0];
    for value in [crc.sum(), data.len() as u32, data.len() as u32, name.len() as u32] {
        common.extend_from_slice(&value.to_le_bytes());
    }
    let local = [&b"PK\x03\x04"[..], &common, name.as_bytes(), data].concat();
    let central = [&b"PK\x01\x02\x14\x03"[..], &common, &[0; 14], name.as_bytes()].concat();
    let (length, at) = ((central.len() as u32).to_le_bytes(), (local.len() as u32).to_le_bytes());
    [&local[..], &central, b"PK\x05\x06\0\0\0\0\x01\0\x01\0", &length, &at, &[0, 0]].concat()
}

fn every_format_unpacks_in_the_jail() {
    let zstd = zstd::encode_all(&small()[..], 3).unwrap();
    for (bytes, packing) in [
        (small(), "tar"),
        (gzip(&small()), "tar.gz"),
        (zstd.clone(), "tar.zst"),
        (xz(&small(), 6), "tar.xz"),
        (zip("artifact.tar.zst", &zstd), "zip(tar.zst)"),
        (zip("artifact.tar.xz", &xz(&small(), 6)), "zip(tar.xz)"),
    ] {
        let (place, result) = unpack(&bytes, |_| ());
        let summary = result.unwrap_or_else(|e| panic!("{packing}: {e:?}"));
        assert_eq!((summary.packing().as_str(), summary.files), (packing, 3));
        for path in ["a/file", "link", "b/hard"] {
            assert_eq!(fs::read_to_string(place.path().join("out").join(path)).unwrap(), "content", "{packing} {path}");
        }
    }
    let (place, result) = unpack(&zip("x/y", b"plain"), |_| ());
    assert_eq!(result.unwrap().packing(), "zip");
    assert_eq!(fs::read_to_string(place.path().join("out/x/y")).unwrap(), "plain");
    assert_eq!(unpack(b"\0asm\x01\0\0\0", |_| ()).1.unwrap().packing(), "file");
}

fn a_refusal_comes_out_of_the_jail_and_nothing_stays() {
    let mut evil = tar::Builder::new(small());
    evil.get_mut().truncate(512 * 4);
    let mut header = tar::Header::new_gnu();
    header.as_mut_bytes()[..7].copy_from_slice(b"../evil");
    header.set_size(0);
    header.set_cksum();
    evil.append(&header, std::io::empty()).unwrap();
    let evil = evil.into_inner().unwrap();
    let cut = zstd::encode_all(&small()[..], 3).unwrap();
    for (bytes, rule) in [
        (evil.clone(), Rule::Path),
        (zstd::encode_all(&evil[..], 3).unwrap(), Rule::Path),
        (zip("../evil", b""), Rule::Path),
        (cut[..cut.len() - 3].to_vec(), Rule::Truncated),
        (b"7z\xbc\xaf\x27\x1c".to_vec(), Rule::Format),
    ] {
        let (place, result) = unpack(&bytes, |_| ());
        assert!(matches!(&result, Err(Error::Rejected(r)) if r.rule == rule), "{result:?}");
        assert_eq!(fs::read_dir(place.path().join("out")).unwrap().count(), 0);
        assert!(!place.path().join("evil").exists());
    }
}

fn many_files_in_many_directories() {
    let deep = vec!["d"; 60].join("/");
    let members = (0..3000).map(|n| {
        let name = if n % 2 == 0 { format!("{}/{n}", n % 50) } else { format!("{}/{deep}/{n}", n % 7) };
        (name, vec![b'x'; n])
    });
    let bytes = tar(members.chain([("a/file".to_owned(), Vec::new())]));
    assert_eq!(unpack(&zstd::encode_all(&bytes[..], 3).unwrap(), |_| ()).1.unwrap().files, 3002);
}

/// `zstd --long=27` and `xz -9` take the most memory of what is accepted; beyond that it is a refusal, not a crash.
fn the_largest_windows_fit_in_the_jail() {
    let windowed = |log: u32| {
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(log).unwrap();
        encoder.include_contentsize(false).unwrap();
        encoder.write_all(&small()).unwrap();
        encoder.finish().unwrap()
    };
    assert_eq!(unpack(&windowed(27), |_| ()).1.unwrap().files, 3);
    assert_eq!(unpack(&xz(&small(), 9), |_| ()).1.unwrap().files, 3);
    let result = unpack(&windowed(30), |_| ()).1;
    assert!(matches!(&result, Err(Error::Rejected(r)) if r.rule == Rule::Corrupt), "{result:?}");
}

/// The helper has another uid when root starts it; it reads through the fd that it is given.
fn a_file_that_only_its_owner_may_read() {
    use std::os::unix::fs::PermissionsExt;
    let (_, result) = unpack(&small(), |path| fs::set_permissions(path, PermissionsExt::from_mode(0o400)).unwrap());
    assert_eq!(result.unwrap().files, 3);
}

/// Applies layers by the jailed helper, each in a file of its own.
fn apply(layers: &[Vec<u8>], change: impl FnOnce(&mut layers::Request)) -> (tempfile::TempDir, Result<Applied, Error>) {
    let place = tempfile::tempdir().unwrap();
    let (mut files, mut described) = (Vec::new(), Vec::new());
    for tar in layers {
        let mut file = tempfile::tempfile().unwrap();
        let packed = gzip(tar);
        file.write_all(&packed).unwrap();
        described.push(Layer {
            file: files.len(),
            offset: 0,
            length: packed.len() as u64,
            sha256: Some(Digest::of(&packed)),
            diff_id: Digest::of(tar),
        });
        files.push(file);
    }
    let mut request = layers::Request { layers: described, budget: Budget::default() };
    change(&mut request);
    let into = File::open(place.path()).unwrap();
    let (deadline, stop) = (Duration::from_secs(300), AtomicBool::new(false));
    let result = apply_in_helper(&files, into.as_fd(), &request, deadline, &stop, unpacker::start);
    (place, result)
}

/// As many layers as there may be, and a tree as deep: each takes an fd.
fn layers_are_applied_in_the_jail() {
    let deep = vec!["d"; 63].join("/");
    let mut all: Vec<_> = (0..layers::MAX_LAYERS - 1)
        .map(|n| tar([("a/file".to_owned(), b"content".to_vec()), (format!("{deep}/{n}"), vec![b'x'; n])]))
        .collect();
    all.push(tar([("a/file".to_owned(), b"last".to_vec()), (format!("{deep}/.wh.7"), Vec::new())]));
    let (place, result) = apply(&all, |_| ());
    // In each layer a file, a hard link to it, and one that stays; one of those is hidden at last.
    assert_eq!(result.unwrap().files, 2 + layers::MAX_LAYERS as u64 - 2);
    assert_eq!(fs::read_to_string(place.path().join("link")).unwrap(), "last");
    assert_eq!(fs::metadata(place.path().join(&deep).join("125")).unwrap().len(), 125);
    assert!(!place.path().join(&deep).join("7").exists());
    all.push(tar([("a/file".to_owned(), Vec::new())]));
    assert!(matches!(apply(&all, |_| ()).1, Err(Error::Rejected(r)) if r.rule == Rule::BudgetFiles));
}

fn a_layer_that_is_refused_leaves_nothing() {
    let good = tar([("a/file".to_owned(), b"content".to_vec())]);
    let other = Digest::of(b"other");
    type Change<'c> = &'c dyn Fn(&mut layers::Request);
    let changes: [(Change<'_>, Rule); 4] = [
        (&|r| r.layers[1].sha256 = Some(other), Rule::Sha256),
        (&|r| r.layers[1].diff_id = other, Rule::Sha256),
        (&|r| r.budget.files = 5, Rule::BudgetFiles),
        (&|r| (r.layers[1].length, r.layers[1].sha256) = (30, None), Rule::Truncated),
    ];
    for (change, rule) in changes {
        let (place, result) = apply(&[good.clone(), good.clone()], change);
        assert!(matches!(&result, Err(Error::Rejected(r)) if r.rule == rule), "{rule}: {result:?}");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }
}

fn an_image_is_unpacked_once_and_found_again() {
    let place = tempfile::tempdir().unwrap();
    let cache = Cache::at(&place.path().join("cache")).unwrap();
    let stop = AtomicBool::new(false);
    let prepare = |source: &ImageSource, digest: Option<Digest>| {
        let terms = image::Terms {
            cache: &cache,
            digest,
            deadline: Duration::from_secs(300),
            stop: &stop,
            env: &Env::default(),
            insecure_registries: &[],
            progress: &|_| {},
        };
        image::prepare(source, &terms)
    };
    let files = ["bin/tool", "etc/passwd"].map(|name| (name.to_owned(), b"app:x:5:6::/:/bin/sh\n".to_vec()));
    let layer = tar(files.into_iter().chain([("a/file".to_owned(), b"content".to_vec())]));

    let path = place.path().join("root.tar");
    fs::write(&path, &layer).unwrap();
    let source = ImageSource::Tar(path);
    let first = prepare(&source, Some(Digest::of(&layer))).unwrap();
    let again = prepare(&source, None).unwrap();
    let unpacked: Vec<_> = cache.entries().unwrap().into_iter().map(|entry| entry.kind).collect();
    assert!(unpacked == ["image"] && first.root != again.root, "{unpacked:?}");
    assert_eq!(again.record.digest, Some(Digest::of(&layer).to_string()));
    assert_eq!(prepare(&source, Some(Digest::of(b"x"))).unwrap_err().reason, "sha256");

    let saved = |user: &str| {
        let arch = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        let config = format!(
            r#"{{"os":"linux","architecture":"{arch}","config":{{"User":"{user}","Env":["A=b"],"WorkingDir":"/srv"}},"rootfs":{{"diff_ids":["sha256:{}"]}}}}"#,
            Digest::of(&layer)
        );
        let mut builder = tar::Builder::new(Vec::new());
        let list = br#"[{"Config":"config.json","Layers":["layer.tar"]}]"#;
        for (name, content) in [("layer.tar", &layer[..]), ("config.json", config.as_bytes()), ("manifest.json", list)]
        {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            builder.append_data(&mut header, name, content).unwrap();
        }
        let path = place.path().join(format!("saved-{user}.tar"));
        fs::write(&path, builder.into_inner().unwrap()).unwrap();
        (ImageSource::DockerArchive(path), Digest::of(config.as_bytes()))
    };
    let (source, id) = saved("app");
    let prepared = prepare(&source, Some(id)).unwrap();
    assert_eq!((prepared.user, prepared.env), (Some((5, 6)), vec![("A".to_owned(), "b".to_owned())]));
    assert!(
        prepared.notices.len() == 1 && prepared.notices[0].contains("`/srv` is not used"),
        "{:?}",
        prepared.notices
    );
    assert_eq!(fs::read_to_string(prepared.root.unwrap().join("link")).unwrap(), "content");
    let root = prepare(&saved("root").0, None).unwrap();
    assert!(root.user == Some(plimsoll::image::rootfs::GUEST_USER) && root.notices.len() == 2, "{root:?}");
    assert!(prepare(&saved("nobody").0, None).unwrap_err().message.contains("no `nobody`"));
    assert_eq!(prepare(&source, Some(Digest::of(b"x"))).unwrap_err().reason, "sha256");
}

//! Archives as the tools on people's machines make them, and what those tools see in them.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use plimsoll::artifact::{Format, Rule};

use crate::support::{Place, accepted, refused, skip};

/// A small project: nested, executable, linked, empty, with odd names.
fn project(root: &Path) {
    for (path, content) in [
        ("src/main.py", "print('hello')\n".repeat(500)),
        ("src/naïve 日本.txt", "x".into()),
        ("run.sh", "#!/bin/sh\n".into()),
        ("empty", String::new()),
        (&format!("{}/deep.txt", ["long-directory-name"; 12].join("/")), "deep".into()),
    ] {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    fs::set_permissions(root.join("run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(root.join("void")).unwrap();
    symlink("src/main.py", root.join("link")).unwrap();
}

fn check(place: &Place, links: bool) {
    assert_eq!(place.text("src/main.py").len(), 7500);
    assert_eq!(place.text("src/naïve 日本.txt"), "x");
    assert_eq!(place.text(&format!("{}/deep.txt", ["long-directory-name"; 12].join("/"))), "deep");
    assert_eq!((place.mode("run.sh"), place.mode("empty")), (0o777, 0o666));
    assert_eq!(place.listing()["void"], "dir");
    if links {
        assert_eq!(place.listing()["link"], "-> src/main.py");
    }
}

/// Runs a tool in the project's directory; none, with the reason printed, when the tool is absent.
fn made(name: &str, program: &str, arguments: &[&str]) -> Option<Vec<u8>> {
    let root = tempfile::tempdir().unwrap();
    let source = root.path().join("project");
    fs::create_dir(&source).unwrap();
    project(&source);
    let file = root.path().join("archive");
    let arguments: Vec<String> = arguments.iter().map(|a| a.replace("OUT", file.to_str().unwrap())).collect();
    let run = Command::new(program)
        .args(&arguments)
        .current_dir(&source)
        .env("LC_ALL", "C.UTF-8")
        .stdin(Stdio::null())
        .output();
    match run {
        Err(e) => {
            skip(program, &format!("{program} can't be run ({e})"));
            None
        }
        Ok(output) if !output.status.success() => {
            skip(program, &format!("{name}: {} {}", output.status, String::from_utf8_lossy(&output.stderr)));
            None
        }
        // `zip -` writes to standard output.
        Ok(output) => Some(fs::read(&file).unwrap_or(output.stdout)),
    }
}

#[test]
fn gnu_tar_in_all_its_formats() {
    for format in ["gnu", "oldgnu", "posix"] {
        for (flag, packing) in
            [("-a", Format::Tar), ("-z", Format::TarGz), ("-J", Format::TarXz), ("--zstd", Format::TarZst)]
        {
            let arguments = ["--format", format, flag, "-cf", "OUT", "."];
            let Some(bytes) = made(format, "tar", &arguments) else { continue };
            let (place, summary) = accepted(&bytes);
            check(&place, true);
            assert_eq!(summary.format, packing, "{format}");
        }
    }
}

/// Its headers have no room for the deepest path of the whole tree.
#[test]
fn gnu_tar_in_the_oldest_standard_format() {
    if let Some(bytes) = made("ustar", "tar", &["--format", "ustar", "-cf", "OUT", "run.sh", "src"]) {
        let (place, summary) = accepted(&bytes);
        assert_eq!(summary.format, Format::Tar);
        assert!(place.out().join("run.sh").exists() && place.out().join("src").is_dir());
    }
}

#[test]
fn gnu_tar_appended_updated_and_joined() {
    let script = "tar -cf OUT src && tar -rf OUT run.sh empty void link long-directory-name && tar -rf OUT src && \
                  tar -cf part.tar run.sh && tar -Af OUT part.tar && rm part.tar";
    if let Some(bytes) = made("append", "sh", &["-ec", script]) {
        check(&accepted(&bytes).0, true);
    }
}

#[test]
fn gnu_tar_sparse_files_in_every_version() {
    for options in [
        "--format=gnu",
        "--format=posix --sparse-version=0.0",
        "--format=posix --sparse-version=0.1",
        "--format=posix --sparse-version=1.0",
    ] {
        // Holes before, between and behind; more segments than the header itself has room for.
        let script = format!(
            "for i in $(seq 1 40); do printf data$i | dd of=sparse bs=1 seek=$((i * 65536)) conv=notrunc status=none; done; \
             truncate -s 4M sparse; tar --sparse {options} -cf OUT sparse run.sh; sha256sum sparse | cut -c1-64 > OUT.sum; \
             cat OUT.sum; rm OUT.sum"
        );
        let Some(bytes) = made(options, "sh", &["-ec", &script]) else { continue };
        assert!(bytes.len() < 2 << 20, "the archive isn't sparse");
        let (place, summary) = accepted(&bytes);
        let text = fs::read(place.out().join("sparse")).unwrap();
        assert_eq!((text.len(), summary.bytes), (4 << 20, (4 << 20) + 10), "{options}");
        for i in 1..=40 {
            let data = format!("data{i}");
            assert_eq!(&text[i * 65536..i * 65536 + data.len()], data.as_bytes(), "{options}");
        }
        assert_eq!(text.iter().filter(|&&b| b != 0).count(), (1..=40).map(|i| format!("data{i}").len()).sum::<usize>());
    }
}

#[test]
fn bsdtar_with_its_own_sparse_files_and_headers() {
    // Its ustar has no room for the deep path.
    for format in ["pax", "gnutar", "zip"] {
        let script = format!("truncate -s 1M sparse; bsdtar --format {format} -cf OUT *");
        let Some(bytes) = made(format, "sh", &["-ec", &script]) else { continue };
        let (place, _) = accepted(&bytes);
        check(&place, true);
        assert_eq!(place.listing()["sparse"], "1048576 bytes");
    }
}

#[test]
fn gnu_tar_refusals_name_the_member() {
    let Some(bytes) = made("fifo", "sh", &["-ec", "mkfifo pipe; tar -cf OUT run.sh pipe"]) else { return };
    assert_eq!(refused(&bytes, Rule::Kind).member.as_deref(), Some("pipe"));
    let Some(bytes) = made("absolute", "sh", &["-ec", "tar -P -cf OUT $PWD/run.sh"]) else { return };
    refused(&bytes, Rule::Path);
    let Some(bytes) = made("escape", "sh", &["-ec", "ln -s ../x escape; tar -cf OUT escape"]) else { return };
    assert_eq!(refused(&bytes, Rule::Symlink).member.as_deref(), Some("escape"));
}

#[test]
fn info_zip_seekable_streamed_and_zip64() {
    for (name, script, links) in [
        ("plain", "zip -qr OUT.zip . && mv OUT.zip OUT", false),
        ("links", "zip -qry OUT.zip . && mv OUT.zip OUT", true),
        ("stored", "zip -q0ry OUT.zip . && mv OUT.zip OUT", true),
        // Without -y: Zip 3.0 fails on links that it would stream.
        ("stream", "zip -qr - . | cat > OUT", false),
        ("descriptors", "zip -fd -qr OUT.zip . && mv OUT.zip OUT", false),
        ("zip64", "zip -fz -qry OUT.zip . && mv OUT.zip OUT", true),
        (
            "updated",
            "zip -qry OUT.zip . && touch run.sh && zip -qu OUT.zip run.sh && zip -qd OUT.zip nothing || true; mv OUT.zip OUT",
            true,
        ),
        ("deleted", "echo x > gone && zip -qry OUT.zip . && zip -qd OUT.zip gone && mv OUT.zip OUT", true),
        ("comment", "zip -qry OUT.zip . && echo 'a comment' | zip -qz OUT.zip && mv OUT.zip OUT", true),
    ] {
        // -y is about links: without it they are followed, and a link is a file.
        let Some(bytes) = made(name, "sh", &["-ec", script]) else { continue };
        assert!(bytes.starts_with(b"PK"), "{name}: {} bytes", bytes.len());
        let streamed = name.starts_with("stream") || name == "descriptors";
        assert_eq!(bytes.windows(4).any(|w| w == b"PK\x07\x08"), streamed, "{name}: descriptors");
        check(&accepted(&bytes).0, links);
    }
    // Zip 3.0 writes an end record without its zip64 half here; unzip refuses it as well.
    if let Some(bytes) = made("stream zip64", "sh", &["-ec", "zip -fz -qr - . | cat > OUT"]) {
        refused(&bytes, Rule::TrailingData);
    }
    if let Some(bytes) = made("encrypted", "sh", &["-ec", "zip -q -P secret OUT.zip run.sh && mv OUT.zip OUT"]) {
        assert_eq!(refused(&bytes, Rule::Encrypted).member.as_deref(), Some("run.sh"));
    }
    if let Some(bytes) = made("bzip2", "sh", &["-ec", "zip -q -Z bzip2 OUT.zip src/main.py && mv OUT.zip OUT"]) {
        assert!(refused(&bytes, Rule::Method).message.contains("bzip2"));
    }
}

#[test]
fn python_tarfile_and_zipfile() {
    for (name, code, links) in [
        (
            "tarfile pax",
            "import tarfile; t = tarfile.open('OUT', 'w', format=tarfile.PAX_FORMAT); t.add('.'); t.close()",
            true,
        ),
        (
            "tarfile gnu gz",
            "import tarfile; t = tarfile.open('OUT', 'w:gz', format=tarfile.GNU_FORMAT); t.add('.'); t.close()",
            true,
        ),
        ("tarfile xz", "import tarfile; t = tarfile.open('OUT', 'w:xz'); t.add('.'); t.close()", true),
        (
            "make_archive",
            "import shutil; shutil.make_archive('OUT', 'zip', '.'); import os; os.rename('OUT.zip', 'OUT')",
            false,
        ),
        (
            "zipfile streamed",
            "import zipfile, os, sys\n\
             class Pipe:\n\
             \x20   def __init__(self, f): self.f = f\n\
             \x20   def write(self, b): return self.f.write(b)\n\
             \x20   def flush(self): self.f.flush()\n\
             with open('OUT', 'wb') as f, zipfile.ZipFile(Pipe(f), 'w', zipfile.ZIP_DEFLATED) as z:\n\
             \x20   for d, ds, fs in os.walk('.'):\n\
             \x20       for n in ds + fs: z.write(os.path.join(d, n))\n",
            false,
        ),
        (
            "zipfile forced zip64 and appended",
            "import zipfile, os\n\
             with zipfile.ZipFile('OUT', 'w', zipfile.ZIP_DEFLATED) as z:\n\
             \x20   with z.open('large', 'w', force_zip64=True) as e: e.write(b'x' * 100000)\n\
             with zipfile.ZipFile('OUT', 'a') as z:\n\
             \x20   for d, ds, fs in os.walk('.'):\n\
             \x20       for n in ds + fs: z.write(os.path.join(d, n))\n",
            false,
        ),
    ] {
        if let Some(bytes) = made(name, "python3", &["-c", code]) {
            let (place, _) = accepted(&bytes);
            if name.starts_with("make_archive") || name.starts_with("tarfile") || name.starts_with("zipfile") {
                check(&place, links);
            }
        }
    }
    // What zipfile itself only warns about.
    let twice = "import zipfile\nwith zipfile.ZipFile('OUT', 'w') as z:\n  z.writestr('a', '1'); z.writestr('a', '2')";
    if let Some(bytes) = made("duplicate", "python3", &["-Wignore", "-c", twice]) {
        refused(&bytes, Rule::Duplicate);
    }
    let prefixed = "import zipapp, os; os.mkdir('app'); open('app/__main__.py', 'w').close(); zipapp.create_archive('app', 'OUT', '/usr/bin/python3')";
    if let Some(bytes) = made("zipapp", "python3", &["-c", prefixed]) {
        refused(&bytes, Rule::TrailingData);
    }
}

#[test]
fn multi_part_compression_by_the_usual_tools() {
    for script in [
        "tar -cf t.tar --exclude=./t.tar . ; split -n 3 t.tar part; for p in part*; do gzip -c $p; done > OUT",
        "tar -cf t.tar --exclude=./t.tar . ; split -n 3 t.tar part; for p in part*; do zstd -qc $p; done > OUT",
        "tar -cf t.tar --exclude=./t.tar . ; split -n 3 t.tar part; for p in part*; do xz -c $p; done > OUT",
        "tar -cf - --exclude=./OUT . | zstd -q --long=27 --ultra -22 > OUT",
        "tar -cf - --exclude=./OUT . | xz -9e -T2 --block-size=4096 > OUT",
    ] {
        if let Some(bytes) = made(script, "sh", &["-ec", script]) {
            check(&accepted(&bytes).0, true);
        }
    }
}

#[test]
fn other_readers_see_the_same_in_what_is_accepted() {
    // Each prints `path size` for every regular file that it would extract.
    let python = "import sys, zipfile\n\
                  for i in zipfile.ZipFile(sys.argv[1]).infolist():\n\
                  \x20   mode = i.external_attr >> 28\n\
                  \x20   # zipfile takes names without the UTF-8 flag for CP437; Zip 3.0 writes UTF-8 and doesn't say so.\n\
                  \x20   name = i.filename if i.flag_bits & 0x800 else i.filename.encode('cp437').decode()\n\
                  \x20   if not i.is_dir() and mode in (0, 8): print(name, i.file_size)";
    for script in
        ["zip -qry OUT.zip . && mv OUT.zip OUT", "zip -fd -qr OUT.zip . && mv OUT.zip OUT", "zip -qr - . | cat > OUT"]
    {
        let Some(bytes) = made(script, "sh", &["-ec", script]) else { return };
        let (place, _) = accepted(&bytes);
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, &bytes).unwrap();
        let run = Command::new("python3").arg("-c").arg(python).arg(file.path()).env("PYTHONUTF8", "1").output();
        let Ok(output) = run else { return skip("python3", "python3 can't be run") };
        let mut theirs: Vec<String> = String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
        theirs.sort();
        let ours = place
            .listing()
            .into_iter()
            .filter_map(|(path, kind)| Some(format!("{path} {}", kind.strip_suffix(" bytes")?)));
        let mut ours: Vec<String> = ours.collect();
        ours.sort();
        assert_eq!(ours, theirs, "{script}");
    }
}

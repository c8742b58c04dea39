//! The filesystem grants: what a guest sees of the workspace, and what of its writing is left.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use plimsoll::evidence::{ControlId, Status};
use plimsoll::gate::End;
use plimsoll_guest::{Filesystem, LimitHit};

use crate::support::{Guest, Ran};

pub const TESTS: &[(&str, fn())] = &[
    ("without_a_grant_there_is_no_file", without_a_grant_there_is_no_file),
    ("a_read_only_grant_shows_the_workspace", a_read_only_grant_shows_the_workspace),
    ("a_read_only_grant_writes_nothing", a_read_only_grant_writes_nothing),
    ("the_working_directory_is_where_relative_paths_start", the_working_directory_is_where_relative_paths_start),
    ("links_and_dots_lead_nowhere_out", links_and_dots_lead_nowhere_out),
    ("a_work_grant_writes_and_the_hosts_copy_stays", a_work_grant_writes_and_the_hosts_copy_stays),
    ("a_file_of_the_artifact_can_be_changed_in_the_view", a_file_of_the_artifact_can_be_changed_in_the_view),
    ("outputs_come_back", outputs_come_back),
    ("a_disk_bomb_hits_the_disk_limit", a_disk_bomb_hits_the_disk_limit),
    ("a_planned_mount_is_read_only", a_planned_mount_is_read_only),
    ("a_workspace_that_is_missing_is_no_boundary", a_workspace_that_is_missing_is_no_boundary),
];

/// WASI's error numbers (wasi_snapshot_preview1): `badf`, `noent`, `notcapable`, `perm`, `rofs`, `nospc`.
const BADF: i32 = 8;
const NOENT: i32 = 44;
const NOSPC: i32 = 51;

/// A workspace as the unpacker leaves it.
fn workspace() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("sub")).unwrap();
    for (file, text) in [("data.txt", "some data\n"), ("sub/data.txt", "other data\n")] {
        std::fs::write(dir.path().join(file), text).unwrap();
        std::fs::set_permissions(dir.path().join(file), PermissionsExt::from_mode(0o666)).unwrap();
    }
    for directory in ["", "sub"] {
        std::fs::set_permissions(dir.path().join(directory), PermissionsExt::from_mode(0o777)).unwrap();
    }
    dir
}

fn cat(workspace: &Path, filesystem: Filesystem, file: &str) -> Ran {
    Guest::fixture("cat.wat").args(&[file]).sees(workspace, filesystem).run()
}

fn without_a_grant_there_is_no_file() {
    let dir = workspace();
    let ran = cat(dir.path(), Filesystem::None, "data.txt");
    assert_eq!(ran.boundary_held().exit_code(), BADF, "no directory is open");
    assert_eq!(ran.stdout, b"");
}

fn a_read_only_grant_shows_the_workspace() {
    let dir = workspace();
    let ran = cat(dir.path(), Filesystem::ReadOnly, "data.txt");
    assert_eq!(ran.boundary_held().exit_code(), 0);
    assert_eq!(ran.stdout, b"some data\n");
    assert_eq!(cat(dir.path(), Filesystem::ReadOnly, "nothing.txt").exit_code(), NOENT);
}

fn a_read_only_grant_writes_nothing() {
    let dir = workspace();
    for file in ["new.txt", "data.txt"] {
        let ran = Guest::fixture("put.wat").args(&[file]).sees(dir.path(), Filesystem::ReadOnly).run();
        assert_ne!(ran.boundary_held().exit_code(), 0, "{file}");
    }
    assert!(!dir.path().join("new.txt").exists());
    assert_eq!(std::fs::read(dir.path().join("data.txt")).unwrap(), b"some data\n");
}

fn the_working_directory_is_where_relative_paths_start() {
    let dir = workspace();
    let mut guest = Guest::fixture("cat.wat").args(&["data.txt"]).sees(dir.path(), Filesystem::ReadOnly);
    guest.working_directory = "sub".to_owned();
    let ran = guest.run();
    assert_eq!(ran.boundary_held().exit_code(), 0);
    assert_eq!(ran.stdout, b"other data\n");
}

fn links_and_dots_lead_nowhere_out() {
    let dir = workspace();
    let secret = tempfile::tempdir().unwrap();
    std::fs::write(secret.path().join("secret"), "secret").unwrap();
    std::os::unix::fs::symlink(secret.path(), dir.path().join("link")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", dir.path().join("passwd")).unwrap();
    std::os::unix::fs::symlink("data.txt", dir.path().join("inside")).unwrap();
    for file in ["link/secret", "passwd", "../etc/passwd", "/etc/passwd", "sub/../../etc/passwd"] {
        for filesystem in [Filesystem::ReadOnly, Filesystem::Work] {
            let ran = cat(dir.path(), filesystem, file);
            assert_ne!(ran.boundary_held().exit_code(), 0, "{file}");
            assert_eq!(ran.stdout, b"", "{file}");
        }
    }
    assert_eq!(cat(dir.path(), Filesystem::ReadOnly, "inside").stdout, b"some data\n", "the harmless one");
}

fn a_work_grant_writes_and_the_hosts_copy_stays() {
    let dir = workspace();
    let ran = Guest::fixture("put.wat").args(&["new.txt"]).sees(dir.path(), Filesystem::Work).run();
    assert_eq!(ran.boundary_held().exit_code(), 0);
    assert!(!dir.path().join("new.txt").exists());
    assert_eq!(ran.grade(ControlId::DiskLimit), Status::Enforced);
    assert_eq!(cat(dir.path(), Filesystem::Work, "sub/data.txt").stdout, b"other data\n");
}

fn a_file_of_the_artifact_can_be_changed_in_the_view() {
    let dir = workspace();
    let mut guest = Guest::fixture("put.wat").args(&["data.txt"]).sees(dir.path(), Filesystem::Work);
    guest.outputs = vec!["data.txt".to_owned()];
    let ran = guest.run();
    assert_eq!(ran.boundary_held().exit_code(), 0);
    assert_eq!(ran.written.files.first().map(|f| f.bytes), Some(65536), "{:?}", ran.written);
    assert_eq!(std::fs::read(dir.path().join("data.txt")).unwrap(), b"some data\n");
}

fn outputs_come_back() {
    let dir = workspace();
    let mut guest = Guest::fixture("put.wat").args(&["out.bin"]).sees(dir.path(), Filesystem::Work);
    guest.outputs = vec!["*.bin".to_owned(), "sub/**".to_owned()];
    let ran = guest.run();
    assert_eq!(ran.boundary_held().exit_code(), 0);
    let files: Vec<_> = ran.written.files.iter().map(|f| (f.path.as_str(), f.bytes)).collect();
    assert_eq!(files, [("out.bin", 65536), ("sub/data.txt", 11)]);
    assert_eq!(std::fs::read(ran.outputs.path().join("sub/data.txt")).unwrap(), b"other data\n");
}

fn a_disk_bomb_hits_the_disk_limit() {
    let dir = workspace();
    let words: Vec<String> = (0..65).map(|n| n.to_string()).collect();
    let mut args = vec!["bomb"];
    args.extend(words.iter().map(String::as_str));
    let mut guest = Guest::fixture("put.wat").args(&args).sees(dir.path(), Filesystem::Work);
    let ran = guest.run();
    let result = ran.boundary_held().result();
    assert_eq!((result.exit_code, result.limit_hit), (Some(NOSPC), Some(LimitHit::Disk)), "4 MiB into 1 MiB");
    guest.disk = 16 << 20;
    assert_eq!(guest.run().boundary_held().exit_code(), 0, "4 MiB into 16 MiB");
}

fn a_planned_mount_is_read_only() {
    let dir = workspace();
    let wheels = workspace();
    for (program, code) in [("cat.wat", Some(0)), ("put.wat", None)] {
        let mut guest = Guest::fixture(program).args(&["data.txt"]);
        guest.filesystem = Filesystem::Work;
        guest.workspace = None;
        guest.mounts = vec![(wheels.path().to_owned(), "/deep/wheels".to_owned())];
        let ran = guest.run();
        let exit = ran.boundary_held().exit_code();
        assert!(code.map_or(exit != 0, |code| exit == code), "{program}: {exit}");
    }
    assert_eq!(std::fs::read(wheels.path().join("data.txt")).unwrap(), b"some data\n");
    drop(dir);
}

fn a_workspace_that_is_missing_is_no_boundary() {
    let ran = Guest::fixture("hello.wat").sees(Path::new("/nonexistent/place"), Filesystem::ReadOnly).run();
    assert!(matches!(ran.passage.end, End::NotPrepared(_)), "{:?}", ran.passage.end);
}

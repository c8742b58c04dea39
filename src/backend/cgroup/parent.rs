//! The group of version 2 below which those of boundaries are made.
//!
//! A group hands controllers on only while no process is in it itself ("no internal processes"), and systemd starts a unit's
//! processes in the very group that it delegates and hands on nothing itself (systemd's `CGROUP_DELEGATION`). So in a group
//! that was delegated to this user the runner does what a delegate is to do: it moves what is in there, its own unit, to a leaf
//! below, and hands the controllers on. Nothing outside of that group is moved.
//!
//! Two of the controllers, `cpu` and `pids`, a group with processes in it does hand on, and becomes the root of threaded groups
//! by that: no process can be put into a group below. So nothing is written there. Source: the kernel's `admin-guide/cgroup-v2`.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};
use rustix::process::geteuid;

use super::Controller;
use super::hierarchy::Hierarchy;

/// The leaf for the processes of a delegated group. No boundary's group is called so: those end with an id.
const LEAF: &str = "plimsoll-runner";
/// How often processes are looked for that were started while others were moved.
const ROUNDS: usize = 20;

/// The group to make ours in, and which of the controllers it hands on. Root starts at the top, where an administrator's
/// limits on the runner's own session do not reach into the boundary; a plain user takes the nearest that works.
pub(super) fn find(hierarchy: &Hierarchy, controllers: &[Controller], root: bool) -> (PathBuf, Vec<Controller>) {
    let mut above: Vec<&Path> = hierarchy.own.ancestors().take_while(|p| p.starts_with(&hierarchy.mount)).collect();
    if root {
        above.reverse();
    }
    let mut best = (hierarchy.own.clone(), Vec::new());
    for directory in above {
        if !root && !writable(directory) {
            continue;
        }
        let usable = hand_on(directory, controllers);
        if usable.len() > best.1.len() {
            best = (directory.to_owned(), usable);
        }
    }
    let own = &hierarchy.own;
    let offered = named(&own.join("cgroup.controllers"), controllers);
    if !root && offered.len() > best.1.len() && delegated(own) {
        match make_way(own, controllers) {
            Ok(usable) => return (own.clone(), usable),
            Err(error) => tracing::debug!("{} hands on no controller: {error}", own.display()),
        }
    }
    best
}

/// Whether this user may put processes there.
fn writable(directory: &Path) -> bool {
    access(directory.join("cgroup.procs"), Access::WRITE_OK).is_ok()
}

/// Whether a manager gave the group to this user: it makes the directory and its files that user's.
fn delegated(directory: &Path) -> bool {
    let ours = |path: &Path| fs::metadata(path).is_ok_and(|meta| meta.uid() == geteuid().as_raw());
    ours(directory) && writable(directory) && ours(&directory.join("cgroup.subtree_control"))
}

/// Hands on what is not yet, unless processes live in the group itself; says what it hands on to groups for processes.
fn hand_on(directory: &Path, controllers: &[Controller]) -> Vec<Controller> {
    let control = directory.join("cgroup.subtree_control");
    // The hierarchy's root has no type, and may have processes.
    let kind = fs::read_to_string(directory.join("cgroup.type")).ok();
    let occupied = || fs::read_to_string(directory.join("cgroup.procs")).is_ok_and(|inside| !inside.is_empty());
    match kind.as_deref().map(str::trim) {
        Some("domain") if occupied() => {}
        None | Some("domain") => {
            let already = named(&control, controllers);
            for controller in controllers.iter().filter(|c| !already.contains(c)) {
                let _ = fs::write(&control, format!("+{}", controller.name()));
            }
        }
        Some(_) => return Vec::new(),
    }
    named(&control, controllers)
}

/// Moves what is in the group itself to a leaf below, and hands its controllers on; says which.
fn make_way(own: &Path, controllers: &[Controller]) -> io::Result<Vec<Controller>> {
    let leaf = own.join(LEAF);
    match fs::create_dir(&leaf) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    for _ in 0..ROUNDS {
        let inside = fs::read_to_string(own.join("cgroup.procs"))?;
        if inside.is_empty() {
            break;
        }
        for pid in inside.lines() {
            // One that ended in between is none.
            let _ = fs::write(leaf.join("cgroup.procs"), pid);
        }
    }
    Ok(hand_on(own, controllers))
}

/// Those of the controllers that a file names.
fn named(path: &Path, controllers: &[Controller]) -> Vec<Controller> {
    let text = fs::read_to_string(path).unwrap_or_default();
    controllers.iter().copied().filter(|c| text.split_whitespace().any(|name| name == c.name())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Controller; 3] = Controller::LIMITING;

    /// Files like those of a tree; `inside` is what processes the innermost group says to have.
    fn tree(groups: &[(&str, &str)], offered: &str, inside: &str) -> (tempfile::TempDir, Hierarchy) {
        let dir = tempfile::tempdir().unwrap();
        for (path, handed_on) in groups {
            let at = dir.path().join(path);
            fs::create_dir_all(&at).unwrap();
            fs::write(at.join("cgroup.subtree_control"), handed_on).unwrap();
            fs::write(at.join("cgroup.procs"), "").unwrap();
            if !path.is_empty() {
                fs::write(at.join("cgroup.type"), "domain\n").unwrap();
            }
        }
        let own = dir.path().join(groups.last().unwrap().0);
        fs::write(own.join("cgroup.controllers"), offered).unwrap();
        fs::write(own.join("cgroup.procs"), inside).unwrap();
        let hierarchy = Hierarchy { controllers: Vec::new(), version: 2, mount: dir.path().to_owned(), own };
        (dir, hierarchy)
    }

    #[test]
    fn in_a_delegated_group_the_way_is_made_free() {
        let (_dir, hierarchy) = tree(&[("", ""), ("unit", "")], "cpu memory pids", "17\n");
        let own = hierarchy.own.clone();
        assert_eq!(find(&hierarchy, &ALL, false), (own.clone(), vec![]));
        assert_eq!(fs::read_to_string(own.join(LEAF).join("cgroup.procs")).unwrap(), "17");
        // A file is not emptied by that, and where processes are nothing may be handed on.
        assert_eq!(fs::read_to_string(own.join("cgroup.subtree_control")).unwrap(), "");
    }

    #[test]
    fn only_what_has_no_processes_hands_controllers_on() {
        let (_dir, hierarchy) = tree(&[("", ""), ("unit", "")], "cpu memory pids", "");
        hand_on(&hierarchy.own, &ALL);
        // Files keep the last of what was written.
        assert_eq!(fs::read_to_string(hierarchy.own.join("cgroup.subtree_control")).unwrap(), "+pids");
        let (_dir, hierarchy) = tree(&[("", ""), ("unit", "cpu pids")], "cpu memory pids", "");
        fs::write(hierarchy.own.join("cgroup.type"), "domain threaded\n").unwrap();
        assert_eq!(hand_on(&hierarchy.own, &ALL), []);
    }

    #[test]
    fn nothing_is_moved_where_that_would_give_no_more_or_for_root() {
        let (_dir, hierarchy) = tree(&[("", ""), ("slice", "memory pids"), ("slice/unit", "")], "memory pids", "17\n");
        let slice = hierarchy.mount.join("slice");
        let both = [Controller::Memory, Controller::Pids];
        assert_eq!(find(&hierarchy, &both, false), (slice, both.to_vec()));
        assert!(!hierarchy.own.join(LEAF).exists());
        let (_dir, hierarchy) = tree(&[("", ""), ("unit", "")], "cpu memory pids", "17\n");
        assert_eq!(find(&hierarchy, &ALL, true).1, []);
        assert!(!hierarchy.own.join(LEAF).exists());
    }
}

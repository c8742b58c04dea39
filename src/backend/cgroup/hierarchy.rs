//! Mounted cgroup hierarchies, and the runner's own place in each.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A mounted hierarchy and where the runner is in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    /// Version 1 controllers; empty for version 2.
    pub controllers: Vec<String>,
    /// 1 or 2.
    pub version: u8,
    /// Mount point.
    pub mount: PathBuf,
    /// The runner's own group, below the mount point.
    pub own: PathBuf,
}

/// Every hierarchy that is mounted and that the runner is in.
///
/// # Errors
/// If `/proc` cannot be read.
pub fn hierarchies() -> io::Result<Vec<Hierarchy>> {
    let read = fs::read_to_string;
    Ok(parse_hierarchies(&read("/proc/self/mountinfo")?, &read("/proc/self/cgroup")?))
}

fn parse_hierarchies(mountinfo: &str, membership: &str) -> Vec<Hierarchy> {
    let mut found = Vec::new();
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let (left, right): (Vec<_>, Vec<_>) = (left.split(' ').collect(), right.split(' ').collect());
        let (Some(&root), Some(&mount), Some(&kind)) = (left.get(3), left.get(4), right.first()) else { continue };
        let options = right.get(2).copied().unwrap_or("");
        let version = match kind {
            "cgroup" => 1,
            "cgroup2" => 2,
            _ => continue,
        };
        let own = membership.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let here = if version == 2 {
                number == "0" && controllers.is_empty()
            } else {
                !controllers.is_empty() && controllers.split(',').all(|c| options.split(',').any(|o| o == c))
            };
            here.then_some((controllers, path))
        });
        let Some((controllers, path)) = own else { continue };
        // In a container the mount shows a subtree only, and the runner's group is named relative to its root.
        let below = Path::new(path).strip_prefix(root).or_else(|_| Path::new(path).strip_prefix("/"));
        let own = below.map(|below| Path::new(mount).join(below)).ok().filter(|p| p.is_dir() || cfg!(test));
        found.push(Hierarchy {
            controllers: controllers.split(',').filter(|c| !c.is_empty()).map(str::to_owned).collect(),
            version,
            mount: PathBuf::from(mount),
            own: own.unwrap_or_else(|| PathBuf::from(mount)),
        });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_of_both_versions_are_found_with_our_place_in_them() {
        let mountinfo = "\
30 20 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
31 20 0:27 /docker/ab /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
32 20 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate
33 20 0:29 / /proc rw - proc proc rw";
        let membership =
            "5:memory:/user.slice\n4:cpu,cpuacct:/docker/ab/job\n1:name=systemd:/x\n0::/user.slice/s.scope";
        let found = parse_hierarchies(mountinfo, membership);
        assert_eq!(found.len(), 3);
        assert_eq!(found[0].own, Path::new("/sys/fs/cgroup/memory/user.slice"));
        assert_eq!(found[1].controllers, ["cpu", "cpuacct"]);
        assert_eq!(found[1].own, Path::new("/sys/fs/cgroup/cpu,cpuacct/job"));
        assert_eq!(
            (found[2].version, found[2].own.as_path()),
            (2, Path::new("/sys/fs/cgroup/unified/user.slice/s.scope"))
        );
    }
}

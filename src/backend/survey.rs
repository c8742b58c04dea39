//! What of this host helps or hinders the boundaries, with the one thing to do about each: for `plimsoll doctor`.
//!
//! Main function: [`survey`]. Whether a backend works at all is found out by building its boundary, not here; this says
//! what stands behind the answer. Facts are read from procfs and sysfs, and a control group is made and removed again.
//! Nothing here is evidence.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, StatVfsMountFlags, access, statvfs};

use super::cgroup::{Group, Limits};
use super::{fix, sys};
use crate::env::{self, Env};
use crate::evidence::host::{Finding, Grade, posture};
use crate::image::cache;

/// Free space below which unpacking and images soon fail, bytes.
const LITTLE: u64 = 2 << 30;
/// Sockets whose owner runs whatever it is asked to as root.
const ROOT_SOCKETS: [&str; 5] = [
    "run/docker.sock",
    "run/containerd/containerd.sock",
    "run/podman/podman.sock",
    "run/crio/crio.sock",
    "var/run/docker.sock",
];
/// Parts of names that variables with secrets in them have.
const SECRET_WORDS: [&str; 8] =
    ["TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "APIKEY", "PRIVATE_KEY", "CREDENTIAL"];

/// Looks at this host, as this user, whose runs have their private directories in `state`.
#[must_use]
pub fn survey(env: &Env, state: &Path) -> Vec<Finding> {
    let root = rustix::process::geteuid().is_root();
    let host = Path::new("/");
    let mut found = posture();
    found.push(kvm());
    found.push(control_groups());
    found.push(user_namespaces(host, root));
    found.push(landlock(sys::landlock_version()));
    found.push(temporary(&env.temp_dir()));
    found.push(space("state-space", state));
    found.extend(cache::base(env).map(|cache| space("cache-space", &cache)));
    found.push(root_sockets(host, root));
    found.push(secrets(env::names()));
    found
}

fn kvm() -> Finding {
    match super::firecracker::usable_kvm() {
        Ok(()) => Finding::good("kvm", "/dev/kvm opens; whether a guest runs, the trial of firecracker tells"),
        Err(blocked) => Finding::not(Grade::Bad, "kvm", blocked.blocker, blocked.help),
    }
}

/// Makes one and removes it: what the tree looks like says little about what is allowed.
fn control_groups() -> Finding {
    const ID: &str = "cgroups";
    let id = format!("doctor-{}", std::process::id());
    let group = Group::create(&id, Limits { memory_bytes: 64 << 20, cpu_millis: 1000, tasks: 16 });
    let refused: Vec<String> = group.refused().map(|(controller, why)| format!("{controller}: {why}")).collect();
    let version = group.versions();
    drop(group);
    if refused.is_empty() {
        return Finding::good(ID, format!("limits of memory, CPU and tasks can be set (cgroup {version})"));
    }
    let unit = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| unit(&text));
    let unit = unit.unwrap_or_else(|| "RUNNER.service".to_owned());
    let fix = format!(
        "sudo sh -c \"mkdir -p /etc/systemd/system/{unit}.d && printf '[Service]\\nDelegate=yes\\n' > \
         /etc/systemd/system/{unit}.d/delegate.conf && systemctl daemon-reload && systemctl restart {unit}\", or install \
         the service: sudo plimsoll setup service"
    );
    Finding::not(Grade::Weak, ID, refused.join("; "), fix)
}

/// The systemd service that a process is in, by its control groups; names of ours alone come out of it.
fn unit(membership: &str) -> Option<String> {
    let plain = |name: &&str| name.bytes().all(|b| b.is_ascii_alphanumeric() || b"@._:-".contains(&b));
    let parts = membership.lines().flat_map(|line| line.rsplit('/'));
    parts.filter(|name| name.ends_with(".service") && !name.starts_with("user@")).find(plain).map(str::to_owned)
}

fn user_namespaces(host: &Path, root: bool) -> Finding {
    const ID: &str = "user-namespaces";
    let number = |path: &str| fs::read_to_string(host.join(path)).ok()?.trim().parse::<u64>().ok();
    if number("proc/sys/user/max_user_namespaces") == Some(0) {
        let grade = if root { Grade::Weak } else { Grade::Bad };
        return Finding::not(grade, ID, "none may be made", fix::MAX_USER_NAMESPACES);
    }
    if root {
        return Finding::good(ID, "may be made");
    }
    if number("proc/sys/kernel/unprivileged_userns_clone") == Some(0) {
        return Finding::not(Grade::Bad, ID, "a plain user may make none", fix::USERNS_CLONE);
    }
    if number("proc/sys/kernel/apparmor_restrict_unprivileged_userns") == Some(1) {
        let fact = "AppArmor gives a plain user's no rights unless the program has a profile with `userns,`";
        return Finding::not(Grade::Weak, ID, fact, "sudo plimsoll setup userns");
    }
    Finding::good(ID, "a plain user may make them")
}

fn landlock(version: Option<u32>) -> Finding {
    match version {
        Some(version) => Finding::good("landlock", format!("Landlock, version {version}")),
        None => Finding::not(
            Grade::Weak,
            "landlock",
            "this kernel has no Landlock: the wasm worker's jail has one wall less",
            "boot a kernel of 5.13 or newer with `lsm=landlock,…`",
        ),
    }
}

fn temporary(directory: &Path) -> Finding {
    const ID: &str = "temporary-directory";
    let shown = directory.display();
    match statvfs(directory) {
        Ok(stat) if stat.f_flag.contains(StatVfsMountFlags::NOEXEC) => Finding::not(
            Grade::Weak,
            ID,
            format!("{shown} is mounted noexec, and boundaries are built there"),
            "export TMPDIR=/var/tmp",
        ),
        Ok(_) => Finding::good(ID, format!("{shown} is not mounted noexec")),
        Err(e) => Finding::not(
            Grade::Bad,
            ID,
            format!("{shown} cannot be looked at: {}", std::io::Error::from(e)),
            "set TMPDIR to a directory of yours",
        ),
    }
}

fn space(id: &'static str, directory: &Path) -> Finding {
    // It may not be there yet.
    let there = directory.ancestors().find_map(|path| statvfs(path).ok());
    match there.map(|stat| stat.f_bavail.saturating_mul(stat.f_frsize)) {
        Some(free) if free < LITTLE => Finding::not(
            Grade::Weak,
            id,
            format!("{} MiB are free in {}", free >> 20, directory.display()),
            "plimsoll clean && plimsoll image gc",
        ),
        Some(free) => Finding::good(id, format!("{} GiB are free in {}", free >> 30, directory.display())),
        None => Finding::unknown(id, format!("{} cannot be looked at", directory.display())),
    }
}

fn root_sockets(host: &Path, root: bool) -> Finding {
    const ID: &str = "container-engine";
    let open: Vec<PathBuf> = ROOT_SOCKETS
        .iter()
        .map(|path| host.join(path))
        .filter(|path| path.symlink_metadata().is_ok_and(|m| !m.is_symlink()) && access(path, Access::WRITE_OK).is_ok())
        .collect();
    match open.first() {
        None => Finding::good(ID, "no container engine's socket is within this user's reach"),
        Some(_) if root => Finding::good(ID, "a container engine's socket is there; root needs none to be root"),
        Some(path) => Finding::not(
            Grade::Bad,
            ID,
            format!("this user may write to {}: whoever can is root on this host", path.display()),
            "sudo gpasswd --delete \"$USER\" docker, and start the runner again",
        ),
    }
}

fn secrets(names: impl Iterator<Item = String>) -> Finding {
    const ID: &str = "secrets";
    let secret = |name: &String| SECRET_WORDS.iter().any(|word| name.to_ascii_uppercase().contains(word));
    let mut names: Vec<String> = names.filter(secret).collect();
    names.sort();
    if names.is_empty() {
        return Finding::good(ID, "no variable of this environment has the name of a secret");
    }
    let more = names.len().saturating_sub(10);
    names.truncate(10);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Finding::not(
        Grade::Weak,
        ID,
        format!(
            "variables with names of secrets: {}{more}; none of them gets into a boundary, but everything else in this job sees \
             them",
            names.join(", ")
        ),
        "give secrets to the one step that needs them (`env:` of that step)",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    #[test]
    fn every_finding_that_is_not_good_says_what_to_do() {
        let found = survey(&Env::process(), Path::new("/tmp"));
        assert!(found.len() >= 12);
        let mut ids: Vec<_> = found.iter().map(|f| f.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert!(ids.len() >= found.len() - 1, "only nested virtualisation may be said twice: {ids:?}");
        for finding in found {
            assert_eq!(finding.fix.is_some(), matches!(finding.grade, Grade::Weak | Grade::Bad), "{finding:?}");
        }
    }

    #[test]
    fn user_namespaces_are_judged_for_whoever_asks() {
        let none = host(&[("proc/sys/user/max_user_namespaces", "0\n")]);
        assert_eq!(user_namespaces(none.path(), false).grade, Grade::Bad);
        assert_eq!(user_namespaces(none.path(), true).grade, Grade::Weak);
        let debian = host(&[("proc/sys/kernel/unprivileged_userns_clone", "0\n")]);
        assert_eq!(user_namespaces(debian.path(), false).grade, Grade::Bad);
        assert_eq!(user_namespaces(debian.path(), true).grade, Grade::Good);
        let ubuntu = host(&[("proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1\n")]);
        let finding = user_namespaces(ubuntu.path(), false);
        assert_eq!((finding.grade, finding.fix.as_deref()), (Grade::Weak, Some("sudo plimsoll setup userns")));
        assert_eq!(user_namespaces(host(&[]).path(), false).grade, Grade::Good);
    }

    #[test]
    fn a_container_engines_socket_is_root_for_whoever_can_write_to_it() {
        let with = host(&[("run/docker.sock", "")]);
        let finding = root_sockets(with.path(), false);
        assert!(finding.grade == Grade::Bad && finding.fact.contains("docker.sock"), "{finding:?}");
        assert_eq!(root_sockets(with.path(), true).grade, Grade::Good);
        assert_eq!(root_sockets(host(&[]).path(), false).grade, Grade::Good);
    }

    #[test]
    fn variables_are_secrets_by_their_names_and_no_value_is_told() {
        let names = |list: &[&str]| secrets(list.iter().map(|&n| n.to_owned()).collect::<Vec<_>>().into_iter());
        assert_eq!(names(&["PATH", "HOME", "KEYBOARD"]).grade, Grade::Good);
        let finding = names(&["GITHUB_TOKEN", "npm_password", "PATH"]);
        assert!(finding.grade == Grade::Weak && finding.fact.contains("GITHUB_TOKEN, npm_password"), "{finding:?}");
        assert!(!finding.fact.contains("PATH"));
        let many: Vec<String> = (0..30).map(|n| format!("TOKEN_{n:02}")).collect();
        let finding = secrets(many.into_iter());
        assert!(finding.fact.contains("and 20 more"), "{finding:?}");
    }

    #[test]
    fn the_runners_unit_is_named_in_the_fix() {
        assert_eq!(unit("0::/system.slice/actions.runner.x-y.z.service\n").unwrap(), "actions.runner.x-y.z.service");
        assert_eq!(
            unit("0::/user.slice/user@1000.service/app.slice/gitlab-runner.service/sub\n").unwrap(),
            "gitlab-runner.service"
        );
        assert!(unit("0::/init.scope\n4:pids:/\n").is_none());
        // A name that a shell would read is nobody's unit.
        assert!(unit("0::/x$(reboot).service\n").is_none());
    }

    #[test]
    fn little_space_and_no_landlock_are_weak() {
        assert_eq!(landlock(None).grade, Grade::Weak);
        assert_eq!(landlock(Some(4)).grade, Grade::Good);
        assert!(matches!(space("state-space", Path::new("/nonexistent/deep")).grade, Grade::Good | Grade::Weak));
        assert_eq!(temporary(Path::new("/nonexistent")).grade, Grade::Bad);
    }
}

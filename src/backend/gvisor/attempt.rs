//! Starting a container on whatever release of the engine there is: what is tried, and what a failure teaches.
//!
//! Nothing that weakens the boundary is ever dropped: a flag goes only where an older release lacks the feature that it
//! switches off. Whether the result is good enough is the judge's to say.

use std::io;

use super::runsc;
use crate::backend::jail::{Blocker, userns_probe};
use crate::backend::launcher::Stage;
use crate::backend::{Backend, PrepareError};

/// What is tried, and what the last failure taught.
#[derive(Debug)]
pub struct Attempt {
    /// Platform of the engine.
    pub platform: String,
    platform_is_asked_for: bool,
    user_namespace: bool,
    /// Whether the boundary gets a pid namespace.
    pub pid_namespace: bool,
    dropped: Vec<String>,
}

impl Attempt {
    /// The first attempt.
    #[must_use]
    pub fn new(platform: Option<String>, user_namespace: bool) -> Self {
        Self {
            platform_is_asked_for: platform.is_some(),
            platform: platform.unwrap_or_else(|| "systrap".to_owned()),
            user_namespace,
            pid_namespace: true,
            dropped: Vec::new(),
        }
    }

    /// The engine's flags. Cgroups are ours to make, in every case; the network is named because its default is not
    /// none.
    #[must_use]
    pub fn flags(&self) -> Vec<String> {
        let mut flags = vec![
            "network=none".to_owned(),
            format!("platform={}", self.platform),
            "ignore-cgroups=true".to_owned(),
            "overlay2=none".to_owned(),
        ];
        if !self.user_namespace {
            flags.push("directfs=false".to_owned());
        }
        flags.retain(|flag| !self.dropped.iter().any(|d| flag.split('=').next() == Some(d)));
        flags.into_iter().map(|flag| format!("--{flag}")).collect()
    }

    /// Prepares the next attempt, or says why there is none.
    ///
    /// # Errors
    /// [`PrepareError`], with what the engine said.
    pub fn learn(&mut self, stage: Stage, what: &str, errno: Option<i32>, log: &str) -> Result<(), PrepareError> {
        let said = log.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("").trim().to_owned();
        let unavailable = |blocker: String, help: &str| PrepareError::Unavailable {
            backend: Backend::Gvisor,
            blocker,
            help: help.to_owned(),
        };
        // ENOSYS: a container's seccomp filter may say so of `unshare`.
        let denied = matches!(errno, Some(libc::EPERM | libc::EACCES | libc::ENOSPC | libc::EINVAL | libc::ENOSYS));
        match stage {
            Stage::Procfs if self.pid_namespace => {
                self.pid_namespace = false;
                return Ok(());
            }
            Stage::Namespaces | Stage::Files if denied => {
                let (blocker, help) = self.blocker(what);
                return Err(unavailable(blocker, &help));
            }
            Stage::Engine => {}
            Stage::Namespaces | Stage::Procfs | Stage::Files => {
                return Err(PrepareError::io("prepare the boundary's root directory")(io::Error::other(
                    what.to_owned(),
                )));
            }
        }
        // Older releases: without `directfs` they never hold host descriptors, without `overlay2` they overlay nothing.
        if let Some(flag) = runsc::unknown_flag(log)
            && ["directfs", "overlay2"].contains(&flag.as_str())
            && !self.dropped.contains(&flag)
        {
            self.dropped.push(flag);
            return Ok(());
        }
        if !self.platform_is_asked_for && self.platform == "systrap" && log.contains("systrap") {
            self.platform = "ptrace".to_owned();
            return Ok(());
        }
        let why = if said.is_empty() { what.to_owned() } else { format!("{what}: {said}") };
        let denied = ["operation not permitted", "permission denied"].iter().any(|words| why.contains(words));
        let help = if why.contains("no space left on device") && why.contains("fork/exec") {
            // ENOSPC of a process that is to have a user namespace (clone(2)): the engine makes two more.
            USER_NAMESPACES
        } else if self.user_namespace && denied {
            // Some hosts let a plain user make the namespace that we are in, and nothing that needs a right in it.
            if let Err(Blocker { what, help }) = userns_probe(crate::backend::wasm::ENTRY) {
                return Err(unavailable(what, &help));
            }
            PLAIN_USER
        } else {
            PLATFORM
        };
        Err(unavailable(format!("runsc could not start a container on platform {}: {why}", self.platform), help))
    }

    /// What stands in the way of namespaces and mounts on this host, and what to do. A plain user's jail meets the same
    /// obstacles, and knows them by name.
    fn blocker(&self, what: &str) -> (String, String) {
        match userns_probe(crate::backend::wasm::ENTRY) {
            Err(Blocker { what, help }) if self.user_namespace => (what, help),
            _ => (format!("the kernel does not allow it here: {what}"), NAMESPACES.to_owned()),
        }
    }
}

/// What to do where namespaces are refused for a reason that has no name.
const NAMESPACES: &str = "run plimsoll outside of the container, or give that CAP_SYS_ADMIN and a seccomp profile that allows \
                          unshare and mount";
/// What to do where the engine may make no user namespace of its own.
const USER_NAMESPACES: &str = "too few user namespaces are allowed: sudo sysctl -w user.max_user_namespaces=15000";
/// What to do where an older release wants more than a plain user has.
const PLAIN_USER: &str = "a plain user needs a runsc of June 2023 or later; or run plimsoll as root";
/// What to do where the engine itself fails.
const PLATFORM: &str = "try another platform (ptrace, or kvm where /dev/kvm works), or another release of runsc";

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(platform: Option<&str>) -> Attempt {
        Attempt::new(platform.map(str::to_owned), false)
    }

    #[test]
    fn the_flags_name_the_network_and_leave_cgroups_to_us() {
        let root = attempt(None).flags();
        assert!(root.contains(&"--network=none".to_owned()) && root.contains(&"--ignore-cgroups=true".to_owned()));
        assert!(root.contains(&"--directfs=false".to_owned()));
        assert!(!Attempt::new(None, true).flags().iter().any(|f| f.contains("directfs") || f.contains("rootless")));
    }

    #[test]
    fn an_old_release_is_tried_again_without_what_it_lacks() {
        let mut old = attempt(None);
        old.learn(Stage::Engine, "runsc create", None, "flag provided but not defined: -directfs\nUsage").unwrap();
        assert!(!old.flags().contains(&"--directfs=false".to_owned()));
        old.learn(Stage::Engine, "runsc create", None, "invalid platform \"systrap\"").unwrap();
        assert!(old.flags().contains(&"--platform=ptrace".to_owned()));
        assert!(old.learn(Stage::Engine, "runsc create", None, "no such device").is_err());
    }

    #[test]
    fn a_platform_that_was_asked_for_is_not_replaced() {
        let error =
            attempt(Some("systrap")).learn(Stage::Engine, "runsc create", None, "systrap is broken").unwrap_err();
        assert!(matches!(error, PrepareError::Unavailable { .. }));
        // Nor is the network, whatever the engine says.
        assert!(attempt(None).learn(Stage::Engine, "x", None, "flag provided but not defined: -network").is_err());
    }

    #[test]
    fn refused_namespaces_name_the_fix() {
        let mut one = attempt(None);
        let Err(PrepareError::Unavailable { help, .. }) =
            one.learn(Stage::Namespaces, "unshare", Some(libc::EPERM), "")
        else {
            panic!("not refused")
        };
        assert!(help.contains("CAP_SYS_ADMIN"));
        one.learn(Stage::Procfs, "mount procfs", Some(libc::EPERM), "").unwrap();
        assert!(!one.pid_namespace);
    }

    #[test]
    fn too_few_user_namespaces_are_named_and_no_other_platform() {
        let log = "creating container: cannot create gofer process: gofer: fork/exec /proc/self/exe: no space left on device: \
                   check whether /proc/sys/user/max_user_namespaces is set too low (gvisor.dev/issue/5964)";
        for user_namespace in [true, false] {
            let learnt = Attempt::new(None, user_namespace).learn(Stage::Engine, "runsc create", None, log);
            let Err(PrepareError::Unavailable { help, .. }) = learnt else { panic!("{learnt:?}") };
            assert!(help.contains("sysctl -w user.max_user_namespaces"), "{help}");
        }
    }

    #[test]
    fn a_full_disk_is_no_property_of_the_host() {
        let error = attempt(None).learn(Stage::Files, "write the agent", Some(libc::EIO), "").unwrap_err();
        assert!(matches!(error, PrepareError::Io { .. }));
    }
}

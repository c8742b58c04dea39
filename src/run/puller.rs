//! The helper that goes to a registry: [`crate::image::oci::registry::helper`] in a process of its own.
//!
//! It is a copy of the runner with little memory, an environment of proxies and roots alone, and no core dump that could
//! hold a password. It dies with the runner.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::artifact::helper::Running;
use crate::backend::jail::own_executable;
use crate::backend::process::{self, Child};
use crate::env::{Env, Var};
use crate::image::oci::registry::helper::{ENTRY, MEMORY, Started};

/// What the helper's environment has, where ours has it.
const PASSED: [Var; 10] = [
    Var::HttpsProxy,
    Var::HttpsProxyLower,
    Var::HttpProxy,
    Var::HttpProxyLower,
    Var::AllProxy,
    Var::AllProxyLower,
    Var::NoProxy,
    Var::NoProxyLower,
    Var::SslCertFile,
    Var::SslCertDir,
];

/// Starts the helper; it waits for its job.
///
/// # Errors
/// If there is no `/proc`, or no process can be started or bounded.
pub fn start(env: &Env) -> io::Result<Started<Helper>> {
    let mut command = Command::new(format!("/proc/self/fd/{}", own_executable()?.as_raw_fd()));
    command.arg0("plimsoll").arg(ENTRY).env_clear().current_dir("/");
    command.envs(PASSED.iter().filter_map(|&var| Some((var.name(), env.os(var)?))));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = process::spawn(command)?;
    let pid = i32::try_from(child.pid()).ok().and_then(Pid::from_raw);
    for (resource, most) in [(Resource::Data, MEMORY), (Resource::Core, 0)] {
        prlimit(pid, resource, Rlimit { current: Some(most), maximum: Some(most) })?;
    }
    match (child.stdin.take(), child.stdout.take()) {
        (Some(input), Some(output)) => Ok(Started { running: Helper(child), input, output }),
        _ => Err(io::ErrorKind::BrokenPipe.into()),
    }
}

/// The running helper. Killed when dropped.
#[derive(Debug)]
pub struct Helper(Child);

impl Running for Helper {
    fn kill(&mut self) -> io::Result<()> {
        self.0.kill_tree();
        Ok(())
    }

    fn try_wait(&mut self) -> io::Result<Option<String>> {
        Ok(self.0.wait_for(Duration::ZERO)?.map(|exit| format!("{exit:?}")))
    }
}

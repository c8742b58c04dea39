//! The OCI bundle's configuration: what the engine is told about the container.
//!
//! The container's only process is the agent, as uid 0 with the few capabilities that it needs to assemble the workspace
//! and to start a program without any. Namespaces are listed for the engine's own bookkeeping; what holds is observed.

use std::collections::HashSet;
use std::path::Path;

use oci_spec::OciSpecError;
use oci_spec::runtime::{
    Capability, LinuxBuilder, LinuxCapabilitiesBuilder, LinuxNamespaceBuilder, LinuxNamespaceType, MountBuilder,
    ProcessBuilder, RootBuilder, Spec, SpecBuilder, UserBuilder,
};

/// What the agent may do inside: mount, start a program as another user, write below directories of that user, end
/// everything.
const AGENT_CAPABILITIES: [Capability; 8] = [
    Capability::Chown,
    Capability::DacOverride,
    Capability::DacReadSearch,
    Capability::Fowner,
    Capability::Kill,
    Capability::Setgid,
    Capability::Setuid,
    Capability::SysAdmin,
];
/// Dropping capabilities from the bounding set takes one more.
const SET_CAPABILITIES: Capability = Capability::Setpcap;

/// The configuration, as JSON, of a container whose root is `root` and whose only process is `agent`.
///
/// # Errors
/// If the builder refuses it, which no input of ours makes it do.
pub fn config(root: &Path, agent: &str) -> Result<String, OciSpecError> {
    let capabilities: HashSet<Capability> = AGENT_CAPABILITIES.into_iter().chain([SET_CAPABILITIES]).collect();
    let process = ProcessBuilder::default()
        .terminal(false)
        .user(UserBuilder::default().uid(0u32).gid(0u32).build()?)
        .args(vec![agent.to_owned()])
        .env(Vec::new())
        .cwd("/")
        .no_new_privileges(true)
        .capabilities(
            LinuxCapabilitiesBuilder::default()
                .bounding(capabilities.clone())
                .effective(capabilities.clone())
                .permitted(capabilities)
                .inheritable(HashSet::new())
                .ambient(HashSet::new())
                .build()?,
        )
        .rlimits(Vec::new())
        .build()?;
    let mounts = [("/proc", "proc"), ("/dev", "tmpfs"), ("/sys", "sysfs")]
        .map(|(at, kind)| MountBuilder::default().destination(at).typ(kind).source(kind).options(Vec::new()).build())
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    let namespaces = [
        LinuxNamespaceType::Pid,
        LinuxNamespaceType::Network,
        LinuxNamespaceType::Ipc,
        LinuxNamespaceType::Uts,
        LinuxNamespaceType::Mount,
    ]
    .map(|kind| LinuxNamespaceBuilder::default().typ(kind).build())
    .into_iter()
    .collect::<Result<Vec<_>, _>>()?;
    let spec: Spec = SpecBuilder::default()
        .version("1.0.2")
        .hostname("plimsoll")
        .root(RootBuilder::default().path(root).readonly(true).build()?)
        .process(process)
        .mounts(mounts)
        .linux(LinuxBuilder::default().namespaces(namespaces).build()?)
        .build()?;
    Ok(serde_json::to_string(&spec)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_is_what_the_agent_needs_and_no_more() {
        let json = config(Path::new("/x/root"), "/fresh/agent").unwrap();
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["root"], serde_json::json!({"path": "/x/root", "readonly": true}));
        assert_eq!(value["process"]["args"], serde_json::json!(["/fresh/agent"]));
        assert_eq!(value["process"]["noNewPrivileges"], true);
        assert!(value["process"]["env"].as_array().is_none_or(Vec::is_empty));
        let bounding = value["process"]["capabilities"]["bounding"].as_array().unwrap();
        assert_eq!(bounding.len(), 9);
        assert!(!bounding.contains(&"CAP_NET_RAW".into()) && !bounding.contains(&"CAP_SYS_PTRACE".into()));
        assert!(value["linux"].get("seccomp").is_none());
    }
}

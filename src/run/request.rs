//! The digest of what was asked for.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::spec::{Command, Limit, Policy, Step};

/// SHA-256 (lowercase hex) over the steps as asked for and the policy's digest, as JSON with sorted keys and no white
/// space. Two runs of the same steps under the same policy have the same one.
#[must_use]
pub fn digest(steps: &[Step], policy: Option<&Policy>) -> String {
    digest_of(steps, policy.and_then(Policy::sha256).map(|digest| digest.to_string()).as_deref())
}

/// The same, with the policy known by its digest (lowercase hex): what a report says was asked for, computed again.
#[must_use]
pub fn digest_of(steps: &[Step], policy_sha256: Option<&str>) -> String {
    let request = json!({
        "steps": steps.iter().map(step).collect::<Vec<_>>(),
        "policy": policy_sha256,
    });
    // serde_json's map is sorted, and its compact form has no white space.
    hex::encode(Sha256::digest(request.to_string()))
}

fn step(step: &Step) -> Value {
    let limits: serde_json::Map<String, Value> =
        Limit::ALL.iter().map(|&limit| (limit.key().to_owned(), step.limits.amount(limit).into())).collect();
    json!({
        "index": step.index,
        "name": step.name,
        "artifact": step.artifact.to_string(),
        "command": command(&step.command),
        "env": step.env,
        "working-directory": step.working_directory,
        "continue-on-error": step.continue_on_error,
        "backend": step.backend.name(),
        "floor": step.floor(),
        "require": step.require,
        "image": step.image.as_ref().map(ToString::to_string),
        "image-digest": step.image_digest.map(|digest| digest.to_string()),
        "kernel": format!("{:?}", step.kernel),
        "limits": limits,
        "mounts": step.mounts.iter().map(|m| json!([m.path, m.at])).collect::<Vec<_>>(),
        "grants": step.grants.names(),
        "deterministic": step.deterministic,
        "outputs": step.outputs,
        "junit": step.junit,
    })
}

fn command(command: &Command) -> Value {
    match command {
        Command::Script { shell, text } => json!({ "shell": shell.argv(), "script": text }),
        Command::Wasm { args, .. } => json!({ "wasm": command.to_string(), "args": args }),
    }
}

//! `zizmor` finds nothing in what runs on GitHub.

use crate::common::{available, installed, program, repository};

#[test]
fn the_action_and_the_workflows_have_no_finding() {
    if !available("zizmor", installed("zizmor")) {
        return;
    }
    let pair = repository().join("examples/fork-pull-requests");
    let mut places = vec![repository().join("action.yml"), pair.join("run.yml"), pair.join("publish.yml")];
    let workflows = repository().join(".github");
    if workflows.exists() {
        places.push(workflows);
    }
    // Pedantic would ask for things that are a matter of taste; regular findings are faults.
    program("zizmor")
        .args(["--offline", "--no-progress", "--no-config"])
        .args(places)
        .run()
        .exits(0)
        .prints("No findings");
}

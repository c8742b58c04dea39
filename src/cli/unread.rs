//! The report of a run whose steps could not be read.
//!
//! Forges show reports; a report that is missing looks like one that had nothing to say. So a broken step file has one too,
//! with a single entry that says what is wrong with it.

use super::failure::Failure;
use crate::evidence::Tier;
use crate::exit::Exit;
use crate::gate::Dispatched;
use crate::report::{RefusalRecord, Report, Resources, StepReport, Verdict};

/// Makes the report of an empty run tell the failure.
pub fn tell(report: &mut Report, failure: &Failure) {
    report.verdict = Verdict::of(failure.exit);
    report.exit_code = failure.exit;
    report.steps = vec![entry(failure)];
}

fn entry(failure: &Failure) -> StepReport {
    StepReport {
        index: 1,
        name: "reading the steps".to_owned(),
        slug: "reading-the-steps".to_owned(),
        verdict: Verdict::of(failure.exit),
        exit: failure.exit,
        forgiven: false,
        dispatched: Dispatched::No,
        command: String::new(),
        image: None,
        grants: Vec::new(),
        engine: None,
        backend: None,
        // What an unread step would have had to prove is not known.
        floor: Tier::Process,
        tier: None,
        controls: Vec::new(),
        artifact: None,
        result: None,
        resources: Resources::default(),
        outputs: Vec::new(),
        guest_tests: None,
        guest_cases: Default::default(),
        refusal: Some(RefusalRecord {
            stage: "spec".to_owned(),
            reason: match failure.exit {
                Exit::Usage => "usage",
                _ => "unread",
            }
            .to_owned(),
            message: failure.message(),
            help: failure.help().map(str::to_owned),
        }),
        notices: Vec::new(),
    }
}

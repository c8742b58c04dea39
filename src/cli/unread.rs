//! The report of a run whose steps could not be read.
//!
//! Forges show reports; a report that is missing looks like one that had nothing to say. So a broken step file has one too,
//! with a single entry that says what is wrong with it.

use super::failure::Failure;
use crate::evidence::Tier;
use crate::exit::Exit;
use crate::report::{RefusalRecord, Report, StepReport, Verdict};

/// Makes the report of an empty run tell the failure.
pub fn tell(report: &mut Report, failure: &Failure) {
    report.verdict = Verdict::of(failure.exit);
    report.exit_code = failure.exit;
    report.steps = vec![entry(failure)];
}

fn entry(failure: &Failure) -> StepReport {
    StepReport {
        verdict: Verdict::of(failure.exit),
        exit: failure.exit,
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
        // What an unread step would have had to prove is not known.
        ..StepReport::untried(1, "reading the steps", "reading-the-steps", Tier::Process)
    }
}

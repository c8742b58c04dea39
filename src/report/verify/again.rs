//! Whether the renderings say what the record says: they are made again from it and compared.

use std::io::Read;
use std::os::fd::BorrowedFd;

use sha2::{Digest, Sha256};

use super::{Check, open_beneath};
use crate::report::guest_junit::{self, Cases};
use crate::report::json_v1::ReportV1;
use crate::report::write::{JUNIT_XML, REPORT_HTML, SUMMARY_MD, rendered};
use crate::report::{Logs, Report, StepReport, read_back};

/// Bytes of outputs parsed in search of the guests' own test reports.
const MAX_PARSED: u64 = 64 * 1024 * 1024;

impl Check {
    /// The renderings are the files on record, and what this record renders to.
    pub(super) fn renderings(&mut self, report: &ReportV1, root: BorrowedFd<'_>, outputs: Option<BorrowedFd<'_>>) {
        let expected = [JUNIT_XML, SUMMARY_MD, REPORT_HTML];
        let recorded: Vec<&str> = report.renderings.iter().map(|f| f.path.as_str()).collect();
        if recorded != expected {
            self.fault("renderings", format!("are {recorded:?}, not {expected:?}"));
        }
        for file in report.renderings.iter().filter(|f| expected.contains(&f.path.as_str())) {
            self.file(root, &file.path, file);
        }
        if report.tool.version != env!("CARGO_PKG_VERSION") {
            let version = &report.tool.version;
            self.unchecked
                .push(format!("whether the renderings say the same as the record: plimsoll {version} made them"));
            return;
        }
        let mut model = read_back::model(report);
        let whole = self.guest_cases(&mut model, outputs);
        if !whole {
            self.unchecked.push(format!(
                "whether {JUNIT_XML} and {REPORT_HTML} say the same as the record: they show cases of the guest's own tests, \
                 which only its output file has"
            ));
        }
        let Ok(logs) = Logs::beneath(root) else { return };
        for (name, text) in rendered(&model, &logs) {
            let Some(file) = report.renderings.iter().find(|f| f.path == name) else { continue };
            if whole || name == SUMMARY_MD {
                let sha256 = hex::encode(Sha256::digest(&text));
                self.require(file.sha256 == sha256, name, || "does not say what the record says".to_owned());
            }
        }
    }

    /// Finds the cases of the guests' own tests in the outputs, where the record counts some; says whether all are found.
    fn guest_cases(&mut self, model: &mut Report, outputs: Option<BorrowedFd<'_>>) -> bool {
        let mut left = MAX_PARSED;
        let mut all = true;
        for (i, step) in model.steps.iter_mut().enumerate().filter(|(_, step)| step.guest_tests.is_some()) {
            let Some(outputs) = outputs else { return false };
            let mut found = candidates(step, outputs, &mut left);
            match (found.pop(), found.pop()) {
                (Some(one), None) => step.guest_cases = one,
                (None, _) if left > 0 => {
                    let place = format!("steps[{i}].guest_tests");
                    self.fault(place, "no output file has that many test cases");
                    all = false;
                }
                _ => all = false,
            }
        }
        all
    }
}

/// Outputs of a step that read as a JUnit report with the counts on record; those that say the same count once.
fn candidates(step: &StepReport, outputs: BorrowedFd<'_>, left: &mut u64) -> Vec<Cases> {
    let mut found: Vec<Cases> = Vec::new();
    for file in step.outputs.iter().filter(|file| file.bytes <= guest_junit::MAX_BYTES) {
        *left = left.saturating_sub(file.bytes);
        if *left == 0 {
            break;
        }
        let mut bytes = Vec::new();
        let path = format!("{}/{}", step.directory(), file.path);
        let Ok((opened, _)) = open_beneath(outputs, &path) else { continue };
        if opened.take(guest_junit::MAX_BYTES).read_to_end(&mut bytes).is_err() {
            continue;
        }
        match guest_junit::parse(&bytes) {
            Ok(cases) if Some(cases.counts()) == step.guest_tests && !found.contains(&cases) => found.push(cases),
            _ => {}
        }
    }
    found
}

//! Whether a service signed the record.

use std::io::Read;
use std::os::fd::BorrowedFd;

use super::{Check, Provenance, open_beneath};
use crate::report::ReportOrigin;
use crate::report::json_v1::ReportV1;
use crate::report::sign::{self, PublicKey, REPORT_DSSE, ReportFile, Statement};

impl Check {
    /// Compares the envelope, where there is one or has to be one, with the record. Only a signature by one of `keys` over
    /// this very record proves anything; without keys the envelope just has to agree with the record.
    pub(super) fn signature(
        &mut self,
        root: BorrowedFd<'_>,
        report: &ReportV1,
        file: &ReportFile,
        keys: Option<&[PublicKey]>,
    ) -> Provenance {
        let Some(envelope) = self.envelope(root, report, keys.is_some()) else { return Provenance::NotProven };
        let statement = sign::read(&envelope).and_then(|unproven| match keys {
            Some(keys) => unproven.prove(keys),
            None => {
                let key = unproven.key_id();
                self.unchecked.push(format!("the signature: no key was given. It says that it is key {key}'s"));
                unproven.statement()
            }
        });
        let Statement { predicate, .. } = match statement {
            Ok(statement) => statement,
            Err(e) => {
                self.fault(REPORT_DSSE, e.to_string());
                return Provenance::NotProven;
            }
        };
        let same = predicate.report_json == *file && predicate.report == *report;
        self.require(same, REPORT_DSSE, || "was made for another report.json".to_owned());
        match keys {
            Some(_) if same => Provenance::Proven { signer: predicate.signer, claimed: predicate.claimed },
            _ => Provenance::NotProven,
        }
    }

    /// The envelope's bytes. That there is none is a fault where `needed`, or where the report speaks of a service.
    fn envelope(&mut self, root: BorrowedFd<'_>, report: &ReportV1, needed: bool) -> Option<Vec<u8>> {
        let read = open_beneath(root, REPORT_DSSE).and_then(|(file, _)| {
            let mut bytes = Vec::new();
            file.take(sign::MAX_BYTES as u64 + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        });
        match read {
            Ok(bytes) => Some(bytes),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                if report.origin == ReportOrigin::Service {
                    self.fault("origin", format!("is service, but there is no {REPORT_DSSE}"));
                } else if needed {
                    self.fault(REPORT_DSSE, "is missing: no service signed this report, it is the job's own statement");
                }
                None
            }
            Err(e) => {
                self.fault(REPORT_DSSE, format!("cannot be read: {e}"));
                None
            }
        }
    }
}

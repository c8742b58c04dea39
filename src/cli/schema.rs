//! `plimsoll schema step|report|policy|doctor|predicate`.

use clap::{Args, ValueEnum};

use super::doctor::record::DoctorV1;
use super::failure::Failure;
use super::output::Log;
use crate::exit::Exit;
use crate::report::json_v1::ReportV1;
use crate::report::sign::Predicate;
use crate::spec::{policy_schema, step_schema};

/// Arguments.
#[derive(Debug, Args)]
pub struct SchemaArgs {
    /// Which
    pub of: Schema,
}

/// What has a schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Schema {
    /// Step files
    Step,
    /// Reports
    Report,
    /// The operator's policy
    Policy,
    /// What `plimsoll doctor --json` prints
    Doctor,
    /// What a service signs: the predicate of report.dsse.json
    Predicate,
}

/// Prints it.
pub fn schema(args: &SchemaArgs) -> Result<Exit, Failure> {
    let schema = match args.of {
        Schema::Step => step_schema(),
        Schema::Report => ReportV1::json_schema(),
        Schema::Policy => policy_schema(),
        Schema::Doctor => DoctorV1::json_schema(),
        Schema::Predicate => Predicate::json_schema(),
    };
    let text = serde_json::to_string_pretty(&schema).map_err(|e| Failure::from_error(Exit::Internal, &e))?;
    Log::data().line(&text);
    Ok(Exit::Passed)
}

//! The outputs of a step on GitHub: a file that the runner names.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::env::{Env, Var};
use crate::exit::Exit;
use crate::report::{Report, Verdict};

/// Why something could not be handed to the runner.
#[derive(Debug, thiserror::Error)]
pub enum HandOver {
    /// The variable that names the file is not set.
    #[error("{0} is not set: this is no step of GitHub Actions")]
    Unset(&'static str),
    /// The file can't be written.
    #[error("failed to append to {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The outputs of the action: `verdict`, `tier`, `exit-code`, `report-dir`, `outputs-dir`.
#[derive(Debug)]
pub struct Outputs<'a> {
    /// The run's verdict.
    pub verdict: Verdict,
    /// The weakest tier that a step was proven behind; empty if one ran behind none.
    pub tier: String,
    /// What the process exits with.
    pub exit: Exit,
    /// Where the report is.
    pub report_dir: &'a Path,
    /// Where output files are.
    pub outputs_dir: &'a Path,
}

impl<'a> Outputs<'a> {
    /// From a report.
    #[must_use]
    pub fn of(report: &Report, report_dir: &'a Path, outputs_dir: &'a Path) -> Self {
        let tiers: Option<Vec<_>> = report.steps.iter().map(|s| s.tier).collect();
        let tier = tiers.and_then(|t| t.into_iter().min()).map(|t| t.to_string()).unwrap_or_default();
        Self { verdict: report.verdict, tier, exit: report.exit_code, report_dir, outputs_dir }
    }

    /// For a run that came to no report.
    #[must_use]
    pub fn without_report(exit: Exit, report_dir: &'a Path, outputs_dir: &'a Path) -> Self {
        Self { verdict: Verdict::of(exit), tier: String::new(), exit, report_dir, outputs_dir }
    }

    /// Appends them to the step's outputs.
    pub fn write(&self, env: &Env) -> Result<(), HandOver> {
        // A path that holds a line break could add outputs of its own; such a path is left out.
        let path = |p: &Path| p.to_str().filter(|p| !p.contains(char::is_control)).unwrap_or_default().to_owned();
        let lines = [
            ("verdict", self.verdict.to_string()),
            ("tier", self.tier.clone()),
            ("exit-code", self.exit.code().to_string()),
            ("report-dir", path(self.report_dir)),
            ("outputs-dir", path(self.outputs_dir)),
        ];
        let text: String = lines.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
        append(env, Var::GithubOutput, &text)
    }
}

fn append(env: &Env, var: Var, text: &str) -> Result<(), HandOver> {
    let path = env.path(var).ok_or(HandOver::Unset(var.name()))?;
    let file = OpenOptions::new().append(true).create(true).open(&path);
    file.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|source| HandOver::Write { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_lines_and_a_path_adds_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("out");
        let env: Env = [(Var::GithubOutput, file.as_os_str())].into_iter().collect();
        let hostile = PathBuf::from("x\nverdict=passed");
        Outputs::without_report(Exit::Usage, &hostile, Path::new("plimsoll-outputs")).write(&env).unwrap();
        assert_eq!(
            std::fs::read_to_string(&file).unwrap(),
            "verdict=error\ntier=\nexit-code=2\nreport-dir=\noutputs-dir=plimsoll-outputs\n"
        );
        let unset = Outputs::without_report(Exit::Usage, &hostile, &hostile).write(&Env::default());
        assert!(matches!(unset, Err(HandOver::Unset("GITHUB_OUTPUT"))));
    }
}

//! `plimsoll doctor`: what this host can prove for each backend, why not, and the fix. Found out by doing ([`trial`]);
//! the host's settings that stand behind it are looked at ([`survey`]).
//!
//! What takes its time is [kept], and said with its age; `--fresh` tries again, and `--verbose`, which shows what was seen.

pub mod kept;
pub mod record;

use std::io;
use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use jiff::Timestamp;

use self::record::{BackendV1, DoctorV1, SCHEMA};
use super::failure::Failure;
use super::output::result::millis;
use super::output::{Log, Style};
use super::trial::{self, Trials};
use super::{CommonArgs, args, signals};
use crate::backend::{Backend, survey};
use crate::env::{Env, Var};
use crate::evidence::Status;
use crate::evidence::host::{Finding, Grade};
use crate::exit::Exit;
use crate::report::{RefusalRecord, StepReport};
use crate::run::{self, host};
use crate::spec::{self, Overrides, Policy, PolicyRefusal, Step, Surroundings};
use crate::text::Untrusted;

/// Arguments.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Only this backend; exit 0 only if it is usable
    #[arg(long, value_name = "BACKEND")]
    pub backend: Option<Which>,

    /// The runsc to try, otherwise PLIMSOLL_RUNSC or the one in PATH
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub runsc: Option<PathBuf>,

    /// The firecracker to try, otherwise PLIMSOLL_FIRECRACKER or the one in PATH
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub firecracker: Option<PathBuf>,

    /// How gVisor intercepts system calls: systrap, ptrace, kvm
    #[arg(long, value_name = "PLATFORM", value_parser = ["systrap", "ptrace", "kvm"])]
    pub platform: Option<String>,

    /// Try again what was found out since this host was started
    #[arg(long)]
    pub fresh: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A backend, on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Which {
    /// A microVM
    Firecracker,
    /// A gVisor container
    Gvisor,
    /// WebAssembly in a jailed worker
    Wasm,
}

impl Which {
    const fn kind(self) -> Backend {
        match self {
            Which::Firecracker => Backend::Firecracker,
            Which::Gvisor => Backend::Gvisor,
            Which::Wasm => Backend::Wasm,
        }
    }
}

/// Tries the backends and prints what came of it.
pub fn doctor(args: &DoctorArgs, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    let engines = args::engines(args.runsc.clone(), args.platform.clone(), args.firecracker.clone(), env);
    let trials = Trials::new(engines.clone(), env)?;
    let which = args.backend.map_or_else(|| vec![Which::Firecracker, Which::Gvisor, Which::Wasm], |one| vec![one]);
    let mut rows = Vec::new();
    super::runtime()?.block_on(async {
        let cancel = signals::listen().map_err(|e| Failure::from_error(Exit::Internal, &e))?;
        for kind in which.into_iter().map(Which::kind) {
            let policy = Policy::load();
            let key = kept::key(kind, &engines, &policy);
            let asked = key.filter(|_| !args.fresh && !common.verbose);
            if let Some(found) = asked.and_then(|key| kept::recall(kind, key, env)) {
                rows.push(Row { kind, found, step: None });
                continue;
            }
            let steps = spec::load(&[], &overrides(kind, &trials), &Surroundings::default())?;
            let steps: Vec<Step> = steps.into_iter().map(|step| trials.harmless(step)).collect();
            let forbidden = steps.first().and_then(|step| forbidden(&policy, step));
            let report = trials.run(steps, policy, cancel.clone()).await?;
            if let Some(signal) = *cancel.borrow() {
                return Err(Failure::new(signals::exit(signal), "cancelled"));
            }
            let Some(mut step) = report.steps.into_iter().next() else { continue };
            if forbidden.is_some() {
                step.refusal = forbidden;
            }
            let row = Row::of(kind, step);
            if let Some(key) = key {
                kept::keep(kind, key, &row.found, env);
            }
            rows.push(row);
        }
        Ok(())
    })?;
    let mut findings = survey::survey(env, &run::state_dir(env));
    findings.extend(rows.iter().find_map(Row::jailer));
    let mut out = Log::data();
    if args.json {
        let record = as_record(&rows, findings);
        let text = serde_json::to_string_pretty(&record).map_err(|e| Failure::from_error(Exit::Internal, &e))?;
        out.line(&text);
    } else {
        let style = Style::of(env, &io::stdout());
        out.text(&as_text(&rows, style, common));
        if !common.quiet {
            out.text(&about_host(&findings, style, common));
        }
        if env.path(Var::Path).is_none() {
            tracing::warn!("PATH is not set, so no engine can be found in it");
        }
    }
    // One of them is enough, unless one was asked for.
    Ok(if rows.iter().any(|row| row.found.usable) {
        Exit::Passed
    } else {
        match rows.first().filter(|_| args.backend.is_some()) {
            Some(Row { step: Some(step), .. }) => trial::exit(step),
            _ => Exit::Unavailable,
        }
    })
}

fn overrides(kind: Backend, trials: &Trials<'_>) -> Overrides {
    let run = if kind == Backend::Wasm { "nothing.wat" } else { "exit 0" };
    Overrides {
        name: Some(kind.name().to_owned()),
        run: Some(run.to_owned()),
        backend: Some(kind.name().to_owned()),
        // A microVM needs one.
        image: (kind == Backend::Firecracker).then(|| format!("dir:{}", trials.image().display())),
        ..Overrides::default()
    }
}

/// What to say where the policy does not allow a backend: nobody wrote the step that is tried here.
fn forbidden(policy: &Result<Policy, PolicyRefusal>, step: &Step) -> Option<RefusalRecord> {
    let Err(PolicyRefusal::Step(overreach)) = policy.as_ref().ok()?.apply(step) else { return None };
    Some(RefusalRecord {
        stage: "policy".to_owned(),
        reason: "not-allowed".to_owned(),
        message: format!("the operator's policy allows {} ({})", overreach.allowed, overreach.rule),
        help: Some("choose another backend, or ask the owner of this runner".to_owned()),
    })
}

struct Row {
    kind: Backend,
    found: BackendV1,
    /// What was tried just now.
    step: Option<StepReport>,
}

impl Row {
    fn of(kind: Backend, step: StepReport) -> Self {
        let found = BackendV1 {
            backend: kind.name().to_owned(),
            usable: trial::admitted(&step),
            tier: step.tier,
            floor: step.floor,
            total_ms: step.resources.total_ms,
            engine: step.engine.clone(),
            controls: step.controls.iter().map(|c| (c.id, c.status)).collect(),
            blocker: step.refusal.as_ref().map(|r| r.message.clone()),
            help: step.refusal.as_ref().and_then(|r| r.help.clone()),
            found_at: Timestamp::now(),
            cached: false,
        };
        Self { kind, found, step: Some(step) }
    }

    fn engine(&self) -> Option<String> {
        let engine = self.found.engine.as_ref()?;
        let settings = engine.settings.iter().map(|(k, v)| format!(", {k} {v}"));
        let text = format!("{}{}", engine.engine_version, settings.collect::<String>());
        Some(Untrusted::new(text).for_terminal(200))
    }

    /// How long ago it was found out, if not just now.
    fn age(&self, style: Style) -> String {
        if !self.found.cached {
            return String::new();
        }
        let since = match Timestamp::now().duration_since(self.found.found_at).as_secs() {
            seconds @ ..60 => format!("{} s", seconds.max(0)),
            seconds @ 60..7200 => format!("{} min", seconds / 60),
            seconds => format!("{} h", seconds / 3600),
        };
        style.dim(&format!(" (found out {since} ago; --fresh tries again)"))
    }

    /// Firecracker asks for the jailer of its own release.
    fn jailer(&self) -> Option<Finding> {
        let binaries = &self.found.engine.as_ref().filter(|_| self.kind == Backend::Firecracker)?.binaries;
        let [vmm, jailer] = binaries.as_slice() else { return None };
        Some(if vmm.version == jailer.version {
            Finding::good("jailer-version", format!("Firecracker and jailer are both {}", vmm.version))
        } else {
            Finding::not(
                Grade::Weak,
                "jailer-version",
                format!("Firecracker is {}, its jailer {}", vmm.version, jailer.version),
                "sudo plimsoll setup firecracker",
            )
        })
    }

    fn below(&self) -> Vec<String> {
        let weak = self.found.controls.iter().filter(|(_, s)| **s < Status::Enforced && **s != Status::Unknown);
        weak.map(|(id, status)| format!("{id} {status}")).collect()
    }
}

fn as_text(rows: &[Row], style: Style, common: &CommonArgs) -> String {
    let mut text = String::new();
    for row in rows {
        let (found, age) = (&row.found, row.age(style));
        let name = format!("{:<12}", found.backend);
        let clean = |text: &str| Untrusted::new(text).for_terminal(1000);
        if found.usable {
            let tier = found.tier.map_or_else(|| "nothing".to_owned(), |t| t.to_string());
            let took = millis(found.total_ms);
            let engine = row.engine().map(|e| format!(" ({e})")).unwrap_or_default();
            text.push_str(&format!(
                "{}{}{age}{engine}\n",
                style.bold(&name),
                style.good(&format!("proves {tier} in {took}"))
            ));
            let below = row.below();
            if !below.is_empty() {
                text.push_str(&format!("{:12}{}\n", "", style.dim(&below.join(", "))));
            }
        } else {
            text.push_str(&format!("{}{}{age}\n", style.bold(&name), style.bad("not usable")));
            if let Some(blocker) = &found.blocker {
                text.push_str(&format!("{:12}{}\n", "", clean(blocker)));
            }
            if let Some(help) = found.help.as_deref().filter(|h| !h.is_empty()) {
                text.push_str(&format!("{:12}fix: {}\n", "", clean(help)));
            }
        }
        if let Some(step) = row.step.as_ref().filter(|_| common.verbose) {
            for control in &step.controls {
                for seen in &control.observations {
                    let words = clean(&seen.fact.words());
                    text.push_str(&format!("{:12}{:<17} {:<13} {words}\n", "", control.id, control.status));
                }
            }
        }
    }
    text
}

/// The machine, and what is not as it should be there; with `--verbose` what is, too.
fn about_host(findings: &[Finding], style: Style, common: &CommonArgs) -> String {
    let (host, policy) = (host::describe(None), run::policy_record(&Policy::load()));
    let mut text = style.dim(&format!(
        "host: {}, {}, virtualization: {}; operator's policy: {}\n",
        host.kernel, host.cpu, host.virtualization, policy.effect
    ));
    let clean = |text: &str| Untrusted::new(text).for_terminal(1000);
    for finding in findings.iter().filter(|f| common.verbose || f.grade != Grade::Good) {
        let grade = format!("{:<8}", finding.grade.name());
        let grade = match finding.grade {
            Grade::Good => style.good(&grade),
            Grade::Bad => style.bad(&grade),
            Grade::Weak | Grade::Unknown => style.dim(&grade),
        };
        text.push_str(&format!("{grade}{:<22}{}\n", finding.id, clean(&finding.fact)));
        if let Some(fix) = &finding.fix {
            text.push_str(&format!("{:30}fix: {}\n", "", clean(fix)));
        }
    }
    let good = findings.iter().filter(|f| f.grade == Grade::Good).count();
    if !common.verbose && good > 0 {
        text.push_str(&style.dim(&format!("{good} more settings of the host are good (--verbose shows them)\n")));
    }
    text
}

fn as_record(rows: &[Row], findings: Vec<Finding>) -> DoctorV1 {
    DoctorV1 {
        schema: SCHEMA,
        host: host::describe(None),
        policy: run::policy_record(&Policy::load()),
        findings,
        backends: rows.iter().map(|row| row.found.clone()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_that_forbids_a_backend_is_named_and_no_step_that_nobody_wrote() {
        let flags = Overrides { run: Some("x.wat".into()), backend: Some("wasm".into()), ..Overrides::default() };
        let step = &spec::load(&[], &flags, &Surroundings::default()).unwrap()[0];
        let refusal = forbidden(&Ok(Policy::of_text("backends: [gvisor]\n")), step).unwrap();
        assert!(refusal.message.contains("policy allows gvisor"), "{}", refusal.message);
        assert!(refusal.message.contains("policy.yml") && !refusal.message.contains("step"), "{}", refusal.message);
        assert!(forbidden(&Ok(Policy::of_text("backends: [wasm]\n")), step).is_none());
        assert!(forbidden(&Ok(Policy::absent()), step).is_none());
    }
}

//! Reports that came out of another job: what they may claim, and what is shown of it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use plimsoll::env::Var;
use plimsoll::exit::Exit;
use plimsoll::forge::Context;
use plimsoll::publish::Target::{GithubCheck, GithubComment, GithubStatus};
use plimsoll::publish::proof::PublicKey;
use plimsoll::publish::standing::Expected;
use plimsoll::publish::{self, Options, Publication, Record, Standing};
use plimsoll::report::sign::{self, SigningKey};
use plimsoll::report::{Report, ReportOrigin, Verdict};
use plimsoll::run::request;
use plimsoll::spec::{Overrides, Step, Surroundings};
use serde_json::json;

use crate::fake::Github;
use crate::samples;
use crate::{HEAD, github_env, only, snapshot};

const UNVERIFIED: &str = "unverified: claimed by the pull request's own job";

/// A report of a fork's job, as the privileged half of the pair gets it.
fn report() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    samples::passed().commit(directory.path());
    directory
}

async fn publish_in(github: &Github, report: &Path, targets: &[publish::Target]) -> (Record, Publication) {
    let mut env = github_env("workflow_run_fork", &github.uri());
    env.retain(|(var, _)| *var != Var::GithubJob);
    env.push((Var::GithubJob, "publish".to_owned()));
    let env = snapshot(&env);
    let context = Context::detect(&env);
    let (what, _) = Publication::of_another_job(report, &[], &Expected::default(), context, Options::default());
    (publish::publish(&what, targets, &env).await, what)
}

#[tokio::test]
async fn an_unsigned_report_is_shown_and_never_green() {
    let github = Github::start().await.with(|state| {
        state.pulls = vec![
            json!({"number": 26, "state": "open", "head": {"sha": "0".repeat(40)}}),
            json!({"number": 27, "state": "open", "head": {"sha": HEAD}}),
        ];
    });
    let report = report();
    let targets = [GithubComment, GithubStatus, GithubCheck];
    let (record, _) = publish_in(&github, &report.path().join("report"), &targets).await;
    assert!(record.targets.iter().all(|t| t.outcome == "posted"), "{record:?}");
    assert_eq!(record.standing, "unverified");
    let status = &github.statuses()[0];
    assert_eq!((status["state"].as_str(), status["sha"].as_str()), (Some("error"), Some(HEAD)));
    assert_eq!(status["context"], "plimsoll / publish", "the publishing job's name, not one that a report claims");
    assert!(status["description"].as_str().unwrap().starts_with(UNVERIFIED), "{status}");
    assert_eq!(status["target_url"], "https://github.com/octo/widgets/actions/runs/30433642");
    assert_eq!(github.state.lock().unwrap().checks[0]["conclusion"], "neutral");
    let text = &github.comments()[0].body;
    assert!(text.contains("### ❔ Plimsoll: unverified") && text.contains(&format!("_{UNVERIFIED}_")), "{text}");
    assert!(text.contains("It says: passed") && text.contains("(--key)") && text.contains("(--spec)"), "{text}");
    assert!(text.contains("it is about another commit") && text.contains("it is about another repository"), "{text}");
    let asked = github.asked().await;
    assert!(asked.contains(&"POST /repos/octo/widgets/issues/27/comments".to_owned()), "by the head: {asked:?}");
}

#[tokio::test]
async fn a_number_that_a_report_claims_is_not_believed() {
    // The sample says that it is about pull request 42; nothing that GitHub says leads there.
    let github = Github::start().await.with(|state| {
        state.pulls = vec![json!({"number": 42, "state": "open", "head": {"sha": "1".repeat(40)}})];
    });
    let report = report();
    let (record, _) = publish_in(&github, &report.path().join("report"), &[GithubComment]).await;
    assert_eq!(only(&record).0, "skipped", "{record:?}");
    assert!(github.comments().is_empty());
}

#[tokio::test]
async fn a_job_that_left_no_report_is_an_error_and_not_silence() {
    let github = Github::start().await.with(|state| {
        state.pulls = vec![json!({"number": 27, "state": "open", "head": {"sha": HEAD}})];
    });
    let empty = tempfile::tempdir().unwrap();
    let broken = tempfile::tempdir().unwrap();
    fs::write(broken.path().join("report.json"), "{}").unwrap();
    for place in [empty.path().to_owned(), broken.path().to_owned(), empty.path().join("absent")] {
        publish_in(&github, &place, &[GithubStatus, GithubComment]).await;
        let status = github.statuses().pop().unwrap();
        assert_eq!(status["state"], "error");
        assert!(status["description"].as_str().unwrap().starts_with("No report: "), "{status}");
        assert!(github.comments()[0].body.contains("### ⚠️ Plimsoll: no report"), "{}", github.comments()[0].body);
    }
}

#[tokio::test]
async fn links_in_a_report_lead_nowhere() {
    let github = Github::start().await.with(|state| {
        state.pulls = vec![json!({"number": 27, "state": "open", "head": {"sha": HEAD}})];
    });
    let secret = tempfile::tempdir().unwrap();
    fs::write(secret.path().join("secret"), "hush-of-the-runner").unwrap();
    // A log that is a link.
    let report = report();
    let root = report.path().join("report");
    let log = root.join("steps/01-unit-tests-of-the-generated-patch/stdout.log");
    fs::remove_file(&log).unwrap();
    symlink(secret.path().join("secret"), &log).unwrap();
    let (_, what) = publish_in(&github, &root, &[GithubComment]).await;
    assert!(
        matches!(&what.standing, Standing::Unverified(reasons) if reasons.iter().any(|r| r.contains("hold together")))
    );
    assert!(!github.comments()[0].body.contains("hush-of-the-runner"));
    // A directory that is one, and a record that is one.
    fs::rename(root.join("steps"), root.join("moved")).unwrap();
    symlink(root.join("moved"), root.join("steps")).unwrap();
    publish_in(&github, &root, &[GithubComment]).await;
    assert!(!github.comments()[0].body.contains("collecting from /workspace"), "{}", github.comments()[0].body);
    fs::rename(root.join("report.json"), secret.path().join("report.json")).unwrap();
    symlink(secret.path().join("report.json"), root.join("report.json")).unwrap();
    publish_in(&github, &root, &[GithubComment]).await;
    assert!(github.comments()[0].body.contains("no report"), "{}", github.comments()[0].body);
}

#[tokio::test]
async fn a_pipe_in_place_of_a_report_holds_nothing_up() {
    let github = Github::start().await;
    let directory = tempfile::tempdir().unwrap();
    let made = std::process::Command::new("mkfifo").arg(directory.path().join("report.json")).status().unwrap();
    assert!(made.success());
    publish_in(&github, directory.path(), &[GithubStatus]).await;
    assert_eq!(github.statuses()[0]["state"], "error");
}

/// A report as a service signs it, about the steps of a step file, this commit and this repository; and what to compare.
struct Signed {
    directory: tempfile::TempDir,
    key: SigningKey,
    expected: Expected,
}

const STEPS: &str = "version: 1
steps:
  - name: Unit tests of the generated patch
    run: python3 -m unittest -v
    env: {MODE: strict}
    sandbox: {backend: gvisor}
";

fn steps(text: &str) -> Vec<Step> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("plimsoll.yml");
    fs::write(&file, text).unwrap();
    let around = Surroundings { home: None };
    let mut steps = plimsoll::spec::load(&[file], &Overrides::default(), &around).unwrap();
    // As if the file were the same one each time.
    for step in &mut steps {
        step.artifact = plimsoll::spec::ArtifactSource::Path("dist/patch.tar.zst".into());
    }
    steps
}

fn signed(change: impl FnOnce(&mut Report)) -> Signed {
    let directory = tempfile::tempdir().unwrap();
    let mut sample = samples::passed();
    let report = &mut sample.report;
    report.origin = ReportOrigin::Service;
    report.request_sha256 = request::digest_of(&steps(STEPS), report.policy.sha256.as_deref());
    let ci = report.ci.as_mut().unwrap();
    (ci.repository, ci.head_sha) = (Some("octo/widgets".to_owned()), Some(HEAD.to_owned()));
    change(report);
    let record = sample.commit(directory.path());
    let key = SigningKey::generate().unwrap();
    let json = fs::read(directory.path().join("report/report.json")).unwrap();
    let envelope = sign::envelope(&key, &json, &sign::claims(&record)).unwrap();
    fs::write(directory.path().join("report/report.dsse.json"), envelope).unwrap();
    let expected = Expected { steps: Some(steps(STEPS)), artifact: Some(samples::hex64('b')) };
    Signed { directory, key, expected }
}

impl Signed {
    async fn state(&self) -> (String, Standing) {
        self.state_with(&[self.key.public().clone()]).await
    }

    async fn state_with(&self, keys: &[PublicKey]) -> (String, Standing) {
        let github = Github::start().await;
        let env = snapshot(&github_env("workflow_run_fork", &github.uri()));
        let root = self.directory.path().join("report");
        let context = Context::detect(&env);
        let (what, _) = Publication::of_another_job(&root, keys, &self.expected, context, Options::default());
        publish::publish(&what, &[GithubStatus], &env).await;
        (github.statuses()[0]["state"].as_str().unwrap().to_owned(), what.standing)
    }
}

#[tokio::test]
async fn a_signed_report_about_the_steps_that_were_asked_for_is_green() {
    let good = signed(|_| {});
    let (state, standing) = good.state().await;
    assert_eq!(state, "success", "{standing:?}");
    assert!(matches!(standing, Standing::Signed { artifact: true, .. }), "{standing:?}");
    let failed = signed(|report| {
        let step = &mut report.steps[0];
        step.result.as_mut().unwrap().exit_code = Some(1);
        (step.exit, step.verdict) = (Exit::GuestFailed, Verdict::Failed);
        (report.exit_code, report.verdict) = (Exit::GuestFailed, Verdict::Failed);
    });
    let (state, standing) = failed.state().await;
    assert_eq!(state, "failure", "{standing:?}");
}

#[tokio::test]
async fn with_one_reason_missing_a_signed_report_is_not_green() {
    async fn red(case: &Signed, keys: Option<&[PublicKey]>, reason: &str) {
        let (state, standing) = match keys {
            Some(keys) => case.state_with(keys).await,
            None => case.state().await,
        };
        assert_eq!(state, "error", "{reason}");
        let Standing::Unverified(reasons) = &standing else { panic!("{reason}: {standing:?}") };
        assert!(reasons.len() == 1 && reasons[0].contains(reason), "{reason}: {reasons:?}");
    }
    let good = signed(|_| {});
    red(&good, Some(&[]), "(--key)").await;
    red(&good, Some(&[SigningKey::generate().unwrap().public().clone()]), "no service signed it").await;

    let without = Signed { expected: Expected { steps: None, ..good.expected.clone() }, ..signed(|_| {}) };
    red(&without, None, "(--spec)").await;
    for (easier, reason) in [
        (STEPS.replace("strict", "lax"), "in something that it does not show"),
        (STEPS.replace("unittest -v", "unittest"), "the command of a step is"),
        (STEPS.replace("backend: gvisor", "backend: gvisor, minimum-isolation: container"), "the floor of a step is"),
        (format!("{STEPS}  - {{name: two, run: x, sandbox: {{backend: gvisor}}}}\n"), "has 2 steps"),
    ] {
        let expected = Expected { steps: Some(steps(&easier)), ..good.expected.clone() };
        red(&Signed { expected, ..signed(|_| {}) }, None, reason).await;
    }
    let other = Expected { artifact: Some(samples::hex64('c')), ..good.expected.clone() };
    red(&Signed { expected: other, ..signed(|_| {}) }, None, "it is about the artifact").await;
    red(&signed(|r| r.ci.as_mut().unwrap().head_sha = Some("0".repeat(40))), None, "another commit").await;
    red(
        &signed(|r| r.ci.as_mut().unwrap().repository = Some("mallory/widgets".to_owned())),
        None,
        "another repository",
    )
    .await;
    red(
        &signed(|r| {
            // The event's run began in 2026.
            (r.started_at, r.ended_at) =
                ("2024-01-01T00:00:00Z".parse().unwrap(), "2024-01-01T00:01:00Z".parse().unwrap());
        }),
        None,
        "older than the run",
    )
    .await;

    // What was changed after signing: the record, and the signature.
    let changed = signed(|_| {});
    let file = changed.directory.path().join("report/report.json");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("runner-7", "runner-8")).unwrap();
    let (state, standing) = changed.state().await;
    assert_eq!(state, "error", "{standing:?}");
    let cut = signed(|_| {});
    fs::write(cut.directory.path().join("report/report.dsse.json"), "{}").unwrap();
    red(&cut, None, "no service signed it").await;
}

//! One step on its way: policy, artifact, image, gate, report.

use std::fs::{DirBuilder, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plimsoll_guest::Dispatch;
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::image::{self, Prepared};
use super::machine::{self, Machine};
use super::payload::{self, OUTPUT_BUDGET};
use super::record::{self, refusal, refuse};
use super::{Context, Event, fetching, unpacker};
use crate::artifact::fetch::Fetched;
use crate::artifact::{Acquire, Budget, Error as ArtifactError, FileId, Purpose, Summary, acquire};
use crate::backend::channel::Cancel;
use crate::backend::wasm::{ModuleFile, runtimes};
use crate::backend::{Backend, Engines, MachineParts, Output, Plan, PrepareError, firecracker};
use crate::env::Env;
use crate::exit::Exit;
use crate::gate::{Dispatched, End, Passage, Request, pass};
use crate::image::Cache;
use crate::image::store::StoreError;
use crate::report::guest_junit;
use crate::report::{ArtifactRecord, RefusalRecord, StepReport};
use crate::spec::{ArtifactSource, BackendChoice, ImageSource, Sha256Digest, Step};

/// How long bringing in an artifact may take.
const ARTIFACT_DEADLINE: Duration = Duration::from_secs(600);

/// Takes one step all the way. Whatever happens, the report says so.
pub async fn run(context: &Context, step: &Step, mut cancel: Cancel) -> StepReport {
    let began = Instant::now();
    let mut report = record::blank(step);
    if let Some(signal) = *cancel.borrow() {
        record::cancel(&mut report, signal);
        return report;
    }
    let attempt = Attempt { context, step, report: &mut report };
    attempt.go(&mut cancel).await;
    let total = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    report.resources.total_ms = total;
    report
}

struct Attempt<'a> {
    context: &'a Context,
    step: &'a Step,
    report: &'a mut StepReport,
}

/// What a step needs before it can go to the gate.
struct Ready {
    scratch: PathBuf,
    workspace: PathBuf,
    dispatch: Dispatch,
    module: Option<ModuleFile>,
}

impl Attempt<'_> {
    fn progress(&self, what: impl Into<String>) {
        let _ = self.context.events.send(Event::Progress { index: self.report.index, what: what.into() });
    }

    async fn go(mut self, cancel: &mut Cancel) {
        let began = Instant::now();
        let floor = self.step.floor();
        // A microVM has nothing of the runner's own tree to show.
        let own_image = !matches!(self.step.image, None | Some(ImageSource::Host));
        let there = |backend: &Backend| {
            *backend != Backend::Firecracker || own_image || self.step.backend == BackendChoice::Firecracker
        };
        let known: Vec<Backend> = self.step.candidates().into_iter().filter(there).collect();
        let candidates: Vec<Backend> = known.iter().copied().filter(|b| b.reaches() >= floor).collect();
        if candidates.is_empty() {
            return refuse(self.report, Exit::Refused, record::out_of_reach(&known, floor));
        }
        let Some(ready) = self.ready(cancel).await else { return };
        tracing::debug!("the artifact is unpacked");
        let unpacked_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let last = candidates.len() - 1;
        for (position, backend) in candidates.into_iter().enumerate() {
            self.report.backend = Some(backend.name().to_owned());
            self.report.resources.prepare_ms = unpacked_ms;
            let more = position < last;
            if self.through_the_gate(backend, &ready, cancel, more).await {
                break;
            }
        }
    }

    /// Brings in the artifact and reads the program out of it.
    async fn ready(&mut self, cancel: &mut Cancel) -> Option<Ready> {
        let scratch = self.context.scratch.join(self.step.directory());
        let workspace = scratch.join("workspace");
        let made = DirBuilder::new().mode(0o700).create(&scratch).and_then(|()| make_open(&workspace));
        if let Err(e) = made {
            self.internal("prepare", format!("failed to make {}: {e}", scratch.display()));
            return None;
        }
        self.progress("unpacking");
        if !self.unpack(&workspace, cancel).await {
            return None;
        }
        match payload::dispatch(self.step, &workspace, runtimes::open) {
            Ok((dispatch, module)) => Some(Ready { scratch, workspace, dispatch, module }),
            Err(e) => {
                let help = e.help().to_owned();
                let exit = match e {
                    payload::PayloadError::Runtime { .. } => Exit::Unavailable,
                    payload::PayloadError::Entropy => Exit::Internal,
                    _ => Exit::Rejected,
                };
                refuse(self.report, exit, refusal("artifact", "no-program", crate::text::chain(&e), &help));
                None
            }
        }
    }

    /// Brings in the artifact; says whether it is there.
    async fn unpack(&mut self, workspace: &Path, cancel: &mut Cancel) -> bool {
        let (path, sha256) = match &self.step.artifact {
            ArtifactSource::Path(path) => (path.clone(), None),
            ArtifactSource::PathWithDigest { path, sha256 } => (path.clone(), Some(*sha256)),
            ArtifactSource::GitHub { .. } | ArtifactSource::GitLab { .. } => {
                match self.fetch(workspace, cancel).await {
                    // What came is what is unpacked.
                    Ok(fetched) => (fetched.path, Some(fetched.sha256)),
                    Err(Settled) => return false,
                }
            }
        };
        let what = Bring { path, purpose: Purpose::Artifact, sha256, exclude: self.context.exclude.clone() };
        let source = self.step.artifact.to_string();
        let Some(summary) = self.bring("artifact", &source, what, workspace, cancel).await else { return false };
        self.report.artifact = Some(ArtifactRecord {
            source,
            format: summary.packing(),
            sha256: summary.sha256.to_string(),
            files: summary.files,
            bytes: summary.bytes,
        });
        true
    }

    /// Downloads an artifact that a forge keeps, into the directory that the workspace is in. After an `Err` the report says
    /// why not.
    async fn fetch(&mut self, workspace: &Path, cancel: &mut Cancel) -> Result<Fetched, Settled> {
        let (events, index) = (self.context.events.clone(), self.report.index);
        let (env, directory) = (Env::process(), workspace.parent().unwrap_or(workspace));
        let progress = |what: String| {
            let _ = events.send(Event::Progress { index, what });
        };
        tokio::select! {
            done = fetching::artifact(&self.step.artifact, &env, directory, &progress) => done.map_err(|failed| {
                let fetching::NotFetched { reason, message, help } = failed;
                refuse(self.report, Exit::Rejected, refusal("artifact", reason, message, help));
                Settled
            }),
            signal = crate::backend::channel::cancelled(cancel) => {
                record::cancel(self.report, signal);
                Err(Settled)
            }
        }
    }

    /// Unpacks or copies something into an empty directory; `None` after the report says why not.
    async fn bring(
        &mut self,
        stage: &str,
        source: &str,
        what: Bring,
        into: &Path,
        cancel: &mut Cancel,
    ) -> Option<Summary> {
        let into = into.to_owned();
        let brought = self.blocking(move |stop| what.into_directory(&into, stop), cancel).await.ok()?;
        match brought {
            Ok(Ok(summary)) => return Some(summary),
            Ok(Err(ArtifactError::Rejected(rejection))) => {
                let message = format!("{stage} {source}: {rejection}");
                let reason = rejection.rule.id();
                refuse(
                    self.report,
                    Exit::Rejected,
                    refusal(stage, reason, message, rejection.rule.help().unwrap_or_default()),
                );
            }
            Ok(Err(error)) => self.internal(stage, format!("{stage} {source}: {}", crate::text::chain(&error))),
            Err(panic) => self.internal(stage, format!("{stage} {source}: {panic}")),
        }
        None
    }

    /// Tries one backend; says whether that settles the step. With `more` backends to try, one that this host lacks or
    /// that does not prove the floor settles nothing, since nothing ran.
    async fn through_the_gate(&mut self, backend: Backend, ready: &Ready, cancel: &mut Cancel, more: bool) -> bool {
        let scratch = ready.scratch.join(backend.name());
        if let Err(e) = DirBuilder::new().mode(0o700).create(&scratch) {
            self.internal("prepare", format!("failed to make {}: {e}", scratch.display()));
            return true;
        }
        if backend == Backend::Firecracker
            && let Err(why) = self.promising(more)
        {
            return self.passed_over(more, why);
        }
        // Held until the boundary is gone: what is in the cache stays there meanwhile.
        let Ok(image) = self.image(backend, cancel).await else { return true };
        tracing::debug!("the image is there");
        let mut dispatch = ready.dispatch.clone();
        if let Some(image) = &image {
            payload::adopt(&mut dispatch, self.step, &image.env, image.user);
        }
        let machine = match self.machine(backend, ready, &scratch, image.as_ref(), cancel).await {
            Ok(Ok(machine)) => machine,
            Ok(Err(why)) => return self.passed_over(more, *why),
            Err(Settled) => return true,
        };
        let rootfs = image.as_ref().and_then(|image| image.root.clone());
        tracing::debug!("the boundary's parts are there");
        let plan = self.plan(ready, scratch, rootfs, machine.as_ref().map(|m| m.parts.clone()));
        let (output, shown) = match self.output() {
            Ok(both) => both,
            Err(e) => {
                self.internal("collect", format!("failed to make the step's log files: {e}"));
                return true;
            }
        };
        self.progress(format!("preparing {backend}"));
        let request = Request {
            backend,
            plan: &plan,
            floor: self.step.floor(),
            required: &self.step.required(),
            on_dispatch: &|| {
                self.context.announce(self.report.index);
                self.progress("running");
            },
        };
        let (passage, written) = {
            let mut output = output;
            let passage = pass(request, dispatch, &mut output, cancel).await;
            (passage, output.finish())
        };
        // What the guest printed is told before the step's end is, or whoever shows it live would lose it.
        let _ = shown.await;
        if backend == Backend::Firecracker {
            let unfit = matches!(passage.end, End::NotPrepared(PrepareError::Unfit { .. }));
            if unfit || !matches!(passage.end, End::NotPrepared(_)) {
                machine::remember(unfit);
            }
        }
        if more && passage.dispatched == Dispatched::No && turned_away(&passage) {
            self.report.notices.push(format!("{backend} was passed over: {}", why(&passage)));
            self.discard_logs();
            return false;
        }
        record::passage(self.report, self.step, passage, written);
        self.merge_guest_tests();
        true
    }

    /// Whether it is worth making ready for a microVM; with `more` backends to try, only where none was waited for in vain.
    fn promising(&self, more: bool) -> Result<(), (Exit, RefusalRecord)> {
        firecracker::available(&self.context.engines).map_err(|e| record::not_prepared(&e))?;
        if more && machine::known_unfit() {
            let message = "a microVM did not boot on this host since it was started".to_owned();
            let help = "`plimsoll doctor --backend firecracker` tries again";
            return Err((Exit::Unavailable, refusal("prepare", "backend-unavailable", message, help)));
        }
        Ok(())
    }

    /// A backend that cannot be used: a notice where there are `more`, else the step's outcome. Says whether the step is
    /// settled.
    fn passed_over(&mut self, more: bool, (exit, why): (Exit, RefusalRecord)) -> bool {
        if more && exit == Exit::Unavailable {
            let backend = self.report.backend.clone().unwrap_or_default();
            self.report.notices.push(format!("{backend} was passed over: {}", why.message));
            return false;
        }
        refuse(self.report, exit, why);
        true
    }

    /// What a microVM is made of; nothing for other backends.
    async fn machine(
        &mut self,
        backend: Backend,
        ready: &Ready,
        scratch: &Path,
        image: Option<&Prepared>,
        cancel: &mut Cancel,
    ) -> Result<Result<Option<Machine>, Box<(Exit, RefusalRecord)>>, Settled> {
        let Some(tree) = image.and_then(|i| i.root.clone()).filter(|_| backend == Backend::Firecracker) else {
            return Ok(Ok(None));
        };
        self.progress("making kernel and images ready");
        let sources = machine::Sources {
            kernel: self.step.kernel.clone(),
            rootfs: image.and_then(|i| i.stored.clone()).map_or(machine::Root::Tree(tree), machine::Root::Stored),
            workspace: ready.workspace.clone(),
            mounts: self.step.mounts.clone(),
            scratch: scratch.to_owned(),
            fallback: self.context.scratch.join("cache"),
        };
        Ok(match self.blocking(move |_| machine::make(&sources), cancel).await? {
            Ok(Ok(made)) => {
                let notice = made.notice.iter().filter(|notice| !self.report.notices.contains(notice));
                self.report.notices.extend(notice.cloned().collect::<Vec<_>>());
                Ok(Some(made))
            }
            Ok(Err(why)) => Err(why),
            Err(panic) => {
                let why = refusal("image", "internal", format!("making images broke: {panic}"), "");
                Err(Box::new((Exit::Internal, why)))
            }
        })
    }

    /// The root file system for a backend that has one; none for the runner's own toolchain. After an `Err` the report
    /// says why.
    async fn image(&mut self, backend: Backend, cancel: &mut Cancel) -> Result<Option<Prepared>, Settled> {
        if backend == Backend::Wasm {
            return Ok(None);
        }
        let source = self.step.image.clone().unwrap_or(ImageSource::Host);
        let (digest, fallback) = (self.step.image_digest, self.context.scratch.join("cache"));
        let (events, index) = (self.context.events.clone(), self.report.index);
        let insecure = self.context.insecure_registries.clone();
        let work = move |stop: &AtomicBool| {
            let env = Env::process();
            let cache = Cache::of_user(&env, &fallback).map_err(|e| image::Trouble::from(StoreError::from(e)))?;
            let progress = |what: String| {
                let _ = events.send(Event::Progress { index, what });
            };
            let terms = image::Terms {
                cache: &cache,
                digest,
                deadline: ARTIFACT_DEADLINE,
                stop,
                env: &env,
                insecure_registries: &insecure,
                progress: &progress,
            };
            let mut prepared = image::prepare(&source, &terms)?;
            prepared.notices.extend(cache.notice().filter(|_| prepared.stored.is_some()).map(str::to_owned));
            Ok::<_, Box<image::Trouble>>(prepared)
        };
        match self.blocking(work, cancel).await? {
            Ok(Ok(prepared)) => {
                self.report.image = Some(prepared.record.clone());
                for notice in &prepared.notices {
                    if !self.report.notices.contains(notice) {
                        self.report.notices.push(notice.clone());
                    }
                }
                return Ok(Some(prepared));
            }
            Ok(Err(trouble)) => {
                let image::Trouble { exit, reason, message, help } = *trouble;
                refuse(self.report, exit, refusal("image", reason, message, &help));
            }
            Err(panic) => self.internal("image", panic.to_string()),
        }
        Err(Settled)
    }

    /// Does something that blocks, until the run is cancelled; after an `Err` the report says so.
    async fn blocking<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&AtomicBool) -> T + Send + 'static,
        cancel: &mut Cancel,
    ) -> Result<Result<T, tokio::task::JoinError>, Settled> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut work = {
            let stop = Arc::clone(&stop);
            tokio::task::spawn_blocking(move || work(&stop))
        };
        tokio::select! {
            done = &mut work => Ok(done),
            signal = crate::backend::channel::cancelled(cancel) => {
                stop.store(true, Ordering::Relaxed);
                let _ = work.await;
                record::cancel(self.report, signal);
                Err(Settled)
            }
        }
    }

    fn plan(&self, ready: &Ready, scratch: PathBuf, rootfs: Option<PathBuf>, machine: Option<MachineParts>) -> Plan {
        Plan {
            id: format!("{}-{:02}", self.context.id, self.step.index),
            scratch,
            bounds: payload::bounds(self.step),
            workspace: Some(ready.workspace.clone()),
            rootfs,
            mounts: self.step.mounts.iter().map(|m| (m.path.clone(), m.at.display().to_string())).collect(),
            machine,
            module: ready.module.clone(),
            filesystem: payload::filesystem(self.step),
            deterministic: self.step.deterministic,
            engines: Engines { refuse_vulnerable: self.step.refuse_vulnerable_engines, ..self.context.engines.clone() },
        }
    }

    fn logs(&self) -> PathBuf {
        self.context.logs.join(self.report.directory())
    }

    /// Where the guest's output goes, and the task that hands it on as it comes; that ends with the output.
    fn output(&self) -> std::io::Result<(Output, JoinHandle<()>)> {
        let logs = self.logs();
        DirBuilder::new().recursive(true).mode(0o755).create(&logs)?;
        let wanted = !self.step.outputs.is_empty() || self.step.junit.is_some();
        let directory = if wanted {
            let path = self.context.outputs.join(self.report.directory());
            match std::fs::create_dir(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(e),
                _ => {}
            }
            Some(OwnedFd::from(File::open(&path)?))
        } else {
            None
        };
        let (live, mut pieces) = mpsc::unbounded_channel();
        let (events, index) = (self.context.events.clone(), self.report.index);
        let shown = tokio::spawn(async move {
            while let Some(crate::backend::output::Piece { stream, bytes }) = pieces.recv().await {
                let _ = events.send(Event::Output { index, stream, bytes });
            }
        });
        let output = Output::create(&logs, directory, self.step.limits.output, OUTPUT_BUDGET, Some(live))?;
        Ok((output, shown))
    }

    /// Empty log files of a backend that was passed over make room for the next one's.
    fn discard_logs(&self) {
        for name in ["stdout.log", "stderr.log"] {
            let _ = std::fs::remove_file(self.logs().join(name));
        }
    }

    /// Reads the guest's own JUnit report out of the outputs: hostile, unverified, and no reason to fail.
    fn merge_guest_tests(&mut self) {
        let Some(junit) = &self.step.junit else { return };
        if self.report.result.is_none() {
            return;
        }
        let path = junit.to_string_lossy();
        let Some(stored) = self.report.outputs.iter().find(|f| f.path == path).map(|f| f.path.clone()) else {
            self.report.notices.push(format!("the guest wrote no JUnit report at {path:?}"));
            return;
        };
        let root = self.context.outputs.join(self.report.directory());
        let read = || -> std::io::Result<Vec<u8>> {
            let root = OwnedFd::from(File::open(&root)?);
            let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
            let file = openat2(&root, stored.as_str(), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty(), beneath)?;
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(
                &mut std::io::Read::take(File::from(file), guest_junit::MAX_BYTES + 1),
                &mut bytes,
            )?;
            Ok(bytes)
        };
        match read().map_err(|e| e.to_string()).and_then(|bytes| guest_junit::parse(&bytes).map_err(|e| e.to_string()))
        {
            Ok(cases) => {
                self.report.guest_tests = Some(cases.counts());
                self.report.guest_cases = cases;
            }
            Err(why) => self.report.notices.push(format!("the guest's JUnit report was left out: {why}")),
        }
    }

    fn internal(&mut self, stage: &str, message: String) {
        let help = "this is a fault of the host or of plimsoll; run again with --verbose";
        refuse(self.report, Exit::Internal, refusal(stage, "internal", message, help));
    }
}

/// The report says why, and nothing more is to be tried.
struct Settled;

/// Something to bring into a directory.
struct Bring {
    path: PathBuf,
    purpose: Purpose,
    sha256: Option<Sha256Digest>,
    exclude: Vec<FileId>,
}

impl Bring {
    fn into_directory(self, into: &Path, stop: &AtomicBool) -> Result<Summary, ArtifactError> {
        let destination = File::open(into).map_err(|e| ArtifactError::failed("open the destination", e))?;
        let what = Acquire {
            path: &self.path,
            purpose: self.purpose,
            sha256: self.sha256,
            budget: Budget::default(),
            deadline: ARTIFACT_DEADLINE,
            exclude: &self.exclude,
        };
        acquire(&what, destination.as_fd(), stop, unpacker::start)
    }
}

/// A directory that whoever unpacks and whoever runs inside can write, each with another uid; the private directory above
/// it keeps others out.
fn make_open(path: &Path) -> std::io::Result<()> {
    DirBuilder::new().create(path)?;
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777))
}

/// Whether a backend that is not here, or that did not prove the floor, leaves room for the next.
fn turned_away(passage: &Passage) -> bool {
    matches!(
        &passage.end,
        End::NotPrepared(PrepareError::Unavailable { .. } | PrepareError::Unfit { .. })
            | End::NotProven(_)
            | End::Refused(_)
    )
}

fn why(passage: &Passage) -> String {
    match &passage.end {
        End::NotPrepared(e) => crate::text::chain(e),
        End::NotProven(why) => why.clone(),
        End::Refused(refusal) => refusal.to_string(),
        _ => String::new(),
    }
}

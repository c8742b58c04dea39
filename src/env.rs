//! Every environment variable that the product reads.
//!
//! [`Var`] is the whole list, with what each is for; [`Env`] is a snapshot of the values. Nothing else in the product
//! reads the environment (a test looks), so this table is what a job can move. It moves no policy and no floor: those
//! come from flags, step files and the operator's policy.
//!
//! Values come from whoever wrote the workflow or started the runner. They are claims: a report carries them as such.
//! An empty value counts as unset, as CI systems set variables empty that they have nothing for.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

macro_rules! variables {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)+) => {
        /// A variable that the product reads.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Var {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl Var {
            /// All of them.
            pub const ALL: &'static [Var] = &[$(Var::$variant),+];

            /// Its name in the environment.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Var::$variant => $name),+ }
            }

            /// What it is for, in one sentence.
            #[must_use]
            pub const fn describe(self) -> &'static str {
                match self { $(Var::$variant => concat!($($doc),+).trim_ascii_start()),+ }
            }
        }
    };
}

variables! {
    /// No colour, whatever its value (<https://no-color.org>).
    NoColor = "NO_COLOR",
    /// `dumb`: neither colour nor a progress line.
    Term = "TERM",
    /// Where `runsc` is looked for when neither a flag nor `PLIMSOLL_RUNSC` names it.
    Path = "PATH",
    /// What `~` in a mount's path stands for, and where a plain user's cache is when `XDG_CACHE_HOME` is unset.
    Home = "HOME",
    /// Where the private directories of a plain user's runs are, below `plimsoll-<uid>/`; `/tmp` by default.
    TmpDir = "TMPDIR",
    /// Where compiled WebAssembly, guest kernels and images are cached, below `plimsoll/`; `~/.cache` by default, `/var/cache` for root.
    XdgCacheHome = "XDG_CACHE_HOME",
    /// Where a user's WebAssembly runtimes are, below `plimsoll/wasm/`; `~/.local/share` by default.
    XdgDataHome = "XDG_DATA_HOME",
    /// Where `config.json` with logins to registries is; `~/.docker` by default.
    DockerConfig = "DOCKER_CONFIG",

    /// The `runsc` to use; `--runsc` wins.
    Runsc = "PLIMSOLL_RUNSC",
    /// The `firecracker` to use; `--firecracker` wins.
    Firecracker = "PLIMSOLL_FIRECRACKER",
    /// The `jailer` that root starts Firecracker with; otherwise the one beside `firecracker`, then the one in `PATH`.
    Jailer = "PLIMSOLL_JAILER",
    /// How long a microVM may take to boot, in seconds. Default: 10.
    BootTimeout = "PLIMSOLL_BOOT_TIMEOUT",
    /// Directories that WebAssembly runtimes are looked for in first, separated by colons.
    WasmPath = "PLIMSOLL_WASM_PATH",
    /// Filter of diagnostic messages, such as `plimsoll=debug`; `--verbose` wins.
    Log = "PLIMSOLL_LOG",
    /// Whether runs go through the service of this machine: `auto`, `require`, `never`; `--service` wins.
    Service = "PLIMSOLL_SERVICE",
    /// The job's matrix values as a JSON object; the GitHub Action sets it from its `matrix` input.
    Matrix = "PLIMSOLL_MATRIX",

    /// Proxy for `https://` addresses; the lowercase name wins, here and below.
    HttpsProxy = "HTTPS_PROXY",
    /// The same.
    HttpsProxyLower = "https_proxy",
    /// Proxy for `http://` addresses.
    HttpProxy = "HTTP_PROXY",
    /// The same.
    HttpProxyLower = "http_proxy",
    /// Proxy for both, where nothing else is set.
    AllProxy = "ALL_PROXY",
    /// The same.
    AllProxyLower = "all_proxy",
    /// Hosts that are reached without a proxy, separated by commas.
    NoProxy = "NO_PROXY",
    /// The same.
    NoProxyLower = "no_proxy",
    /// File with the certificates that servers are checked against, in place of the system's.
    SslCertFile = "SSL_CERT_FILE",
    /// Directories with such files, separated by colons.
    SslCertDir = "SSL_CERT_DIR",
    /// Set by systemd for a service it hands sockets to: whose they are (sd_listen_fds(3)).
    ListenPid = "LISTEN_PID",
    /// How many sockets systemd hands over.
    ListenFds = "LISTEN_FDS",
    /// Where systemd is told that the service is ready (sd_notify(3)).
    NotifySocket = "NOTIFY_SOCKET",

    /// Set by most CI systems: no progress line, no colour.
    Ci = "CI",

    /// `true` in a job of GitHub Actions (or of something that runs its workflows).
    GithubActions = "GITHUB_ACTIONS",
    /// `owner/name`.
    GithubRepository = "GITHUB_REPOSITORY",
    /// The commit the job runs on; for a pull request, the merge commit.
    GithubSha = "GITHUB_SHA",
    /// The ref; names pull request and base in a merge queue.
    GithubRef = "GITHUB_REF",
    /// Name of the event.
    GithubEventName = "GITHUB_EVENT_NAME",
    /// File with the event's payload.
    GithubEventPath = "GITHUB_EVENT_PATH",
    /// Id of the job in its workflow.
    GithubJob = "GITHUB_JOB",
    /// Id of the run, for its link.
    GithubRunId = "GITHUB_RUN_ID",
    /// Attempt number of the run.
    GithubRunAttempt = "GITHUB_RUN_ATTEMPT",
    /// Name of the workflow.
    GithubWorkflow = "GITHUB_WORKFLOW",
    /// Address of the API, `/api/v3` included on GitHub Enterprise Server.
    GithubApiUrl = "GITHUB_API_URL",
    /// Token for publishing and for artifacts; the action sets it from its `token` input. A secret: shown nowhere.
    GithubToken = "GITHUB_TOKEN",
    /// Base of links.
    GithubServerUrl = "GITHUB_SERVER_URL",
    /// File that the job's summary is appended to (`--publish github-summary`).
    GithubStepSummary = "GITHUB_STEP_SUMMARY",
    /// File that the step's outputs are appended to (`--github-output`).
    GithubOutput = "GITHUB_OUTPUT",
    /// The checkout: annotations name files relative to it.
    GithubWorkspace = "GITHUB_WORKSPACE",
    /// The runner's name on GitHub.
    RunnerName = "RUNNER_NAME",

    /// `true` in a job of GitLab CI/CD.
    GitlabCi = "GITLAB_CI",
    /// Address of the API, a sub-path included.
    CiApiV4Url = "CI_API_V4_URL",
    /// Token for publishing: a project access token with the scope `api`. A secret: shown nowhere.
    GitlabToken = "GITLAB_TOKEN",
    /// The job's own token, for artifacts; it can write neither notes nor statuses. A secret: shown nowhere.
    CiJobToken = "CI_JOB_TOKEN",
    /// The project's number.
    CiProjectId = "CI_PROJECT_ID",
    /// The pipeline's number, which a status is sent to.
    CiPipelineId = "CI_PIPELINE_ID",
    /// Number of the project that the merge request belongs to.
    CiMergeRequestProjectId = "CI_MERGE_REQUEST_PROJECT_ID",
    /// The project's full path.
    CiProjectPath = "CI_PROJECT_PATH",
    /// The commit the job runs on; in a merged-results pipeline, the merge commit.
    CiCommitSha = "CI_COMMIT_SHA",
    /// Merge request number, in merge-request pipelines only.
    CiMergeRequestIid = "CI_MERGE_REQUEST_IID",
    /// Head of the source branch, in merged-results pipelines only.
    CiMergeRequestSourceBranchSha = "CI_MERGE_REQUEST_SOURCE_BRANCH_SHA",
    /// The project that the merge request belongs to.
    CiMergeRequestProjectPath = "CI_MERGE_REQUEST_PROJECT_PATH",
    /// The project that the merge request comes from; another one for a fork.
    CiMergeRequestSourceProjectPath = "CI_MERGE_REQUEST_SOURCE_PROJECT_PATH",
    /// Up to four open merge requests of the branch, in branch pipelines: `group/project!3,…`.
    CiOpenMergeRequests = "CI_OPEN_MERGE_REQUESTS",
    /// The job's name; with `parallel:matrix`, its values in brackets.
    CiJobName = "CI_JOB_NAME",
    /// Link to the job; holds the instance's whole address, a sub-path included.
    CiJobUrl = "CI_JOB_URL",
    /// The runner's description on GitLab.
    CiRunnerDescription = "CI_RUNNER_DESCRIPTION",
}

impl Var {
    /// Whether the value is a secret.
    #[must_use]
    pub const fn is_secret(self) -> bool {
        matches!(self, Var::GithubToken | Var::GitlabToken | Var::CiJobToken)
    }
}

/// A snapshot of the environment: only the variables of [`Var`], only those that are not empty.
#[derive(Clone, Default)]
pub struct Env {
    values: BTreeMap<Var, OsString>,
}

impl std::fmt::Debug for Env {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Proxies may hold a password.
        let shown = |var: Var| !var.is_secret() && !var.name().to_ascii_lowercase().ends_with("_proxy");
        let value = |(&var, value): (&Var, &OsString)| (var, if shown(var) { value.clone() } else { "***".into() });
        f.debug_map().entries(self.values.iter().map(value)).finish()
    }
}

impl Env {
    /// The environment of this process.
    #[must_use]
    pub fn process() -> Self {
        let value = |&var: &Var| std::env::var_os(var.name()).filter(|v| !v.is_empty()).map(|v| (var, v));
        Self { values: Var::ALL.iter().filter_map(value).collect() }
    }

    /// The value, if it is set and not empty.
    #[must_use]
    pub fn os(&self, var: Var) -> Option<&OsStr> {
        self.values.get(&var).map(OsString::as_os_str)
    }

    /// The value, if it is set, not empty and UTF-8.
    #[must_use]
    pub fn text(&self, var: Var) -> Option<&str> {
        self.os(var)?.to_str()
    }

    /// The value as a path.
    #[must_use]
    pub fn path(&self, var: Var) -> Option<PathBuf> {
        self.os(var).map(PathBuf::from)
    }

    /// The value as a whole number without sign; unset when it is none.
    #[must_use]
    pub fn number(&self, var: Var) -> Option<u64> {
        self.text(var)?.parse().ok()
    }

    /// Whether the value is the word `true`, as forges write it.
    #[must_use]
    pub fn is_true(&self, var: Var) -> bool {
        self.text(var) == Some("true")
    }

    /// Whether something runs us that is no person: `CI` is set to anything but `false` or `0`.
    #[must_use]
    pub fn in_ci(&self) -> bool {
        self.text(Var::Ci).is_some_and(|v| !matches!(v, "false" | "0"))
            || self.is_true(Var::GithubActions)
            || self.is_true(Var::GitlabCi)
    }

    /// Where private directories are made.
    #[must_use]
    pub fn temp_dir(&self) -> PathBuf {
        self.path(Var::TmpDir).filter(|p| p.is_absolute()).unwrap_or_else(|| PathBuf::from("/tmp"))
    }

    /// Where caches go: `$XDG_CACHE_HOME/plimsoll`, else `~/.cache/plimsoll`; none without a home.
    #[must_use]
    pub fn cache_dir(&self) -> Option<PathBuf> {
        self.path(Var::XdgCacheHome)
            .filter(|p| p.is_absolute())
            .or_else(|| self.path(Var::Home).filter(|p| p.is_absolute()).map(|p| p.join(".cache")))
            .map(|p| p.join("plimsoll"))
    }
}

impl<V: Into<OsString>> FromIterator<(Var, V)> for Env {
    /// An environment of given values, for tests and for a service that answers for somebody else's process.
    fn from_iter<I: IntoIterator<Item = (Var, V)>>(values: I) -> Self {
        let values =
            values.into_iter().map(|(var, v)| (var, v.into())).filter(|(_, v): &(Var, OsString)| !v.is_empty());
        Self { values: values.collect() }
    }
}

/// Names of all variables of this process's environment; no values.
pub fn names() -> impl Iterator<Item = String> {
    std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_value_counts_as_unset() {
        let env: Env = [(Var::Ci, ""), (Var::GithubJob, "unit")].into_iter().collect();
        assert_eq!(env.os(Var::Ci), None);
        assert_eq!(env.text(Var::GithubJob), Some("unit"));
        assert!(!env.in_ci());
    }

    #[test]
    fn secrets_are_not_shown() {
        let env: Env = Var::ALL.iter().map(|&var| (var, format!("hush-{}", var.name()))).collect();
        let shown = format!("{env:?}");
        assert!(shown.contains("hush-GITHUB_JOB"), "{shown}");
        for secret in ["GITHUB_TOKEN", "GITLAB_TOKEN", "CI_JOB_TOKEN", "HTTPS_PROXY", "all_proxy"] {
            assert!(!shown.contains(&format!("hush-{secret}")), "{secret}");
        }
    }

    #[test]
    fn ci_is_seen_by_any_of_its_marks() {
        let of = |var, value: &str| Env::from_iter([(var, value)]).in_ci();
        assert!(of(Var::Ci, "true") && of(Var::Ci, "1") && of(Var::GithubActions, "true") && of(Var::GitlabCi, "true"));
        assert!(!of(Var::Ci, "false") && !of(Var::Ci, "0") && !of(Var::GitlabCi, "false"));
    }

    #[test]
    fn relative_directories_are_not_believed() {
        let env: Env = [(Var::TmpDir, "tmp"), (Var::XdgCacheHome, "c"), (Var::Home, "/h")].into_iter().collect();
        assert_eq!(env.temp_dir(), PathBuf::from("/tmp"));
        assert_eq!(env.cache_dir(), Some(PathBuf::from("/h/.cache/plimsoll")));
    }

    #[test]
    fn names_are_distinct_and_described() {
        let names: std::collections::BTreeSet<_> = Var::ALL.iter().map(|v| v.name()).collect();
        assert_eq!(names.len(), Var::ALL.len());
        assert!(Var::ALL.iter().all(|v| v.describe().ends_with('.')), "each description is a sentence");
    }
}

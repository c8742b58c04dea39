//! Shells as GitHub has them: a name, or a command with `{0}` where the script's path goes.
//!
//! Source: GitHub's "Workflow syntax", `jobs.<job_id>.steps[*].shell`, and the runner's `ScriptHandlerHelpers`. Three things differ,
//! each because the code runs in another machine than the runner's:
//! - No `shell` in a step file is `sh -e {0}`; GitHub takes `bash -e {0}` where it finds bash. Every image has `sh`. A step taken
//!   out of a workflow was written for GitHub's choice and gets it ([`Shell::of_a_workflow`]).
//! - `python` is `python3 {0}`: distributions no longer install a `python`.
//! - `pwsh` needs text around the script, and `cmd` and `powershell` need Windows: refused. `pwsh -File {0}` works.

use super::place::shown;

/// The place of the script's path in a command.
pub const SCRIPT: &str = "{0}";

/// A shell: the command that runs a script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shell {
    argv: Vec<String>,
    extension: &'static str,
}

/// Why a `shell` is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadShell {
    /// What is wrong.
    pub reason: String,
    /// What to write.
    pub help: String,
}

impl Default for Shell {
    fn default() -> Self {
        Shell::built_in("sh", &["-e", SCRIPT], ".sh")
    }
}

impl Shell {
    fn built_in(program: &str, args: &[&str], extension: &'static str) -> Shell {
        let argv = std::iter::once(&program).chain(args).map(|&word| word.to_owned()).collect();
        Shell { argv, extension }
    }

    /// What GitHub's runner does where a workflow names no shell: bash if there is one, else sh, and no `pipefail`. Which
    /// it is can only be seen inside, so sh looks.
    #[must_use]
    pub fn of_a_workflow() -> Shell {
        const CHOOSE: &str = "if command -v bash >/dev/null 2>&1; then exec bash -e \"$0\"; else exec sh -e \"$0\"; fi";
        Shell::built_in("sh", &["-c", CHOOSE, SCRIPT], ".sh")
    }

    /// Reads what stands at `shell:`.
    ///
    /// # Errors
    /// When it is neither a known name nor a command with `{0}`.
    pub fn parse(text: &str) -> Result<Shell, BadShell> {
        match text.trim() {
            "sh" => return Ok(Shell::default()),
            "bash" => return Ok(Shell::built_in("bash", &["--noprofile", "--norc", "-eo", "pipefail", SCRIPT], ".sh")),
            "python" => return Ok(Shell::built_in("python3", &[SCRIPT], ".py")),
            "pwsh" => {
                return Err(BadShell {
                    reason: "`pwsh` is not built in".into(),
                    help: "write `pwsh -File {0}`, and begin the script with `$ErrorActionPreference = 'stop'`".into(),
                });
            }
            name @ ("cmd" | "powershell") => {
                return Err(BadShell {
                    reason: format!("`{name}` is a shell of Windows, and the code runs on Linux"),
                    help: "use `sh`, `bash`, `python`, or a command with `{0}`".into(),
                });
            }
            _ => {}
        }
        let bad = |reason: String| BadShell {
            reason,
            help: "use `sh`, `bash`, `python`, or a command with `{0}` for the script's path, such as `perl {0}`"
                .into(),
        };
        if text.contains(['\0', '\n', '\r']) {
            return Err(bad("more than one line".into()));
        }
        let argv = shlex::split(text).ok_or_else(|| bad(format!("`{}` has an open quote", shown(text))))?;
        match argv.split_first() {
            None => Err(bad("empty".into())),
            Some((program, _)) if program.contains(SCRIPT) => Err(bad("`{0}` can't be the command itself".into())),
            Some((_, args)) if !args.iter().any(|arg| arg.contains(SCRIPT)) => {
                Err(bad(format!("`{}` is no shell that is built in, and has no `{{0}}`", shown(text))))
            }
            Some(_) => Ok(Shell { argv, extension: "" }),
        }
    }

    /// The command with the script's path filled in.
    #[must_use]
    pub fn command(&self, script: &str) -> Vec<String> {
        self.argv.iter().map(|word| word.replace(SCRIPT, script)).collect()
    }

    /// The command with `{0}` in it, as the guest agent takes it; the agent puts the script's path there.
    #[must_use]
    pub fn argv(&self) -> &[String] {
        &self.argv
    }

    /// The command as a template, the way it is reported.
    #[must_use]
    pub fn template(&self) -> String {
        self.argv.join(" ")
    }

    /// The program that must exist in the image.
    #[must_use]
    pub fn program(&self) -> &str {
        self.argv.first().map_or("", String::as_str)
    }

    /// What the script's file name ends in, as on GitHub: `.sh`, `.py`, or nothing.
    #[must_use]
    pub fn extension(&self) -> &'static str {
        self.extension
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_shells_are_githubs() {
        for (text, template, extension) in [
            ("sh", "sh -e {0}", ".sh"),
            ("bash", "bash --noprofile --norc -eo pipefail {0}", ".sh"),
            ("python", "python3 {0}", ".py"),
        ] {
            let shell = Shell::parse(text).unwrap();
            assert_eq!((shell.template().as_str(), shell.extension()), (template, extension));
        }
        assert_eq!(Shell::default(), Shell::parse("sh").unwrap());
    }

    #[test]
    fn a_workflows_shell_stops_at_a_failing_line_and_knows_bash() {
        let directory = tempfile::tempdir().unwrap();
        let script = directory.path().join("it's a script.sh");
        let run = |text: &str, path: &str| {
            std::fs::write(&script, text).unwrap();
            let command = Shell::of_a_workflow().command(script.to_str().unwrap());
            let output = std::process::Command::new("/bin/sh").args(&command[1..]).env("PATH", path).output().unwrap();
            (output.status.code(), String::from_utf8(output.stdout).unwrap())
        };
        assert_eq!(run("echo one\nfalse\necho two\n", "/usr/bin:/bin"), (Some(1), "one\n".to_owned()));
        assert_eq!(run("false | true\necho on\n", "/usr/bin:/bin"), (Some(0), "on\n".to_owned()));
        if std::path::Path::new("/bin/bash").exists() {
            assert_eq!(run("[[ a == a ]] && echo ${BASH_VERSION:+bash}\n", "/usr/bin:/bin").1, "bash\n");
        } else {
            println!("skipped: no /bin/bash here");
        }
        let only_sh = directory.path().join("bin");
        std::fs::create_dir(&only_sh).unwrap();
        std::os::unix::fs::symlink("/bin/sh", only_sh.join("sh")).unwrap();
        assert_eq!(run("echo ${BASH_VERSION:-none}\n", only_sh.to_str().unwrap()).0, Some(0));
    }

    #[test]
    fn a_custom_shell_keeps_its_words() {
        let shell = Shell::parse("env 'A B=c' perl -w {0} --last").unwrap();
        assert_eq!(shell.command("/x/s cript"), ["env", "A B=c", "perl", "-w", "/x/s cript", "--last"]);
        let inner = Shell::parse("sh -c '. {0}'").unwrap();
        assert_eq!(inner.command("/s"), ["sh", "-c", ". /s"]);
    }

    #[test]
    fn what_is_no_shell_says_what_would_be() {
        for text in
            ["", "  ", "zsh", "perl", "{0}", "perl '{0}", "cmd", "powershell", "pwsh", "perl {0}\nrm", "a\0 {0}"]
        {
            let error = Shell::parse(text).unwrap_err();
            assert!(!error.reason.is_empty() && error.help.contains("{0}"), "{text}");
        }
    }
}

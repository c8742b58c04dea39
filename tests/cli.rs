//! The command line from outside: help, usage errors, schemas, completions.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::plimsoll;

#[test]
fn every_help_text_is_the_committed_one() {
    let commands = plimsoll(["--help"]).run().exits(0);
    let names: Vec<String> = commands
        .stdout
        .lines()
        .skip_while(|l| *l != "Commands:")
        .skip(1)
        .take_while(|l| !l.is_empty())
        .filter_map(|l| l.strip_prefix("  "))
        .filter(|l| !l.starts_with(' '))
        .map(|l| l.split_whitespace().next().unwrap().to_owned())
        .collect();
    assert!(names.len() > 1, "{}", commands.stdout);
    insta::assert_snapshot!("help", commands.stdout);
    insta::assert_snapshot!("help-short", plimsoll(["-h"]).run().exits(0).stdout);
    for name in names {
        insta::assert_snapshot!(format!("help-{name}"), plimsoll([name.as_str(), "--help"]).run().exits(0).stdout);
    }
}

#[test]
fn the_help_holds_the_whole_table_of_exit_codes() {
    let help = plimsoll(["--help"]).run().exits(0).stdout;
    for exit in plimsoll::exit::Exit::ALL {
        assert!(help.contains(&format!("{:>5}  {}", exit.code(), exit.describe())), "{exit:?} is not in:\n{help}");
    }
}

#[test]
fn no_arguments_is_a_usage_error_with_help() {
    plimsoll([""; 0]).run().exits(2).says("Usage: plimsoll");
}

#[test]
fn an_unknown_flag_is_a_usage_error_and_names_the_nearest() {
    plimsoll(["schema", "step", "--quite"]).run().exits(2).says("--quiet");
    plimsoll(["frobnicate"]).run().exits(2).says("error: unrecognized subcommand");
}

#[test]
fn the_version_is_one_line_on_standard_output() {
    let ran = plimsoll(["--version"]).run().exits(0);
    assert_eq!(ran.stdout, format!("plimsoll {}\n", env!("CARGO_PKG_VERSION")));
    assert_eq!(ran.stderr, "");
}

#[test]
fn schemas_are_json() {
    for which in ["step", "report", "policy", "doctor", "predicate"] {
        let ran = plimsoll(["schema", which]).run().exits(0);
        let schema: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
        assert_eq!(schema["type"], "object", "{which}");
    }
}

#[test]
fn completions_name_the_commands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        plimsoll(["completions", shell]).run().exits(0).prints("schema");
    }
}

#[test]
fn a_usage_error_in_a_github_job_is_an_annotation() {
    let ran = plimsoll(["schema", "x\n::stop-commands::y"]).env("GITHUB_ACTIONS", "true").run().exits(2);
    let both = ran.stdout.clone() + &ran.stderr;
    let commands: Vec<_> = both.lines().filter(|l| l.trim_start().starts_with("::")).collect();
    assert_eq!(commands.len(), 1, "an argument must not become a command: {both}");
    assert!(commands[0].starts_with("::error title=plimsoll::invalid value"), "{}", commands[0]);
}

#[test]
fn a_reader_that_goes_away_is_no_fault() {
    let binary = common::binary().display();
    let ran = common::program("bash").args(["-c", &format!("set -o pipefail; {binary} schema step | head -c 1")]).run();
    ran.exits(0).prints("{");
}

#[test]
fn data_that_cannot_be_written_is_a_fault() {
    let binary = common::binary().display();
    for command in [
        "schema step",
        "completions bash",
        "doctor --backend wasm --json",
        "image list",
        "--help",
        "run --help",
        "--version",
    ] {
        let ran = common::program("bash").args(["-c", &format!("{binary} {command} > /dev/full")]).run();
        ran.exits(1).says("failed to write to standard output").says("help: ");
    }
}

#[test]
fn publishing_to_whatever_is_there_needs_a_forge() {
    plimsoll(["publish", "plimsoll-report", "auto"]).run().exits(2).says("`auto` names no target").says("help: ");
}

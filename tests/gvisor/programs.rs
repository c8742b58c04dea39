//! Ordinary programs run, and see what they should.

use std::fs;
use std::path::Path;

use plimsoll::evidence::{ControlId, Fact, Status, Tier};

use crate::support::{Step, chmod, root, skipped, step};

fn python(script: &str) -> Step {
    step(script).with(|s| s.shell = ["python3", "{0}"].map(str::to_owned).into())
}

#[test]
fn a_shell_step_runs_behind_a_proven_kernel_tier() {
    if skipped() {
        return;
    }
    let ran = step("echo out; echo err >&2; pwd; id -u; id -g; id -G; cat data").file("data", "payload\n", 0o666).run();
    let ran = ran.passed();
    assert_eq!(ran.stdout, "out\n/workspace\n47113\n47113\n47113\npayload\n");
    assert_eq!(ran.stderr, "err\n");
    let judgement = ran.passage.judgement.as_ref().unwrap();
    assert_eq!(judgement.tier, Tier::Kernel, "{}", ran.story());
    let left = ran.passage.observations.iter().find(|o| o.fact.control() == ControlId::Teardown);
    assert!(matches!(&left.unwrap().fact, Fact::Leftovers { found, .. } if found.is_empty()));
    assert!(ran.passage.usage.peak_memory_bytes.is_some() && ran.passage.usage.cpu_ms.is_some());
    println!("{}\n{:?} {:?}", ran.story(), ran.passage.times, ran.passage.usage);
}

#[test]
fn as_root_limits_hold_and_as_a_plain_user_their_absence_is_said() {
    if skipped() {
        return;
    }
    let ran = step("true").run().passed();
    let grades = &ran.passage.judgement.as_ref().unwrap().grades;
    for control in [ControlId::MemoryLimit, ControlId::CpuLimit, ControlId::PidsLimit] {
        let expected = if root() { Status::Enforced } else { Status::NotEnforced };
        assert_eq!(grades[&control], expected, "{}", ran.story());
    }
}

#[test]
fn python_tests_run_and_their_report_comes_back() {
    if skipped() {
        return;
    }
    let test = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(1 + 1, 2)\n";
    let script = "python3 -m unittest -v test_it\nmkdir -p out/deep\necho '<testsuite/>' > report.xml\necho a > out/deep/a\nln -s /etc/passwd out/link";
    let ran = step(script)
        .file("test_it.py", test, 0o666)
        .with(|s| s.outputs = ["report.xml", "out/**", "missing"].map(str::to_owned).into())
        .run()
        .passed();
    assert!(ran.stderr.contains("Ran 1 test"), "{}", ran.stderr);
    assert_eq!(fs::read_to_string(ran.output("report.xml")).unwrap(), "<testsuite/>\n");
    assert_eq!(fs::read_to_string(ran.output("out/deep/a")).unwrap(), "a\n");
    assert!(!ran.output("out/link").exists());
    assert!(
        ran.notices.iter().any(|n| n.contains("symbolic link")) && ran.notices.iter().any(|n| n.contains("missing"))
    );
}

#[test]
fn a_compiled_program_of_the_artifact_runs() {
    if skipped() {
        return;
    }
    let seq = fs::read("/usr/bin/seq").unwrap();
    let ran = step("./bin/tool 3").file("bin/tool", seq, 0o777).run().passed();
    assert_eq!(ran.stdout, "1\n2\n3\n");
}

#[test]
fn the_environment_is_exactly_what_was_dispatched_in_order() {
    if skipped() {
        return;
    }
    let env = [("Z", "last first"), ("A", "x=y"), ("EMPTY", ""), ("A", "again")];
    let ran = step("")
        .with(|s| {
            s.shell = vec!["/usr/bin/env".to_owned()];
            s.env = env.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        })
        .run()
        .passed();
    assert_eq!(ran.stdout, "Z=last first\nA=x=y\nEMPTY=\nA=again\n");
}

#[test]
fn the_hosts_copy_of_the_artifact_never_changes() {
    if skipped() {
        return;
    }
    let ran = step("echo more >> kept; rm gone; echo new > new; mkdir d; mv sub/x sub/y; cat kept")
        .file("kept", "original\n", 0o666)
        .file("gone", "still here", 0o666)
        .file("sub/x", "x", 0o666)
        .with(|s| s.outputs = vec!["kept".to_owned()]);
    let sub = |path: &Path| chmod(&path.join("sub"), 0o777);
    let ran = ran.prepare(sub).run().passed();
    assert_eq!(ran.stdout, "original\nmore\n");
    let at = |name: &str| fs::read_to_string(ran.workspace().join(name));
    assert_eq!((at("kept").unwrap().as_str(), at("gone").unwrap().as_str()), ("original\n", "still here"));
    assert!(at("new").is_err() && at("sub/y").is_err());
    assert_eq!(fs::read_to_string(ran.output("kept")).unwrap(), "original\nmore\n");
}

#[test]
fn exit_codes_and_signals_come_back() {
    if skipped() {
        return;
    }
    assert_eq!(step("exit 37").run().result().exit_code, Some(37));
    let killed = step("kill -SEGV $$").run();
    assert_eq!((killed.result().exit_code, killed.result().signal), (None, Some(11)));
    // As GitHub's `sh -e`: a failing line in the middle fails the step.
    assert_eq!(step("false\ntrue").run().result().exit_code, Some(1));
}

#[test]
fn what_cannot_start_says_why() {
    if skipped() {
        return;
    }
    let shell = |word: &str| step("x").with(|s| s.shell = vec![word.to_owned(), "{0}".to_owned()]).run();
    let missing = shell("no-such-interpreter");
    assert_eq!(missing.result().exit_code, Some(127));
    assert!(missing.result().message.as_ref().unwrap().contains("no-such-interpreter"), "{}", missing.story());
    let no_loader =
        step("").file("script", "#!/no/such/loader\n", 0o777).with(|s| s.shell = vec!["./script".to_owned()]).run();
    assert_eq!(no_loader.result().exit_code, Some(127), "{}", no_loader.story());
    let plain = step("").file("data", "no program", 0o666).with(|s| s.shell = vec!["./data".to_owned()]).run();
    assert_eq!(plain.result().exit_code, Some(126), "{}", plain.story());
    let lost = step("true").with(|s| s.working_directory = "nowhere".to_owned()).run();
    assert!(lost.result().message.as_ref().unwrap().contains("nowhere"));
}

#[test]
fn a_step_may_start_in_a_directory_below() {
    if skipped() {
        return;
    }
    let ran = step("pwd").file("a/b/c", "", 0o666).with(|s| s.working_directory = "a/b".to_owned()).run().passed();
    assert_eq!(ran.stdout, "/workspace/a/b\n");
}

#[test]
fn the_host_image_hides_people_and_secrets() {
    if skipped() {
        return;
    }
    let secret = Path::new("/usr/local/share/plimsoll-test-secret");
    if root() {
        fs::write(secret, "root only").unwrap();
        chmod(secret, 0o600);
    }
    let ran = step(
        "ls -A /; for d in /root /home /var/lib /srv /opt /boot /etc/ssh /etc/shadow; do test -e $d && echo visible: $d; done
         set +e; cat /usr/local/share/plimsoll-test-secret 2>/dev/null && echo read it
         touch /usr/x 2>/dev/null && echo wrote; touch /x 2>/dev/null && echo wrote
         grep -c . /etc/passwd",
    )
    .run();
    let _ = fs::remove_file(secret);
    let ran = ran.passed();
    for word in ["visible", "read it", "wrote", "root only"] {
        assert!(!ran.stdout.contains(word), "{}", ran.stdout);
    }
    assert!(ran.stdout.contains("\n3\n"), "{}", ran.stdout);
}

#[test]
fn a_directory_serves_as_image() {
    if skipped() {
        return;
    }
    let image = tempfile::tempdir().unwrap();
    chmod(image.path(), 0o755);
    let copy = |from: &str| {
        let to = image.path().join(from.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, &to).unwrap();
    };
    copy("/bin/sh");
    let libraries = std::process::Command::new("ldd").arg("/bin/sh").output().unwrap();
    let listed = String::from_utf8_lossy(&libraries.stdout).into_owned();
    listed.split_whitespace().filter(|w| w.starts_with('/')).for_each(copy);
    fs::create_dir_all(image.path().join("workspace/its-own")).unwrap();
    let ran = step("echo from $(echo /*)").file("x", "", 0o666).with(|s| s.rootfs = Some(image.path().to_owned()));
    let ran = ran.run().passed();
    assert!(ran.stdout.contains("/bin") && ran.stdout.contains("/workspace"), "{}", ran.stdout);
    assert!(!ran.stdout.contains("/usr"), "{}", ran.stdout);
}

#[test]
fn planned_mounts_are_readable_and_read_only() {
    if skipped() {
        return;
    }
    let host = tempfile::tempdir().unwrap();
    chmod(host.path(), 0o777);
    fs::write(host.path().join("wheel"), "wheel\n").unwrap();
    let at = host.path().to_owned();
    let ran = step("cat /wheels/cache/wheel; touch /wheels/cache/x 2>/dev/null && echo wrote; exit 0")
        .with(|s| s.mounts = vec![(at, "/wheels/cache".to_owned())])
        .run()
        .passed();
    assert_eq!(ran.stdout, "wheel\n");
    assert!(!host.path().join("x").exists());
}

#[test]
fn python_sees_the_guest_kernel_and_may_use_threads_and_temporary_files() {
    if skipped() {
        return;
    }
    let ran = python(
        "import os, tempfile, threading, subprocess, socket
t = threading.Thread(target=lambda: print('thread')); t.start(); t.join()
with tempfile.TemporaryFile() as f: f.write(b'x')
print(subprocess.check_output(['echo', 'child'], text=True).strip())
s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname()); print('loopback')
import pwd; print(pwd.getpwuid(os.getuid()).pw_name)
open('/dev/shm/x', 'w').write('x')",
    )
    .run()
    .passed();
    assert_eq!(ran.stdout, "thread\nchild\nloopback\nplimsoll\n");
}

/// The step of an example, with the example's own files.
fn example(name: &str, script: &str, outputs: &[&str]) -> Step {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name);
    let mut one = step(script).with(|s| s.outputs = outputs.iter().map(|&o| o.to_owned()).collect());
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        one = one.file(&entry.file_name().to_string_lossy(), fs::read(entry.path()).unwrap(), 0o666);
    }
    one
}

#[test]
fn the_examples_run() {
    if skipped() {
        return;
    }
    let shell = example("shell", "sort -r words.txt | tee sorted.txt; ! cat /etc/shadow 2>/dev/null", &["sorted.txt"]);
    let shell = shell.run().passed();
    assert_eq!(fs::read_to_string(shell.output("sorted.txt")).unwrap(), "mast\nkeel\nhull\ndeck\n");
    let python = example("python", "python3 run_tests.py", &["report.xml"]).run().passed();
    assert!(fs::read_to_string(python.output("report.xml")).unwrap().contains("tests=\"3\" failures=\"0\""));
    if Path::new("/usr/bin/cc").exists() {
        let compiled = example("compiled", "cc -O2 -Wall -o primes primes.c\n./primes 30", &[]).run().passed();
        assert_eq!(compiled.stdout.lines().last(), Some("29"));
    }
}

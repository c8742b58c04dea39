#!/bin/bash
# Python from an image tree runs the tests of an artifact; its output files and its JUnit report come back.
# deadline: 250

mkdir -p "$work/python/artifact/out"
cat > "$work/python/artifact/test_sum.py" <<'END'
import unittest

class Sum(unittest.TestCase):
    def test_right(self):
        self.assertEqual(sum([1, 2, 3]), 6)

    def test_wrong(self):
        self.assertEqual(sum([1, 2, 3]), 7)
END
cat > "$work/python/artifact/run.py" <<'END'
import os, sys, unittest

result = unittest.TextTestRunner(stream=sys.stdout).run(unittest.defaultTestLoader.discover("."))
with open("report.xml", "w") as report:
    report.write(
        '<testsuite name="guest" tests="2" failures="1"><testcase classname="Sum" name="test_right"/>'
        '<testcase classname="Sum" name="test_wrong"><failure message="6 != 7"/></testcase></testsuite>'
    )
os.makedirs("out/deep", exist_ok=True)
with open("out/deep/data.bin", "wb") as data:
    data.write(os.urandom(3 << 20))
with open("out/name:with?odd*chars", "w") as odd:
    odd.write("odd")
os.symlink("/etc/passwd", "out/link")
sys.exit(len(result.failures))
END
run 10 python --backend firecracker --image "$python" --run 'python3 run.py' --outputs report.xml --outputs 'out/**' --junit report.xml
holds python \
  'isolation["tier"] == "vm" and result["exit_code"] == 1 and "Ran 2 tests" in out' \
  'step["guest_tests"] == {"total": 2, "failed": 1, "errors": 0, "skipped": 0}' \
  '"test_wrong" in (directory / "junit.xml").read_text()' \
  'sorted(o["bytes"] for o in step["outputs"])[-1] == 3 << 20 and len(step["outputs"]) == 3'
[ -z "$(find "$work/python/outputs" -type l)" ] || fail "a link came back"

"""Runs the unit tests and writes report.xml, with the standard library alone."""

import sys
import time
import unittest
from xml.etree import ElementTree


class Recorder(unittest.TextTestResult):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.suite = ElementTree.Element("testsuite", name="python")

    def startTest(self, test):
        super().startTest(test)
        self.case = ElementTree.SubElement(
            self.suite, "testcase", classname=type(test).__name__, name=test._testMethodName
        )
        self.began = time.monotonic()

    def stopTest(self, test):
        self.case.set("time", f"{time.monotonic() - self.began:.3f}")
        super().stopTest(test)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        ElementTree.SubElement(self.case, "failure", message=str(err[1]))

    def addError(self, test, err):
        super().addError(test, err)
        ElementTree.SubElement(self.case, "error", message=str(err[1]))


result = unittest.TextTestRunner(resultclass=Recorder, verbosity=2).run(
    unittest.defaultTestLoader.discover(".")
)
suite = result.suite
suite.set("tests", str(result.testsRun))
suite.set("failures", str(len(result.failures)))
suite.set("errors", str(len(result.errors)))
ElementTree.ElementTree(suite).write("report.xml", encoding="utf-8", xml_declaration=True)
sys.exit(not result.wasSuccessful())

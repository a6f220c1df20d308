"""Counts of one test runner, read from its report file, or from its output if it crashed."""

import json
import re
import xml.etree.ElementTree
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    # One text per failure, to print.
    failures: list[str] = field(default_factory=list)
    # The test that was running when the program ended. It is in none of the counts.
    unfinished: str = ""

    def add(self, other: "Counts") -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def fail(self, text: str) -> None:
        self.failed += 1
        self.failures.append(text)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def read_gtest(report: Path, output: str) -> Counts:
    """Reads --gtest_output=json. gtest writes it at the end, so a crashed program leaves only its output."""
    try:
        suites = json.loads(report.read_text(encoding="utf-8", errors="replace"))["testsuites"]
    except (OSError, ValueError, KeyError):
        return _read_gtest_output(output)
    counts = Counts()
    for suite in suites:
        for test in suite["testsuite"]:
            name = f"{suite['name']}.{test['name']}"
            if test.get("failures"):
                counts.fail(name + "\n" + "\n".join(f["failure"] for f in test["failures"]))
            elif test["status"] == "NOTRUN" or test["result"] in ("SKIPPED", "SUPPRESSED"):
                counts.skipped += 1
            else:
                counts.passed += 1
    return counts


def _read_gtest_output(output: str) -> Counts:
    counts = Counts()
    running = None
    for line in output.splitlines():
        # The marker may follow text that the test printed without a newline.
        match = re.search(
            r"\[( RUN      |       OK |  FAILED  |  SKIPPED )\] (\w+(?:/\w+)*\.\w+(?:/\w+)*)", line
        )
        if not match:
            continue
        mark, name = match[1].strip(), match[2]
        if mark == "RUN":
            running = name
        elif running == name:  # the list of failures at the end repeats names of finished tests
            running = None
            if mark == "OK":
                counts.passed += 1
            elif mark == "SKIPPED":
                counts.skipped += 1
            else:
                counts.fail(name)
    counts.unfinished = running or ""
    return counts


def read_pytest(report: Path, output: str) -> Counts:
    """Reads --junitxml, or the output of `pytest -v` if pytest itself died."""
    try:
        root = xml.etree.ElementTree.parse(report).getroot()
    except (OSError, xml.etree.ElementTree.ParseError):
        return _read_pytest_output(output)
    counts = Counts()
    for case in root.iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        bad = [child for child in case if child.tag in ("failure", "error")]
        if bad:
            counts.fail(name + "\n" + "\n".join(child.text or child.get("message", "") for child in bad))
        elif case.find("skipped") is not None:
            counts.skipped += 1
        else:
            counts.passed += 1
    return counts


def _read_pytest_output(output: str) -> Counts:
    counts = Counts()
    for name, result in re.findall(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", output, re.M):
        if result in ("PASSED", "XPASS"):
            counts.passed += 1
        elif result in ("FAILED", "ERROR"):
            counts.fail(name)
        else:
            counts.skipped += 1
    return counts

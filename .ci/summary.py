"""Prints the table of the tiers that ran, from their JUnit reports, and the slowest tests of each;
fails when one of those named ran no test or failed.

Run as `python .ci/summary.py fast chaos …` after the tiers. A test that passed when it was tried
again has passed, and is named.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from xml.etree import ElementTree

REPORTS = Path(os.environ.get("KDIST_TIERS", Path(__file__).parent.parent / ".kdist" / "tiers"))
SLOWEST, SLOW = 8, 20.0


def main(tiers: list[str]) -> int:
    """Print one line per tier and a closing line; 1 if a tier is missing, empty or failed."""
    totals = [0, 0, 0]
    notes, bad = [], []
    say(f"{'tier':<12}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for tier in tiers:
        suite = read(tier)
        if suite is None:
            bad.append(f"{tier} did not run, or left an unreadable report")
            continue
        again = read(f"{tier}.again")
        seconds = sum(float(one.get("time", 0)) for one in (suite, again) if one is not None)
        failed = failures(suite)
        saved = sorted(failed & passes(again)) if again is not None else []
        notes += [f"{tier}: passed at the second try only: {name}" for name in saved]
        skipped = int(suite.get("skipped", 0))
        lost = len(failed) - len(saved)
        passed = int(suite.get("tests", 0)) - lost - skipped
        say(f"{tier:<12}{passed:>8}{lost:>8}{skipped:>9}{seconds:>9.0f}")
        totals = [
            total + count for total, count in zip(totals, (passed, lost, skipped), strict=True)
        ]
        if lost or not passed:
            bad.append(f"{tier}: {passed} passed, {lost} failed")
    for tier in tiers:
        cases = [] if (suite := read(tier)) is None else suite.iter("testcase")
        took = [(float(case.get("time", 0)), name_of(case)) for case in cases]
        for seconds, name in sorted(took, reverse=True)[:SLOWEST]:
            if seconds >= SLOW:
                say(f"{tier:<12}{seconds:>8.0f} s  {name}")
    for line in [*notes, *bad]:
        say(line)
    say("{} passed, {} failed, {} skipped".format(*totals))
    return 1 if bad else 0


def read(report: str) -> ElementTree.Element | None:
    """The test suite of a report; None where there is none."""
    try:
        return ElementTree.parse(REPORTS / f"{report}.xml").getroot().find("testsuite")  # noqa: S314 (pytest wrote it a moment ago)
    except (OSError, ElementTree.ParseError):
        return None


def failures(suite: ElementTree.Element) -> set[str]:
    """Names of the tests that failed, in their set-up and tear-down too."""
    return {
        name_of(case)
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    }


def passes(suite: ElementTree.Element) -> set[str]:
    """Names of the tests that passed."""
    return {
        name_of(case) for case in suite.iter("testcase") if case.find("skipped") is None
    } - failures(suite)


def name_of(case: ElementTree.Element) -> str:
    """A test as the reader knows it."""
    return f"{case.get('classname')}::{case.get('name')}"


def say(line: str) -> None:
    """Write one line for the reader of the log."""
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Prints the table of the tiers that ran, from their JUnit reports; fails when one of those named ran no test.

Run as `python .ci/summary.py house unit …` after the tiers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

REPORTS = Path(__file__).parent.parent / ".kdist" / "tiers"


def main(tiers: list[str]) -> int:
    """Print one line per tier and a closing line; 1 if a tier is missing, empty or failed."""
    totals = [0, 0, 0]
    bad = []
    say(f"{'tier':<12}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for tier in tiers:
        report = REPORTS / f"{tier}.xml"
        if not report.exists():
            bad.append(f"{tier} did not run")
            continue
        suite = ElementTree.parse(report).getroot().find("testsuite")  # noqa: S314 (pytest wrote it a moment ago)
        if suite is None:
            bad.append(f"{tier} left an unreadable report")
            continue
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped = int(suite.get("skipped", 0))
        passed = int(suite.get("tests", 0)) - failed - skipped
        say(f"{tier:<12}{passed:>8}{failed:>8}{skipped:>9}{float(suite.get('time', 0)):>9.0f}")
        totals = [total + count for total, count in zip(totals, (passed, failed, skipped), strict=True)]
        if failed or not passed:
            bad.append(f"{tier}: {passed} passed, {failed} failed")
    for line in bad:
        say(line)
    say("{} passed, {} failed, {} skipped".format(*totals))
    return 1 if bad else 0


def say(line: str) -> None:
    """Write one line for the reader of the log."""
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

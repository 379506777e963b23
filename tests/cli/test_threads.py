"""A thread of a command or of the controller that fails is logged, and starts again or ends the
process.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest

from kdist.threads import OnError, start_thread

SECONDS = 60.0


def test_a_loop_that_raises_is_logged_and_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    done, errors = threading.Event(), [KeyError("first"), SystemExit(3)]

    def run() -> None:
        if errors:
            raise errors.pop(0)
        done.set()

    with caplog.at_level(logging.ERROR, "kdist.threads"):
        start_thread(run, name="keeper", on_error=OnError.RESTART).join(SECONDS)
    assert done.is_set()
    assert ["thread keeper has failed, it starts again" in each for each in caplog.messages] == [
        True,
        True,
    ]


def test_a_thread_that_others_can_do_without_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    start_thread(lambda: 1 / 0, name="extra", on_error=OnError.REPORT).join(SECONDS)
    assert len(caplog.records) == 1


def test_a_process_that_loses_a_thread_it_needs_ends_with_a_line_that_says_why() -> None:
    code = (
        "import time\nfrom kdist.threads import OnError, start_thread\n"
        "start_thread(lambda: int('\\x1b[31m'), name='needed', on_error=OnError.EXIT)\n"
        "time.sleep(600)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert found.returncode == 1
    assert found.stderr.startswith("thread needed has failed, the process ends: ValueError: ")
    assert "\x1b" not in found.stderr
    assert found.stderr.count("\n") == 1

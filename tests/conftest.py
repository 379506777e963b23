"""What every test may ask for."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable

import hypothesis
import pytest

# Tests share the cores, so torch takes one thread in each; set before anything imports it.
# Trainings set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts a process in its background has it ignore Ctrl-C, and so would everything that
# tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_CACHES = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} - os.environ.keys()

# A busy machine proves nothing about an example that took long; under CI the examples are the same
# ones every time.
hypothesis.settings.register_profile(
    "kdist",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("kdist")


def pytest_runtest_setup() -> None:
    """Forget the variables of caches that torch sets where a test compiles something: what the next
    one starts would take them for the user's.
    """
    for name in _CACHES:
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """Path of a program outside Python, as in `program("strace")`; without it the test is skipped,
    and fails under CI.
    """

    def find(name: str) -> str:
        path = shutil.which(name)
        if path is None and os.environ.get("CI"):
            pytest.fail(f"{name} is not installed, which tests/install-system.sh should have done")
        if path is None:
            pytest.skip(f"{name} is not installed: see tests/install-system.sh")
        return path

    return find


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests have measured under faults, which decides nothing."""
    reports = [
        report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)
    ]
    for printed in sorted(
        printed
        for report in reports
        for name, printed in report.user_properties
        if name == "measured"
    ):
        terminalreporter.write_line(str(printed))

"""A pytest plugin that goes on where a long run was stopped.

`pytest -p tests.resume --resume-file=FILE …` notes each test that passed; the next run with the
same sources leaves those out. Changed sources, or a run that reached its end without a failure,
start from the first test again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

ROOMS = ("cli", "trainer", "manifests", "examples", "tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--resume-file", type=Path, help="file that notes the tests that have passed")


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--resume-file")
    if path is not None:
        config.pluginmanager.register(Resume(path.absolute(), config), "resume-file")


class Resume:
    """The notes of one run: read once at its start, appended to by the process that hands out the
    tests.
    """

    def __init__(self, path: Path, config: pytest.Config) -> None:
        self.path = path
        self.unfinished = False
        worker_input = getattr(config, "workerinput", None)
        self.is_worker = worker_input is not None
        # all workers of pytest-xdist must see the same notes, also one that is replaced
        if worker_input is not None:
            self.passed = set(worker_input["resumed"])
            return
        digest = digest_of_sources(config.rootpath)
        lines = path.read_text().splitlines() if path.exists() else []
        self.passed = set(lines[1:]) if lines[:1] == [digest] else set()
        if not self.passed:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(digest + "\n")

    def pytest_configure_node(self, node: object) -> None:
        node.workerinput["resumed"] = sorted(self.passed)  # type: ignore[attr-defined]  # pytest-xdist's WorkerController

    def pytest_report_header(self) -> str:
        return (
            f"resume: {len(self.passed)} tests have passed before and are left out "
            f"({self.path.name})"
        )

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        done = [item for item in items if item.nodeid in self.passed]
        if done and len(done) < len(items):
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item.nodeid not in self.passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.is_worker:
            return
        if report.failed:
            self.unfinished = True
        elif report.when == "call" and report.passed:
            with self.path.open("a") as notes:
                notes.write(report.nodeid + "\n")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if not self.is_worker and exitstatus == pytest.ExitCode.OK and not self.unfinished:
            self.path.unlink(missing_ok=True)


def digest_of_sources(root: Path) -> str:
    """Digest of everything a test's outcome may depend on."""
    digest = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((root / room).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(
                    f"{path.relative_to(root)}\0".encode()
                    + hashlib.sha256(path.read_bytes()).digest()
                )
    return digest.hexdigest()

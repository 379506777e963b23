"""What the tests of the command line may ask for: `kdist` as the user types it, in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kdist.app import cli
from tests.cli import documents
from tests.cli.running import Run, Start

Kdist = Callable[..., Result]
ServeAgent = Callable[[bytes, int], int]

JOB = """\
apiVersion: kdist.dev/v1alpha1
kind: TrainingJob
metadata:
  name: digits
spec:
  train:
    workload: digits
    epochs: 5
"""


@pytest.fixture
def kdist(monkeypatch: pytest.MonkeyPatch) -> Kdist:
    """`kdist("validate", "job.yaml")` → result with exit_code, stdout and stderr; it never leaves a
    traceback, and what it prints with `-o json` is as the schema says.
    """
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("KDIST_DEBUG", raising=False)

    def run(*args: str, stdin: str | bytes = "") -> Result:
        result = CliRunner().invoke(cli, args, input=stdin, prog_name="kdist")
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert "Traceback" not in result.output
        if "\0-o\0json\0" in "\0".join([*args, ""]).partition("\0--\0")[0]:
            documents.read(result.stdout)
        return result

    return run


@pytest.fixture
def job() -> str:
    """Text of the smallest valid job.yaml."""
    return JOB


@pytest.fixture
def job_file(tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A valid job.yaml in an otherwise empty working directory."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "job.yaml"
    file.write_text(job)
    return file


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `kdist run` with these arguments in the folder `tmp_path`: `start("job.yaml",
    "--nodes", "2")`.
    """
    runs: list[Run] = []

    def begin(*args: str, stderr: Any = None) -> Run:
        runs.append(Run(tmp_path, *args, stderr=stderr))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture
def serve_agent() -> Iterator[ServeAgent]:
    """Start an HTTP server that answers with one body and status: `serve_agent(b"{}", 200)` returns
    its port.
    """
    servers: list[ThreadingHTTPServer] = []

    def start(body: bytes, status: int) -> int:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Keep the test's output clean."""

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return int(servers[-1].server_address[1])

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()

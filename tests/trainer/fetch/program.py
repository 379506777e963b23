"""Runs `python -m kdist_trainer.fetch` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.house.tree import ROOT

FIELD = "spec.data[0]"
TIMEOUT = 120


@dataclass(frozen=True)
class Ended:
    """How a fetch has ended."""

    code: int
    stdout: str
    stderr: str
    folder: Path
    record: dict[str, Any]
    """The exit record in the termination message; empty after a success."""

    @property
    def events(self) -> list[dict[str, Any]]:
        """What it has logged."""
        return [json.loads(line) for line in self.stdout.splitlines()]

    def event(self, name: str) -> dict[str, Any]:
        """The last event of this name."""
        return [one for one in self.events if one["event"] == name][-1]

    @property
    def files(self) -> dict[str, bytes]:
        """What it has fetched, by path."""
        return read_files(self.folder)

    @property
    def shown(self) -> str:
        """All that it has written except the files."""
        state = self.folder / "fetch.json"
        return (
            f"{self.stdout}{self.stderr}{json.dumps(self.record)}"
            f"{state.read_text() if state.exists() else ''}"
        )


def read_files(folder: Path) -> dict[str, bytes]:
    """The files in the folder of a fetch, by path."""
    root = folder / "files"
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@dataclass
class Program:
    """A fetch that runs."""

    process: subprocess.Popen[str]
    folder: Path
    message: Path

    def kill(self, number: int = signal.SIGKILL) -> Ended:
        """Send a signal, and wait for the end."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> Ended:
        """Wait for the end."""
        stdout, stderr = self.process.communicate(timeout=TIMEOUT)
        text = self.message.read_text()
        self.message.unlink()
        record = json.loads(text) if text else {}
        return Ended(self.process.returncode, stdout, stderr, self.folder, record)


def start(
    url: str,
    folder: Path,
    *options: str,
    field: str = FIELD,
    prefix: tuple[str, ...] = ("-m", "kdist_trainer.fetch"),
    **variables: str,
) -> Program:
    """Start a fetch, with these options and variables, an empty one of which is not set."""
    # an empty file on another disk than the folder, as Kubernetes mounts it
    descriptor, name = tempfile.mkstemp(prefix="kdist-message-")
    os.close(descriptor)
    message = Path(name)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "AZURE_", "GOOGLE_", "HF_", "HTTP_", "http_", "KDIST_"))
    }
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "trainer", ROOT)))
    command = [sys.executable, *prefix, "--url", url, "--folder", str(folder), "--field", field]
    process = subprocess.Popen(
        [*command, "--termination-message", str(message), *options],
        env={name: value for name, value in (environment | variables).items() if value},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Program(process, folder, message)


def fetch(url: str, folder: Path, *options: str, **variables: Any) -> Ended:
    """Run a fetch to its end."""
    return start(url, folder, *options, **variables).wait()

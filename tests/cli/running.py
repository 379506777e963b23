"""`kdist run` at work, seen from outside: what its tests share."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from tests.cli import documents
from tests.trainer.checkpoint.exported import assert_each_done_tells_what_is_kept

PATIENCE = 180.0  # seconds; a condition on a loaded machine

Start = Callable[..., "Run"]


class Run:
    """One `kdist run` at work in the folder `home`."""

    def __init__(self, home: Path, *args: str, stderr: Any = None) -> None:
        self.home = home
        self._words = args
        self._environment = environment = {
            **os.environ,
            "KDIST_HOME": str(home / "runs"),
            "NO_COLOR": "1",
            "TERM": "xterm",
        }
        command = [sys.executable, "-m", "kdist", "run", *args]
        self._errors = (home / "stderr").open("w+")
        self.process = subprocess.Popen(
            command,
            cwd=home,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr or self._errors,
            text=True,
            start_new_session=True,
        )

    def wait(self, code: int) -> str:
        """What was printed to stdout, once it has ended with this code; a DONE is about the weights
        that were kept.
        """
        try:
            out, _ = self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end:\n{self.errors()}")
        assert self.process.returncode == code, self.errors()
        assert_each_done_tells_what_is_kept(self.home)
        if self._words[-2:] == ("-o", "json"):
            documents.read(out)
        return out

    def errors(self) -> str:
        return (self.home / "stderr").read_text()

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.errors()}"
            assert time.monotonic() < end, f"no {what}:\n{self.errors()}"
            time.sleep(0.05)

    def ask(self, *words: str) -> str:
        """What another `kdist` prints, while it runs or after its end."""
        asked = subprocess.run(
            [sys.executable, "-m", "kdist", *words],
            cwd=self.home,
            env=self._environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        if words[-2:] == ("-o", "json"):
            documents.read(asked.stdout)
        return asked.stdout

    def folder(self, name: str) -> Path:
        return self.home / "runs" / name

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._errors.close()


class Terminal:
    """A terminal that a run may draw on: `theirs` is its end, `text` what was drawn, without
    colours and moves.
    """

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        self._seen = b""

    def close_theirs(self) -> None:
        """The run has its own by now."""
        os.close(self.theirs)

    def text(self) -> str:
        with contextlib.suppress(OSError):  # nothing new, or the other end is closed
            while data := os.read(self._ours, 1 << 16):
                self._seen += data
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._seen.decode(errors="replace"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._ours)
        self._ours = -1


def write_job(
    home: Path,
    name: str = "digits",
    *,
    nodes: int = 2,
    steps: int = 24,
    checkpoint: int = 10,
    **spec: Any,
) -> str:
    train = {
        "workload": "digits",
        "steps": steps,
        "globalBatch": 32,
        "checkpoint": {"every": {"steps": checkpoint}},
        "syncEverySteps": 2,
    }
    document = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"nodes": nodes, "procsPerNode": 1, "train": train, **spec},
    }
    (home / "job.yaml").write_text(yaml.safe_dump(document))
    return "job.yaml"


def write_script(home: Path, text: str, name: str = "script.py") -> str:
    (home / name).write_text(text)
    return name


def read_ledger(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "checkpoints" / "ledger" / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def commits(folder: Path) -> list[int]:
    return [event["step"] for event in read_ledger(folder, "events") if event["event"] == "commit"]


def processes_of(folder: Path) -> list[str]:
    """Command lines of the live processes that were told of this run folder, by argument or by
    environment.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                command = (entry / "cmdline").read_bytes()
                reported = command + (entry / "environ").read_bytes()
            except OSError:
                continue
            if state not in "ZX" and f"{folder}/".encode() in reported:
                found.append(f"{entry.name} {command.decode(errors='replace')}")
    return found

"""A run on this machine as a job: which run folder it is, whether its `kdist run` is active, and
the command that starts it again.

`local.status` reads its `JobStatus`, `local.suspension` stops and starts it, and `local.deletion`
deletes it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kdist.job.local import agents, run_dir
from kdist.status import documents

_WITH_VALUE = ("--nodes", "--procs-per-node", "--set", "-o")  # options, as `kdist run` records them


@dataclass(frozen=True)
class LocalJob:
    """One run folder. Its files are read at each access, since an active run writes them.

    Attributes:
        root: the run folder, or a checkpoint folder that was copied without one.
    """

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def run(self) -> Mapping[str, Any]:
        """The content of `run.json`; empty if there is none."""
        return run_dir.read_json(self.root / "run.json") or {}

    @property
    def is_run_folder(self) -> bool:
        """Whether this is a run folder, so not only a folder of checkpoints."""
        return (self.root / "run.json").is_file()

    @property
    def active(self) -> bool:
        """Whether its `kdist run` is running."""
        return agents.is_active(self.root)

    @property
    def is_done(self) -> bool:
        """Whether its training has reached its end."""
        return not self.active and self.last_invocation.get("outcome") == "done"

    @property
    def pid(self) -> int | None:
        """Process id of the active `kdist run`; None if none is active."""
        if not self.active:
            return None
        try:
            return int((self.root / "lock").read_text())
        except (OSError, ValueError):
            return None

    @property
    def last_invocation(self) -> Mapping[str, Any]:
        """What `run.json` says of the last `kdist run`; empty if there was none."""
        found = list(documents.items(self.run, "invocations"))
        return found[-1] if found else {}

    @property
    def command(self) -> tuple[str, ...] | None:
        """Arguments of `kdist` that start it again; None if the job came from standard input, or
        the run was started by a version that did not record them.
        """
        found = self.last_invocation.get("command")
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            return None
        return tuple(found) or None

    @property
    def folder_of_command(self) -> Path:
        """Working directory of the recorded command."""
        found = self.last_invocation.get("cwd")
        return Path(found) if isinstance(found, str) else Path.cwd()

    @property
    def next_run(self) -> str:
        """The command line that continues the run, valid where its relative paths are."""
        return self.next_run_with()

    @property
    def next_resume(self) -> str:
        """The command line that resumes the run in the background, or else `next_run`."""
        return self.kdist("resume") if self.command else self.next_run

    def next_run_with(self, option: str = "", value: str = "", *, fresh: bool = False) -> str:
        """`next_run` with this option of `kdist run`, instead of an earlier value of it; with
        `fresh` it starts again at step 0.
        """
        added = [*(["--fresh"] if fresh else []), *(each for each in (option, value) if each)]
        if self.command is None:
            return shlex.join(["kdist", "run", *added, "JOB.yaml"])
        verb, *rest = self.command
        kept: list[str] = []
        while rest and rest[0].startswith("-"):
            length = 2 if rest[0] in _WITH_VALUE else 1
            kept += rest[:length] if rest[0] != option else []
            del rest[:length]
        folder = self.folder_of_command
        there = "" if folder == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
        return f"{there}kdist {shlex.join([verb, *added, *kept, *rest])}"

    @cached_property
    def reference(self) -> str:
        """The words by which another command names this run from the working directory."""
        if self.root.parent == run_dir.home():
            return self.name
        shown = os.path.relpath(self.root)
        return shown if os.sep in shown else f".{os.sep}{shown}"

    def kdist(self, verb: str, *options: str) -> str:
        """The command line `kdist VERB` for this run."""
        return " ".join(["kdist", verb, shlex.quote(self.reference), *options])

    @property
    def grace_seconds(self) -> float:
        """Seconds that its ranks may take to save and end."""
        train = run_dir.read_json(self.root / "train.json") or {}
        return documents.number(train, "terminationGracePeriodSeconds") or 60.0


def find_job(name: str) -> LocalJob | None:
    """The run NAME, or the one in the folder NAME if that is a path; None if there is none."""
    root = agents.find_run(name)
    return None if root is None else LocalJob(root)


def list_jobs() -> list[LocalJob]:
    """All runs of `.kdist` (or `$KDIST_HOME`), by name."""
    try:
        folders = sorted(run_dir.home().iterdir())
    except OSError:
        return []
    return [LocalJob(folder) for folder in folders if (folder / "run.json").is_file()]

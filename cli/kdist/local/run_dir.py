"""The run folder `.kdist/<job>/`: what one job keeps on this machine between invocations
of `kdist run`.

    run.json         the run's id and its invocations
    train.json       the configuration of the agents
    node-<i>/        scratch folder of each agent, and its `log`
    rendezvous-<n>/  store of the n-th invocation
    checkpoints/     unless the job names a folder of its own
    report.json      the end report
    lock             held by the active `kdist run`
    lifeline         its end of file ends every agent
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdist.errors import KdistError

HOME_VARIABLE = "KDIST_HOME"
_GLANCE_SECONDS = 1.0


def home() -> Path:
    """Where run folders are: `$KDIST_HOME`, else `.kdist` in the working directory."""
    return Path(os.environ.get(HOME_VARIABLE) or ".kdist").absolute()


def write_json(path: Path, document: object) -> None:
    """Replace `path` in one move, so that a reader never sees half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(
            json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """The document at `path`, or None where there is none that can be read (yet)."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


@dataclass
class RunFolder:
    """An open run folder; locked until `close`. `moved` are the folders that `fresh` put aside."""

    root: Path
    lock: int
    run: dict[str, Any]
    moved: list[Path] = field(default_factory=list)
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = len(self.run["invocations"]) + 1

    @classmethod
    def open(
        cls,
        name: str,
        *,
        fresh: bool = False,
        checkpoints: Path | None = None,
        script: str | None = None,
    ) -> RunFolder:
        """Lock the folder of the job `name` and begin the next invocation.

        Args:
            name: name of the job.
            fresh: put the old folder aside and begin a new run. The folder of checkpoints goes
                with it where it lies elsewhere.
            checkpoints: the job's own folder of checkpoints, or None for the one in the run folder.
            script: the script that is to run, an absolute path or `-m MODULE`; None for a managed
                training.

        Raises `KdistError` if another `kdist run` is at work there, if the run is another script's,
        or if the folder cannot be used.
        """
        root = home() / name
        try:
            lock = _lock(root)
            moved = []
            if fresh:
                moved = _put_aside(root)
                os.close(lock)
                lock = _lock(root)
        except OSError as error:
            raise KdistError(f"the run folder {root} cannot be used: {error.strerror}") from error
        folder = cls(root, lock, _read_run(root), moved)
        folder.run["checkpoints"] = str(checkpoints or root / "checkpoints")
        if script is not None:
            folder._belong_to(script)
        return folder

    def _belong_to(self, script: str) -> None:
        """Note whose run it is; raises `KdistError` where it is another script's. Both may have
        been moved together.
        """
        own = os.path.relpath(script, self.root) if Path(script).is_absolute() else script
        known = self.run.setdefault("script", own)
        if known != own:
            self.close()
            other = known if known.startswith("-m ") else os.path.normpath(self.root / known)
            raise KdistError(
                (
                    f"the run in {self.root} is that of another script, {other}: this one "
                    "would go on from its state"
                ),
                hint=(
                    "--fresh puts that run aside; a job file with its own metadata.name keeps both"
                ),
            )

    @property
    def run_id(self) -> str:
        return str(self.run["run_id"])

    @property
    def invocation(self) -> int:
        """Number of the invocation at work, from 1."""
        return len(self.run["invocations"])

    @property
    def checkpoints(self) -> Path:
        return Path(self.run["checkpoints"])

    @property
    def lifeline(self) -> Path:
        return self.root / "lifeline"

    @property
    def store(self) -> Path:
        """File of the rendezvous of the invocation that `open` was for, whether it has begun or
        not.
        """
        return self.root / f"rendezvous-{self.number}" / "store"

    def node(self, name: str) -> Path:
        """Scratch folder of a node's agent, for its owner only."""
        path = self.root / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def log(self, name: str) -> Path:
        """Everything that a node's agent and ranks print, of all invocations."""
        return self.node(name) / "log"

    def begin(self, train_json: str | None = None) -> None:
        """Note the new invocation, and what its agents are told; what only an earlier one needed
        goes.

        Raises `KdistError` where the disk does not take it.
        """
        try:
            self._begin(train_json)
        except OSError as error:
            raise KdistError(
                f"the run folder {self.root} cannot be written: {error.strerror}"
            ) from error

    def _begin(self, train_json: str | None) -> None:
        self.run["invocations"].append({"started": time.time(), "ended": None, "outcome": None})
        write_json(self.root / "run.json", self.run)
        for old in self.root.glob("rendezvous-*"):
            shutil.rmtree(old, ignore_errors=True)
        for note in ("agent.json", "agents", "exit.json"):
            for left in self.root.glob(f"node-*/{note}"):
                left.unlink(missing_ok=True)
        self.store.parent.mkdir()
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        if train_json is not None:
            (self.root / "train.json").write_text(train_json, encoding="utf-8")

    def end(self, outcome: str) -> None:
        """Note how the invocation ended. Raises `OSError` where the disk does not take it; it is
        noted in memory all the same.
        """
        self.run["invocations"][-1] |= {"ended": time.time(), "outcome": outcome}
        write_json(self.root / "run.json", self.run)

    def done(self) -> dict[str, Any] | None:
        """The DONE document of this very run, if it has ended."""
        document = read_json(self.checkpoints / "DONE")
        return document if document and document.get("run_id", self.run_id) == self.run_id else None

    def close(self) -> None:
        os.close(self.lock)


def _lock(root: Path) -> int:
    """Lock `root`, made where it is missing, and tell who holds it if somebody else does."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / "lock"
    patient_until = time.monotonic() + _GLANCE_SECONDS
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # somebody who only asks whether a run is at work holds it for a moment
            if time.monotonic() < patient_until:
                os.close(lock)
                time.sleep(_GLANCE_SECONDS / 20)
                continue
            owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            hint = "stop it first (Ctrl-C there), or give this job another metadata.name"
            raise KdistError(
                f"another kdist run{f' (pid {owner})' if owner else ''} is at work in {root}",
                hint=hint,
            ) from None
        if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
            break
        os.close(lock)  # put aside by another one's --fresh between the two calls
        root.mkdir(parents=True, exist_ok=True)
    os.truncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _read_run(root: Path) -> dict[str, Any]:
    """What `run.json` says, or a new run."""
    run = read_json(root / "run.json")
    if run and isinstance(run.get("run_id"), str) and isinstance(run.get("invocations"), list):
        return run
    return {"run_id": secrets.token_hex(4), "created": time.time(), "invocations": []}


def _put_aside(root: Path) -> list[Path]:
    """Rename the run folder, and its checkpoints where they lie elsewhere; the new names."""
    run = read_json(root / "run.json")
    if run is None:
        return []
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folders = [root]
    checkpoints = Path(str(run.get("checkpoints", root)))
    if not checkpoints.is_relative_to(root) and checkpoints.is_dir():
        folders.insert(0, checkpoints)
    return [folder.rename(_free_name(folder, stamp)) for folder in folders]


def _free_name(folder: Path, stamp: str) -> Path:
    taken = {
        path.name
        for path in folder.parent.iterdir()
        if re.match(re.escape(f"{folder.name}.{stamp}"), path.name)
    }
    names = (
        f"{folder.name}.{stamp}{suffix}"
        for suffix in ("", *(f"-{number}" for number in range(1, len(taken) + 2)))
    )
    return folder.with_name(next(name for name in names if name not in taken))

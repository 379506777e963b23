"""The run folder `.kdist/<job>/`: what one job keeps on this machine between invocations
of `kdist run`.

    run.json         the run's id and its invocations, each with its command
    run.log          output of the last detached invocation
    train.json       the configuration of the agents
    node-<i>/        scratch folder of each agent, and its `log`
    fetch-<name>/    `log` and exit record of each fetch of data or weights
    rendezvous-<n>/  store of the n-th invocation
    checkpoints/     unless the job names a folder of its own; the copy of a bucket's records
    report.json      the end report
    lock             held by the active `kdist run`
    parent-pipe      its end of file ends every agent

Arguments, environment and losses are in it, so folders are 0700 and files 0600: every file of a run
that the command line writes is opened here. `CheckpointLocation` is where the checkpoints are, and
`is_finished` compares a job with the DONE document there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from kdist.errors import Code, KdistError
from kdist.spec import CHECKPOINTS_ENDPOINT, CHECKPOINTS_REGION, TrainingJob
from kdist_trainer.config.edit_rules import compare_done
from kdist_trainer.formats import NewerFormatError, check_format, stamp
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import MAX_BYTES, MalformedTextError, parse_object

HOME_VARIABLE = "KDIST_HOME"
_ELSEWHERE = f"set {HOME_VARIABLE} to a folder that you may write to"
_LOCK_SECONDS = 1.0
_FOLDER_MODE = 0o700
_FILE_MODE = 0o600
# of the folder with a function's code, which has another name for other code
_CONTENT = re.compile(r"(?<=[a-z0-9])-[0-9a-f]{12}(?=/run_\w+\.py$)")


def home() -> Path:
    """Where run folders are: `$KDIST_HOME`, else `.kdist` in the working directory."""
    return Path(os.environ.get(HOME_VARIABLE) or ".kdist").absolute()


def generated() -> Path:
    """Where the files of jobs are that were made in Python; their relative paths, as those of a job
    on standard input, start from the working directory.
    """
    return home() / ".jobs"


def write_generated(name: str, text: str) -> Path:
    """Write a file of a job that was made in Python, completely or not at all. Raises `KdistError`
    if that is not possible.
    """
    file = generated() / name
    try:
        make_private(file.parent)
        _write(file, text)
    except OSError as error:
        raise KdistError(
            f"cannot write {file}: {error.strerror}",
            hint=_ELSEWHERE,
        ) from error
    return file


def open_private(path: Path, mode: str) -> BinaryIO:
    """Open a file of a run for writing, accessible to its owner only. Raises `OSError`."""

    def open_it(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NOFOLLOW, _FILE_MODE)
        os.fchmod(descriptor, _FILE_MODE)  # one that another version has made
        return descriptor

    return cast(BinaryIO, open(path, mode, opener=open_it))


def make_private(folder: Path) -> None:
    """Create a folder of a run, accessible to its owner only, also one that exists. Raises
    `OSError`.
    """
    folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o077 and folder.stat().st_uid == os.getuid():
        folder.chmod(_FOLDER_MODE)


def write_json(path: Path, document: object) -> None:
    """Replace `path` atomically, so that a reader never sees a partial document."""
    _write(path, encode_json(document, indent=2, ensure_ascii=False) + "\n")


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # threads may write it too
    try:
        with open_private(draft, "wb") as file:
            file.write(text.encode())
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """The document at `path`; None if there is none, or it cannot be read (yet)."""
    try:
        with path.open("rb") as file:
            return parse_object(file.read(MAX_BYTES + 1), allow_nan=True)
    except (OSError, MalformedTextError):
        return None


@dataclass
class RunFolder:
    """An open run folder, locked until `close`. `moved` are the folders that `fresh` renamed,
    `moved_bucket` the URL of what it renamed in a bucket.
    """

    root: Path
    lock: int
    run: dict[str, Any]
    moved: list[Path] = field(default_factory=list)
    moved_bucket: str | None = None
    warnings: list[str] = field(default_factory=list)
    """What its end report says of the invocation besides its results."""
    edited: bool = False
    """Whether its script was made from other code of Python's than it had before."""
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
        bucket: Mapping[str, Any] | None = None,
        script: str | None = None,
    ) -> RunFolder:
        """Lock the folder of the job `name` and begin the next invocation. Raises `KdistError` if
        another `kdist run` is active there, the run is that of another script, or the folder cannot
        be used.

        Args:
            name: name of the job.
            fresh: rename the old folder, and a checkpoint folder elsewhere, and begin a new run.
            checkpoints: the job's own folder of checkpoints, or None for the one in the run folder.
            bucket: the job's folder in a bucket, of whose records the folder has a copy then; see
                `CheckpointLocation`.
            script: the script that is to run, an absolute path or `-m MODULE`; None for a managed
                training.
        """
        root = home() / name
        try:
            lock = _lock(root)
            moved = []
            if fresh:
                moved = _archive(root)
                os.close(lock)
                lock = _lock(root)
        except OSError as error:
            raise KdistError(
                f"the run folder {root} cannot be used: {error.strerror}",
                hint=_ELSEWHERE,
            ) from error
        folder = cls(root, lock, _read_run(root), moved)
        folder.run["checkpoints"] = str(checkpoints or root / "checkpoints")
        folder.run["bucket"] = bucket
        if script is not None:
            folder._check_script(script)
        return folder

    def _check_script(self, script: str) -> None:
        """Record the script of the run, relative to the folder, so that both may be moved
        together. Raises `KdistError` if the run is that of another script. A function that was
        edited, or is called with other arguments, is the same script.
        """
        own = os.path.relpath(script, self.root) if Path(script).is_absolute() else script
        known = str(self.run.get("script", own))
        self.run["script"], self.edited = own, known != own
        if _CONTENT.sub("", known) != _CONTENT.sub("", own):
            self.close()
            other = known if known.startswith("-m ") else os.path.normpath(self.root / known)
            raise KdistError(
                (
                    f"the run in {self.root} is that of another script, {other}: this one "
                    "would continue from its state"
                ),
                hint="--fresh archives that run; a job file with its own metadata.name keeps both",
            )

    @property
    def run_id(self) -> str:
        return str(self.run["run_id"])

    @property
    def invocation(self) -> int:
        """Number of the current invocation, from 1."""
        return len(self.run["invocations"])

    @property
    def checkpoints(self) -> Path:
        return Path(self.run["checkpoints"])

    @property
    def parent_pipe(self) -> Path:
        return self.root / "parent-pipe"

    @property
    def store(self) -> Path:
        """Rendezvous file of the invocation that `open` prepared."""
        return self.root / f"rendezvous-{self.number}" / "store"

    def node(self, name: str) -> Path:
        """Create the scratch folder of a node's agent, accessible to its owner only."""
        path = self.root / name
        make_private(path)
        return path

    def log(self, name: str) -> Path:
        """Log of a node's agent and ranks, of all invocations."""
        return self.node(name) / "log"

    def begin(self, train_json: str | None = None, *, command: Sequence[str] = ()) -> None:
        """Record the new invocation and the configuration of its agents, and delete the files of
        earlier ones. Raises `KdistError` if the folder cannot be written.

        Args:
            train_json: configuration of the agents.
            command: the arguments after `kdist` that continue the run from the working directory.
        """
        try:
            invocation: dict[str, Any] = {"started": time.time(), "ended": None, "outcome": None}
            if command:
                invocation |= {"command": list(command), "cwd": str(Path.cwd())}
            self.run["invocations"].append(invocation)
            write_json(self.root / "run.json", stamp("run.json", self.run))
            for old in self.root.glob("rendezvous-*"):
                shutil.rmtree(old, ignore_errors=True)
            for note in ("agent.json", "agents", "exit.json"):
                for left in (*self.root.glob(f"node-*/{note}"), *self.root.glob(f"fetch-*/{note}")):
                    left.unlink(missing_ok=True)
            make_private(self.store.parent)
            if not self.checkpoints.is_dir():  # a folder of the user's stays as it is
                make_private(self.checkpoints)
            if train_json is not None:
                _write(self.root / "train.json", train_json)
        except OSError as error:
            raise KdistError(
                f"the run folder {self.root} cannot be written: {error.strerror}"
            ) from error

    def end(self, outcome: str) -> None:
        """Record how the invocation ended. Raises `OSError` if the file cannot be written; the
        record in memory is updated all the same.
        """
        self.run["invocations"][-1] |= {"ended": time.time(), "outcome": outcome}
        write_json(self.root / "run.json", stamp("run.json", self.run))

    def done(self) -> dict[str, Any] | None:
        """The DONE document of this run; None if it has not ended."""
        document = read_json(self.checkpoints / "DONE")
        return document if document and document.get("run_id", self.run_id) == self.run_id else None

    def explain(self, error: OSError) -> Exception:
        """The error of an invocation, or in its place that this folder was removed meanwhile."""
        if (self.root / "run.json").exists():
            return error
        inside = self.checkpoints.is_relative_to(self.root)
        lost = "its logs and records are gone" + (", and its checkpoints were in it" * inside)
        words = [str(each) for each in self.run["invocations"][-1].get("command", ())]
        return KdistError(
            f"the run folder {self.root} was removed while the job ran: {lost}",
            hint="its agents end; `kdist delete` removes a run that is over",
            next_command=shlex.join(["kdist", *words]) if words else "",
            code=Code.JOB_FAILED,
        )

    def close(self) -> None:
        os.close(self.lock)


def _lock(root: Path) -> int:
    """Create and lock `root`. Raises `KdistError` with the pid of another owner of the lock."""
    make_private(root)
    path = root / "lock"
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # a process that only checks whether a run is active holds the lock briefly
            if time.monotonic() < deadline:
                os.close(lock)
                time.sleep(_LOCK_SECONDS / 20)
                continue
            owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            stop = f"`kdist suspend {root.name}`, or Ctrl-C there"
            hint = f"stop it first: {stop}; or give this job another metadata.name"
            raise KdistError(
                f"another kdist run{f' (pid {owner})' if owner else ''} is active in {root}",
                hint=hint,
            ) from None
        if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
            break
        os.close(lock)  # renamed by --fresh of another process between the two calls
        make_private(root)
    os.truncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _read_run(root: Path) -> dict[str, Any]:
    """The run in `run.json`, or a new one. Raises `KdistError` if a newer version wrote it."""
    run = read_json(root / "run.json")
    try:
        check_format("run.json", run)
    except NewerFormatError as error:
        raise KdistError(
            f"the run in {root} is another version's: {error}",
            hint="--fresh archives that run and begins a new one",
        ) from None
    if run and isinstance(run.get("run_id"), str) and isinstance(run.get("invocations"), list):
        return run
    return {"run_id": secrets.token_hex(4), "created": time.time(), "invocations": []}


def delete(root: Path, *, keep: Collection[str] = ()) -> None:
    """Delete a run folder, or all but the entries `keep` of it. Raises `KdistError` if its
    `kdist run` is active, or it cannot be deleted.
    """
    lock = _lock(root)
    try:
        inside = [path for path in root.iterdir() if path.name not in keep]
        # `lock` last: whoever waits for it finds that it is gone and begins a new folder
        for path in sorted(inside, key=lambda path: path.name == "lock"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        with contextlib.suppress(OSError):  # not empty
            root.rmdir()
    except OSError as error:
        raise KdistError(f"{root} cannot be deleted: {error.strerror}") from error
    finally:
        os.close(lock)


def _archive(root: Path) -> list[Path]:
    """Rename the run folder, or what a deleted run has left of it, and its checkpoint folder if
    that is elsewhere; the new paths, that of the run folder at the end.
    """
    run = read_json(root / "run.json")
    if run is None and not (root / "checkpoints").is_dir():
        return []
    now = time.strftime("%Y%m%d-%H%M%S")
    archive, moved = _free_name(root, now), []
    checkpoints = Path(str((run or {}).get("checkpoints", root)))
    if checkpoints.is_relative_to(root):
        checkpoints = archive / checkpoints.relative_to(root)
    elif checkpoints.is_dir():
        checkpoints = checkpoints.rename(_free_name(checkpoints, now))
        moved.append(checkpoints)
    if run is not None:
        record_move(root, checkpoints=str(checkpoints))
    return [*moved, root.rename(archive)]


def record_move(root: Path, **moved: object) -> None:
    """Have `run.json` say where the checkpoints of an archived run are now. Raises `OSError`."""
    write_json(root / "run.json", {**(read_json(root / "run.json") or {}), **moved})


def _free_name(folder: Path, stamp: str) -> Path:
    taken = {path.name for path in folder.parent.iterdir()}
    suffixes = ("", *(f"-{number}" for number in range(1, len(taken) + 2)))
    names = (f"{folder.name}.{stamp}{suffix}" for suffix in suffixes)
    return folder.with_name(next(name for name in names if name not in taken))


def is_finished(
    job: TrainingJob, done: Mapping[str, Any], train_json: str, *, edited: bool = False
) -> bool:
    """Whether the finished run is what the job asks for; False if the job asks for more steps.
    Raises `KdistError` if the job was edited in any other way, or its code was, so that the old
    report is about another job.
    """
    finished = compare_done(done, parse_object(train_json))
    problem = finished.problem
    if edited and problem is None and not finished.continues:
        problem = "the run is done, and its code or arguments were edited since"
    if problem is not None:
        hint = "--fresh archives the previous run and trains from scratch"
        if job.spec.train is not None:
            hint += "; more epochs or steps continue from its last checkpoint"
        raise KdistError(f"{job.metadata.name}: {problem}", hint=hint, code=Code.JOB_FAILED)
    return finished.is_complete


class CheckpointLocation(NamedTuple):
    """A folder or a URL, as agents and the trainer's tools take it."""

    text: str
    variables: Mapping[str, str] = {}
    """Environment variables that say where the store of a URL is."""

    @property
    def is_bucket(self) -> bool:
        """Whether it is a URL."""
        return "://" in self.text

    @classmethod
    def of_run(cls, run: Mapping[str, Any]) -> CheckpointLocation:
        """The location that `run.json` has."""
        bucket = run.get("bucket")
        if bucket:
            return cls(str(bucket["url"]), dict(bucket["variables"]))
        return cls(str(run["checkpoints"]))

    def to_json(self) -> dict[str, Any]:
        """The location as `run.json` has it."""
        return {"url": self.text, "variables": dict(self.variables)}


def bucket_of(job: TrainingJob) -> CheckpointLocation | None:
    """The job's folder in its bucket, the same as on a cluster; None if it has none."""
    checkpoints = job.spec.checkpoints
    if checkpoints is None or checkpoints.bucket is None:
        return None
    given = {CHECKPOINTS_ENDPOINT: checkpoints.endpoint, CHECKPOINTS_REGION: checkpoints.region}
    variables = {name: value for name, value in given.items() if value is not None}
    return CheckpointLocation(f"{checkpoints.bucket}/{job.checkpoint_folder}", variables)


def location_of(root: Path) -> CheckpointLocation:
    """Where the checkpoints of a run folder are; a folder that is no run folder counts as one of
    checkpoints.
    """
    run = read_json(root / "run.json")
    if run and run.get("checkpoints"):
        return CheckpointLocation.of_run(run)
    return CheckpointLocation(str(root))


def folder_of(root: Path) -> Path:
    """The folder of the checkpoints of a run folder, or of the copy of their records."""
    run = read_json(root / "run.json")
    return Path(str(run["checkpoints"])) if run and run.get("checkpoints") else root

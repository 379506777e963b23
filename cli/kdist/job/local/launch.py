"""Starts runs: the commands of a job's agents on this machine (arguments, environment, folders and
devices), whether this machine has torch and the GPUs that the job requests, and, for `kdist run
--detach`, the run itself as a process of its own session.

The output of a detached run goes to a file next to the run folders until its run folder is open,
and from then on the same file is `.kdist/NAME/run.log`. The started process reports over a pipe
when all of its agents serve; the pipe closes without a report when the run ends before that.

This module never imports torch; it only checks whether it is installed.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from kdist.errors import Code, KdistError, UsageError
from kdist.job.local import run_dir
from kdist.job.local.fetching import folder_of, list_fetches
from kdist.job.local.run_dir import CheckpointLocation, RunFolder
from kdist.job.local.supervisor import AgentCommand
from kdist.job_file import resolve_path
from kdist.job_file.commit import find_commit
from kdist.job_file.folder import missing_folder
from kdist.spec import CODE_MOUNT, TrainingJob
from kdist.status import documents
from kdist.units import count
from kdist_trainer.formats import COMMIT, LOG_FILE, SCRATCH
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.requirements import OF_IMAGE, is_older

# By their own names: kdist's are registered on no index, so whoever registers them could run code.
FOR_TRAINING = (
    *OF_IMAGE.values(),
    "safetensors>=0.5",
    "tensorboard>=2.18",
)


def install_command() -> str:
    """The command that adds what training needs to the environment of kdist."""
    if find_spec("pip") is None:  # an environment that uv made
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *FOR_TRAINING])
    return shlex.join([sys.executable, "-m", "pip", "install", *FOR_TRAINING])


def check_torch() -> None:
    """Raises `KdistError` if torch is not installed in kdist's environment, or too old."""
    has = "none"
    if find_spec("torch") is not None:
        has = ""
        with suppress(PackageNotFoundError):  # of a build from source, whose version is unknown
            found = version("torch")
            has = f"torch {found}" if is_older(found, OF_IMAGE["torch"]) else ""
    if has:
        raise KdistError(
            f"kdist run needs {OF_IMAGE['torch']} in the environment of kdist: {sys.prefix} has "
            f"{has}",
            hint="from a checkout of kdist, `make setup` installs it",
            next_command=install_command(),
        )


def plan_agents(
    job: TrainingJob,
    folder: RunFolder,
    *,
    base: Path,
    environment: Mapping[str, str],
    devices: Sequence[str] | None,
    python: str = sys.executable,
) -> list[AgentCommand]:
    """One command for each node of the job. Raises `UsageError`, which names all of them, if data,
    code or secrets are missing on this machine.

    Args:
        job: the job.
        folder: its run folder; the next invocation writes `train.json` there.
        base: folder that the job's relative paths start from, and working directory of the agents.
        environment: the caller's environment, which the agents inherit and which holds the
            values of the job's secrets.
        devices: GPUs that may be used, divided among the nodes; None leaves the choice to each
            agent.
        python: what runs them.
    """
    problems: list[str] = []
    location = CheckpointLocation.of_run(folder.run)
    shared = ["--checkpoints", location.text]
    shared += [*_code(job, base, problems), *_data(job, base, problems)]
    for source in list_fetches(job):
        shared += ["--init", str(folder_of(source) / "files")] if source.is_weights else []
    count = job.spec.nodes.max + job.spec.nodes.standby
    # without which an agent does not start, where the machine seems to have as many
    if (wanted := job.spec.resources.gpu) and len(devices or ()) // count >= wanted:
        shared += ["--gpus", str(wanted)]
    variables = {**environment, **_variables(job, environment, problems), "PYTHONUNBUFFERED": "1"}
    variables = {COMMIT: find_commit(base), **variables, **location.variables}
    if problems:
        raise UsageError("; ".join(problems))
    commands = []
    for index in range(count):
        node = f"node-{index}"
        scratch = str(folder.node(node))
        argv = [python, "-m", "kdist_trainer", "--config", str(folder.root / "train.json")]
        argv += ["--run-id", folder.run_id, "--node", node, "--scratch", scratch]
        argv += ["--rendezvous", f"file:{folder.store}", "--port", "0"]
        argv += ["--parent-pipe", str(folder.parent_pipe), *shared]
        mine = variables | {SCRATCH: scratch, LOG_FILE: str(folder.log(node))}
        if devices is not None and count > 1:
            # its own GPUs, because NCCL rejects two ranks on one; none where they are too few
            each = len(devices) // count
            mine["CUDA_VISIBLE_DEVICES"] = ",".join(devices[index * each : (index + 1) * each])
        commands.append(AgentCommand(node, argv, mine, base, folder.log(node)))
    return commands


def checkpoint_folder(job: TrainingJob, base: Path) -> Path | None:
    """The job's checkpoint folder on this machine; None if the job names none."""
    checkpoints = job.spec.checkpoints
    return resolve_path(base, checkpoints.path) if checkpoints and checkpoints.path else None


def script_of(job: TrainingJob, base: Path) -> str | None:
    """The job's script as an absolute path, or `-m MODULE`; None for a managed training."""
    script = job.spec.script
    if script is None or script.path is None:
        return None if script is None else f"-m {script.module}"
    code = job.spec.code
    folder = base if code is None or code.path is None else resolve_path(base, code.path)
    return str(resolve_path(folder, script.path))


def list_devices(environment: Mapping[str, str]) -> list[str]:
    """The usable GPUs of this machine, as in CUDA_VISIBLE_DEVICES."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        named = (device.strip() for device in chosen.split(","))
        return list(takewhile(lambda device: device not in ("", "-1"), named))
    numbers = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return sorted((number for number in numbers if number.isdigit()), key=int)


def _code(job: TrainingJob, base: Path, problems: list[str]) -> list[str]:
    if job.spec.code is None:
        return []
    if job.spec.code.url is not None:
        (source,) = (each for each in list_fetches(job) if each.mount == CODE_MOUNT)
        return ["--code", str(folder_of(source) / "files")]
    if job.spec.code.path is None:
        claim, config_map = job.spec.code.claim, job.spec.code.config_map
        where = f"claim {claim}" if claim else f"ConfigMap {config_map}"
        problems.append(f"spec.code: {where} is on a cluster")
        return []
    code = resolve_path(base, job.spec.code.path)
    if not code.is_dir():
        problems.append(missing_folder(code).message)
    return ["--code", str(code)]


def _data(job: TrainingJob, base: Path, problems: list[str]) -> list[str]:
    arguments = []
    sources = {source.mount: source for source in list_fetches(job)}
    for index, data in enumerate(job.spec.data):
        if data.mount_path in sources:
            folder = folder_of(sources[data.mount_path]) / "files"
            arguments += ["--data", f"{data.mount_path}={folder}"]
            continue
        if data.path is None:
            problems.append(
                f"spec.data[{index}] is in the claim {data.claim} of a cluster; add the "
                "path of the same data on this machine"
            )
            continue
        path = resolve_path(base, data.path)
        if not path.exists():
            problems.append(f"spec.data[{index}].path: {path} does not exist")
        arguments += ["--data", f"{data.mount_path}={path}"]
    return arguments


def _variables(
    job: TrainingJob, environment: Mapping[str, str], problems: list[str]
) -> dict[str, str]:
    found = {}
    for variable in job.spec.env:
        if variable.secret is None:
            found[variable.name] = variable.value or ""
        elif variable.name not in environment:
            where = f"key {variable.secret.key} of the Secret {variable.secret.name}"
            problems.append(
                f"{variable.name} is a secret ({where} on a cluster): set it in the "
                "environment of kdist run"
            )
    return found


# the drivers of ROCm and of WSL, whose GPUs have no files that `list_devices` knows
_OTHER_DRIVERS = (Path("/dev/kfd"), Path("/dev/dxg"))


def describe_missing_gpus(job: TrainingJob, environment: Mapping[str, str]) -> str:
    """What a job does here that requests more GPUs than this machine has, and what to change; empty
    if there are enough, or as many as torch will find. The caller's environment may limit the GPUs
    to use. Raises `UsageError` if the ranks that start here cannot hold a copy of the model.
    """
    spec = job.spec
    wanted, nodes = spec.resources.gpu, spec.nodes.max
    devices = list_devices(environment)
    available = len(devices) // nodes
    if available >= wanted or (not devices and any(each.exists() for each in _OTHER_DRIVERS)):
        return ""
    ranks = (available or 1) if spec.procs_per_node == "auto" else spec.procs_per_node
    used = available if ranks <= available else 0  # NCCL takes one rank per GPU
    place = "on GPUs" if used else "on the CPU"
    what = (
        f"the job requests {count(wanted, 'GPU')} for each node, and this machine has "
        f"{len(devices) or 'none'}: {count(nodes, 'node')} with {count(ranks, 'rank')} {place}"
    )
    as_on_cluster = f"--procs-per-node {wanted} starts as many ranks as on a cluster"
    ways = spec.train.model_parallel if spec.train is not None else None
    if ways is not None and ranks * nodes % ways:
        raise UsageError(
            f"{what}, but {ways} ranks share a copy of the model (spec.train.modelParallel)",
            hint=as_on_cluster,
        )
    if spec.procs_per_node == "auto" and wanted > 1:
        return f"{what}; {as_on_cluster}"
    return f"{what}; --set spec.resources.gpu={used} accepts that"


LOG = "run.log"
"""Name of the output of a detached run in its run folder."""
_DETACHED = "KDIST_DETACHED"


@dataclass(frozen=True)
class Launched:
    """Result of starting a detached run.

    Attributes:
        begun: whether its agents serve, so that the run goes on by itself.
        code: the exit code of a run that ended before; 0 if it has begun.
        output: what a run that ended before has printed.
        log: file that receives the output; None if the run ended before.
        pid: process of the run, likewise.
        error: why it could not start, if it has said so.
    """

    begun: bool
    code: int
    output: str = ""
    log: Path | None = None
    pid: int | None = None
    error: KdistError | None = None


def launch_detached(argv: Sequence[str], cwd: Path) -> Launched:
    """Start `kdist ARGV` in the background and wait until it has begun or has ended. Raises
    `KdistError` if the process cannot be started.

    Ctrl-C while it waits stops the run as SIGTERM does.

    Args:
        argv: the arguments after `kdist`, without `--detach`.
        cwd: working directory of the run, from which its relative paths start.
    """
    environment = dict(os.environ)
    home = run_dir.home() if os.environ.get(run_dir.HOME_VARIABLE) else cwd.absolute() / ".kdist"
    if os.environ.get(run_dir.HOME_VARIABLE):
        environment[run_dir.HOME_VARIABLE] = str(home)
    reader, writer = os.pipe()
    log = home / f".run-{secrets.token_hex(4)}.log"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with run_dir.open_private(log, "x+b") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "kdist", *argv],
                cwd=cwd,
                env={**environment, _DETACHED: f"{writer}:{log}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=[writer],
            )
            os.close(writer)
            writer = -1
            return _await_begin(process, reader, output.fileno())
    except OSError as error:
        place = error.filename or home
        raise KdistError(
            f"the run cannot be started in the background: {place}: {error.strerror}"
        ) from error
    finally:
        for end in (reader, writer):
            if end >= 0:
                os.close(end)
        with suppress(OSError):
            log.unlink()  # unless it is the run's log now


def _await_begin(process: subprocess.Popen[bytes], reader: int, output: int) -> Launched:
    try:
        with os.fdopen(os.dup(reader), "rb") as stream:
            report = documents.parse(stream.readline())  # the process may end without one
    except KeyboardInterrupt:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    if "job" in report:
        process.returncode = 0  # it goes on; this process does not wait for it
        return Launched(True, 0, log=Path(str(report["log"])), pid=process.pid)
    code = process.wait()
    size = os.fstat(output).st_size
    text = os.pread(output, size, 0).decode(errors="replace")
    error = None
    if "error" in report:
        error = KdistError(**{**report["error"], "code": Code(report["error"]["code"])})
    return Launched(False, 128 - code if code < 0 else code, output=text, error=error)


class LauncherLink:
    """The started process's end of the pipe to the one that has started it."""

    def __init__(self, descriptor: int, log: Path) -> None:
        self._descriptor: int | None = descriptor
        self._log = log
        os.set_inheritable(descriptor, False)

    @classmethod
    def take(cls) -> LauncherLink | None:
        """The link of a detached run, removed from the environment, which the agents inherit;
        None in any other run.
        """
        text = os.environ.pop(_DETACHED, "")
        number, _, log = text.partition(":")
        return cls(int(number), Path(log)) if number.isdecimal() and log else None

    def move_log(self, root: Path) -> None:
        """Make the output so far, and all that follows, `run.log` of the run folder."""
        with suppress(OSError):
            self._log = self._log.replace(root / LOG)

    def report_begun(self, job: str) -> None:
        """Tell the launcher that the run has begun. Idempotent."""
        if self._descriptor is not None:
            with suppress(OSError):  # the launcher has been interrupted
                report = {"job": job, "log": str(self._log)}
                os.write(self._descriptor, encode_json(report).encode() + b"\n")
            self.close()

    def report_error(self, error: KdistError) -> None:
        """Tell the launcher why the run could not begin, unless it has begun."""
        if self._descriptor is not None:
            names = ("message", "hint", "next_command", "change", "code")
            report = {"error": {name: getattr(error, name) for name in names}}
            with suppress(OSError):
                os.write(self._descriptor, encode_json(report).encode() + b"\n")
            self.close()

    def close(self) -> None:
        """Close the pipe. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

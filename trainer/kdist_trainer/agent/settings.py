"""The settings of one agent: its command line with the rendezvous endpoint, the limits on the
number of nodes, and the environment of its workers. Free of torch.

`kdist scale` changes nodes.json, which lies in the same folder as train.json, while agents run.

`identify_code` is the digest of what a training computes by, so that two starts with the same
digest run the same code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

import kdist_trainer
from kdist_trainer import log
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import METRICS_PORT, NODES, Nodes, TrainConfig
from kdist_trainer.errors import ConfigError
from kdist_trainer.formats import COMMIT, SCRATCH
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.ipc.failure import MACHINE
from kdist_trainer.metrics.transport import find_short_folder

FILE, KUBERNETES, C10D = "file", "kubernetes", "c10d"
ENDPOINTS = (
    "file:/path/of/a/shared/folder, kubernetes:NAMESPACE/NAME of a ConfigMap, or "
    "c10d:HOST:PORT of the agent that hosts it"
)


@dataclass(frozen=True)
class RendezvousEndpoint:
    """A scheme, and by scheme the location of the store: `(folder, "")`, `(namespace, name)` or
    `(host, port)`.
    """

    scheme: str
    location: tuple[str, str]


def parse_endpoint(text: str) -> RendezvousEndpoint:
    """Parse `SCHEME:LOCATION`. Raises `ConfigError`."""
    scheme, _, rest = text.partition(":")
    if scheme == FILE and rest:
        return RendezvousEndpoint(scheme, (rest, ""))
    if scheme == KUBERNETES:
        namespace, _, name = rest.partition("/")
        if namespace and name and "/" not in name:
            return RendezvousEndpoint(scheme, (namespace, name))
    if scheme == C10D:
        host, _, port = rest.rpartition(":")
        if host and port.isascii() and port.isdigit() and 0 < int(port) < 65536:
            return RendezvousEndpoint(scheme, (host.removeprefix("[").removesuffix("]"), port))
    raise ConfigError(f"{text!r} is no rendezvous endpoint: {ENDPOINTS}")


class NodeLimits:
    """The limits on the number of nodes in the train.json at `path`, read again when the file has
    changed. The previous limits stay while it cannot be read.
    """

    def __init__(self, path: Path, first: Nodes) -> None:
        self._path = path
        self._file = path.with_name(NODES) if path.with_name(NODES).exists() else path
        self._last = first
        self._last_stat = _stat(self._file)

    def current(self) -> Nodes:
        """The current limits in the file."""
        stat = _stat(self._file)
        if stat is None or stat == self._last_stat:
            return self._last
        self._last_stat = stat
        try:
            nodes = TrainConfig.read(self._path).nodes
        except (OSError, ValueError) as error:
            log.warn(
                "config-unreadable", message=f"{self._file} has changed and cannot be read: {error}"
            )
            return self._last
        if nodes != self._last:
            log.event("node-limits-changed", min=nodes.min, max=nodes.max)
            self._last = nodes
        return nodes


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


WORKER = "kdist_trainer.worker:main"
GPUS = "KDIST_GPUS"
"""The variable that tells ranks how many GPUs the job asks for on their node."""
PIDS = "agents"
"""File in the scratch folder with the pids of this node's agents since one of them last joined the
rendezvous.
"""
KEPT = "train.json"
"""File in the scratch folder with the job as this node's agent has read it: ranks read this one,
and a restarted agent, if the other one is gone.
"""
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - its room is looked at, nothing is written
EXIT, KEEP_ALIVE = ON_FINISH = ("exit", "keep-alive")
"""What an agent does after the run: exit, or stay alive until SIGTERM, since a StatefulSet would
restart it.
"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one agent.

    Attributes:
        config_path: The path of train.json.
        config: Its content.
        run_id: The id of the run.
        node: The name of this node.
        scratch: The private folder of this agent.
        rendezvous: The rendezvous endpoint as `SCHEME:LOCATION`.
        checkpoints: The folder of the checkpoints and the run ledger, on disk or in an object
            store.
        code: The folder of the user's modules.
        data: The folders of the data sets, by mount.
        gpus: The GPUs that the job asks for on this node; 0 asks for none.
        init: The folder with the weights that were fetched from `train.init.url`.
        port: The port of metrics and status; 0 picks a free one.
        address: The address at which this node's ranks listen; None means the host's name.
        listen: All addresses of this node, separated by commas, at which metrics are served too;
            None means `address`.
        termination_message: The file that gets the exit record for Kubernetes.
        on_finish: One of `ON_FINISH`.
        take_over: Whether to take over checkpoints that another run has locked.
        rendezvous_id: Separates agents of one run that must not rendezvous.
        parent_pipe: The parent-death pipe of the process that started the agent.
        entrypoint: The `module:function` that each worker of a managed training runs; it returns
            the outcome.
    """

    config_path: Path
    config: TrainConfig
    run_id: str
    node: str
    scratch: Path
    rendezvous: str
    checkpoints: StoragePath | None = None
    code: Path | None = None
    data: dict[str, str] = field(default_factory=dict)
    gpus: int = 0
    init: Path | None = None
    port: int = METRICS_PORT
    address: str | None = None
    listen: str | None = None
    termination_message: Path | None = None
    on_finish: str = EXIT
    take_over: bool = False
    rendezvous_id: str = ""
    parent_pipe: Path | None = None
    entrypoint: str = WORKER

    @cached_property
    def node_limits(self) -> NodeLimits:
        """The limits on the number of nodes, read when needed."""
        return NodeLimits(self.config_path, self.config.nodes)

    @cached_property
    def endpoint(self) -> RendezvousEndpoint:
        """The rendezvous endpoint. Raises `ConfigError`."""
        return parse_endpoint(self.rendezvous)

    def require_gpus(self) -> None:
        """Raise `DeviceFaultError` if GPUs that the job asks for are missing on this node."""
        from kdist_trainer.distributed import devices  # which imports torch

        is_local = self.rendezvous.startswith(f"{FILE}:")
        devices.require_gpus(self.gpus, node=self.node, is_only_machine=is_local)

    @property
    def machine(self) -> str:
        """The machine of this node; empty in a pod that is not told its own."""
        is_pod = "KUBERNETES_SERVICE_HOST" in os.environ
        return os.environ.get(MACHINE) or ("" if is_pod else socket.gethostname())

    @property
    def rendezvous_run_id(self) -> str:
        """The id under which agents rendezvous: the run id, and a hash of the rendezvous id if
        there is one. torch names a folder after it, so it contains no slash.
        """
        run = self.run_id.replace("/", "-")
        if not self.rendezvous_id:
            return run
        return f"{run}-{hashlib.sha256(self.rendezvous_id.encode()).hexdigest()[:10]}"

    @property
    def socket(self) -> Path:
        """The socket to which workers send their records."""
        return self.scratch / "metrics.sock"

    @property
    def own_pipe(self) -> Path:
        """The parent-death pipe of this agent, which its workers watch."""
        return self.scratch / "parent-pipe"

    @property
    def written_folders(self) -> tuple[tuple[str, object], ...]:
        """The folders that the training writes to, each with its use."""
        own = ("checkpoints", self.checkpoints), ("scratch", self.scratch)
        return (*own, ("shared memory", SHARED_MEMORY))

    @property
    def index(self) -> int:
        """The number at the end of the node's name, 0 without one."""
        number = re.search(r"\d+$", self.node)
        return int(number[0]) if number else 0

    def forget_predecessors(self) -> None:
        """Keep only this agent's pid: the rendezvous no longer lists earlier ones."""
        with suppress(OSError):  # a full disk
            (self.scratch / PIDS).write_text(f"{os.getpid()}\n")

    def environment(self) -> dict[str, str]:
        """The variables that kdist adds to torchrun's in the environment of every worker."""
        kept = self.scratch / KEPT
        variables = {
            "KDIST_CONFIG": str(kept if kept.exists() else self.config_path),
            "KDIST_JOB": self.config.name,
            "KDIST_RUN_ID": self.run_id,
            "KDIST_NODE": self.node,
            MACHINE: self.machine,
            SCRATCH: str(self.scratch),
            "KDIST_METRICS_SOCKET": str(self.socket),
            "KDIST_PARENT_PIPE": str(self.own_pipe),
            "KDIST_DATA": encode_json(self.data),
            "KDIST_ENTRYPOINT": self.entrypoint,
        }
        if self.take_over:
            variables["KDIST_TAKE_OVER"] = "1"
        if self.checkpoints is not None:
            variables["KDIST_CHECKPOINTS"] = str(self.checkpoints)
        if self.code is not None:
            variables["KDIST_CODE"] = str(self.code)
        if self.gpus:
            variables[GPUS] = str(self.gpus)
        if self.init is not None:
            variables["KDIST_INIT"] = str(self.init)
        return variables


def name_interfaces(settings: Settings) -> dict[str, str]:
    """The variables that have gloo and NCCL listen on the loopback alone, where all ranks are on
    this machine; elsewhere none: gloo takes the host name's address, which is the pod's own.
    """
    address = settings.address
    is_local = settings.rendezvous.startswith(f"{FILE}:") if address is None else False
    if not is_local and address not in ("127.0.0.1", "::1"):
        return {}
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {} if loopback is None else dict.fromkeys(variables, loopback)


def count_procs(config: TrainConfig) -> int:
    """The number of workers on this node: `procsPerNode`, else one per GPU, else one; the strategy
    `data_parallel` uses one for all GPUs.
    """
    if isinstance(config.procs_per_node, int):
        return config.procs_per_node
    if config.train is not None and config.train.strategy == "data_parallel":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def limit_threads(config: TrainConfig) -> None:
    """Set OMP_NUM_THREADS for this process and the ranks, unless the user has set it; torch reads
    it on import.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads_per_rank))


def prepare_scratch(settings: Settings) -> set[int]:
    """Make the scratch folder private and remove the files of earlier agents. Returns the pids of
    those that the rendezvous may still list: the last one that joined it, and all that exited
    before they joined. Raises `OSError` if the folder cannot be written.
    """
    scratch = settings.scratch
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    if scratch.stat().st_uid == os.geteuid():  # in a pod the volume is root's, and only this pod's
        scratch.chmod(0o700)
    pids: set[int] = set()
    with suppress(OSError, ValueError):
        pids.update(map(int, (scratch / PIDS).read_text().split()))
    with suppress(OSError), (scratch / PIDS).open("a") as file:  # a full disk
        file.write(f"{os.getpid()}\n")
    for name in ("agent.json", "exit.json", "metrics.sock"):
        (scratch / name).unlink(missing_ok=True)
    # keep the job as it was read, so that nothing that happens to its file later ends the run
    fresh = settings.scratch / f"{KEPT}.new"
    try:
        fresh.write_text(settings.config.to_json())
        fresh.replace(settings.scratch / KEPT)
    except OSError:  # a full disk: what an earlier agent has kept may be of another job
        for stale in (fresh, settings.scratch / KEPT):
            stale.unlink(missing_ok=True)
    return pids - {os.getpid()}


def read_config(path: Path, scratch: Path) -> TrainConfig:
    """Read the job; if its file is gone, what an agent of this node has kept of it.

    Raises:
        OSError: If neither is there, or it cannot be read.
        ValueError: If it is not valid.
    """
    try:
        return TrainConfig.read(path)
    except FileNotFoundError as error:
        try:
            config = TrainConfig.read(scratch / KEPT)
        except (OSError, ValueError):
            gone = f"it was removed, as was what this agent had kept of it in {scratch}"
            raise FileNotFoundError(error.errno, gone, str(path)) from None
        log.warn("config-kept", message=f"{path} was removed: the agent goes on with what it kept")
        return config


_LONGEST_SOCKET = 100  # bytes in the address of a Unix socket: 108 on Linux, 104 on macOS
# of the folder and the socket that multiprocessing makes below its temporary folder
_NAMES_LENGTH = 40
_PREFIX_LENGTH = len("/kdist-12345678")


def make_tempdir(scratch: Path) -> Path:
    """Make an empty temporary folder for this agent and its workers: in `scratch`, unless socket
    paths there would be too long. Raises `NoShortFolderError` if they would be so everywhere.
    """
    folder = scratch / "tmp"
    if len(os.fsencode(folder)) + _NAMES_LENGTH <= _LONGEST_SOCKET:
        folder.mkdir()
        return folder
    base = find_short_folder(_PREFIX_LENGTH + _NAMES_LENGTH)
    folder.symlink_to(tempfile.mkdtemp(prefix="kdist-", dir=base))
    return folder.readlink()


def clean_temp(scratch: Path) -> None:
    """Remove an agent's temporary folders: before it exits, and an earlier agent's at its start."""
    folder = scratch / "tmp"
    for stale in (folder.readlink() if folder.is_symlink() else folder, scratch / "torchelastic"):
        shutil.rmtree(stale, ignore_errors=True)
    if folder.is_symlink():
        folder.unlink()


_MOST_FILES: Final = 2000
_MOST_NAMES: Final = 100_000
"""Names after which no further folder is looked into: there may be data below the code."""
_MOST_BYTES: Final = 1 << 20


def identify_code(config: TrainConfig, code: Path | None) -> str:
    """The digest of a job and its code. Files that cannot be read count by their names."""
    import torch

    parts = {"job": config.to_job(), "kdist": kdist_trainer.__version__, "torch": torch.__version__}
    digest = hashlib.sha256(encode_json(parts, sort_keys=True).encode())
    workload = config.train.workload if config.train is not None else ""
    for root in ([] if code is None else [code]) + _find_package(workload):
        for path in _list_files(root):
            digest.update(os.fsencode(path.relative_to(root)) + b"\0")
            with suppress(OSError), path.open("rb") as file:
                digest.update(file.read(_MOST_BYTES))
    return digest.hexdigest()[:16]


def digest_packages() -> str:
    """A digest of the names and versions of all installed packages."""
    found = {each.stem for folder in {*sys.path} for each in Path(folder).glob("*.dist-info")}
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()[:16]


def describe_environment() -> dict[str, str]:
    """The versions of what this node computes with, a digest of the names and versions of all
    installed packages, and the git commit of the job if it is known.
    """
    import torch

    commit = os.environ.get(COMMIT, "")
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "kdist": kdist_trainer.__version__,
        "packages": digest_packages(),
        **({"commit": commit} if re.fullmatch(r"[0-9a-f]{7,64}(-dirty)?", commit) else {}),
    }


def _find_package(workload: str) -> list[Path]:
    """The folders of the package of a workload `module:Class`, which is not imported."""
    module, separator, _ = workload.partition(":")
    if not separator:
        return []  # it is kdist's own
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return []
    return [Path(each) for each in spec.submodule_search_locations or ()]


def _list_files(root: Path) -> Iterator[Path]:
    """The Python files below a folder in a fixed order, without those that are hidden."""
    left, names_left = _MOST_FILES, _MOST_NAMES
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(one for one in folders if not one.startswith((".", "__pycache__")))
        names_left -= len(names)
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(".py") and left and path.is_file():
                left -= 1
                yield path
        if not left or names_left < 0:
            return

"""A sentence and advice for each kind of failure, where no row of the table applies, and the values
that are filled into the advice of a row: paths with their free space, the peak of memory, missing
packages. The command line reads `GENERAL` too: a record may come from an agent that had no row for
its failure.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final, NamedTuple

from kdist_trainer.config.exit_codes import Cause

LOWER_GPU_MEMORY: Final = (
    "lower the batch of one pass (train.microBatch; the batch of a step stays the same), use bf16 "
    "or gradient checkpointing, or shard the state (train.strategy: fsdp)"
)


class Words(NamedTuple):
    """A sentence with the fields `{where}`, `{message}` and `{collective}`, and what to do."""

    sentence: str
    advice: str


GENERAL: Final[dict[Cause, Words]] = {
    Cause.USER_CODE: Words(
        "{where} raised {message}",
        "fix the code, then apply and restart",
    ),
    Cause.CONFIG: Words(
        "the job cannot be trained: {message}",
        "change job.yaml, then apply and restart",
    ),
    Cause.PREFLIGHT: Words(
        "the network between the ranks is slower than the job requires: {message}",
        "give it other nodes (nodeSelector, tolerations), or lower "
        "spec.preflight.allReduce.minBusBandwidth; "
        "`kdist bench all_reduce -f JOB.yaml` measures by itself",
    ),
    Cause.DATA: Words(
        "the data cannot be used: {message}",
        "fix the data or spec.data, then apply and restart",
    ),
    Cause.MISMATCH: Words(
        "the checkpoint or the data does not fit this job: {message}",
        "go back to the model, options and data that the checkpoint was made with, give the job "
        "another checkpoint folder, or start again with --fresh",
    ),
    Cause.NAN: Words(
        "the loss is not finite: {message}",
        (
            "lower the learning rate, use bf16 or fp32, check the data; train.onNonfinite: "
            "skip drops such steps"
        ),
    ),
    Cause.OOM_DEVICE: Words(
        "{where} ran out of the GPU's memory: {message}",
        LOWER_GPU_MEMORY,
    ),
    Cause.BUDGET: Words(
        "the job failed too often without progress: {message}",
        "fix the last failure, or raise spec.maxRestarts",
    ),
    Cause.DEADLINE: Words(
        "the job has used up its time: {message}",
        "raise spec.activeDeadlineSeconds, then apply and restart: it goes on from its checkpoint",
    ),
    Cause.HANG: Words(
        "{where} hung{collective}: {message}",
        "see the stacks in its log; spec.hangTimeoutSeconds is the limit",
    ),
    Cause.COLLECTIVE_TIMEOUT: Words(
        "{where} waited too long for its peers{collective}: {message}",
        "find the rank that is behind; spec.collectiveTimeoutSeconds is the limit",
    ),
    Cause.COLLECTIVE_MISMATCH: Words(
        "{where} diverged from its peers: {message}",
        (
            "fix the code: all ranks must enter the same collectives, in the same order, "
            "with equal sizes"
        ),
    ),
    Cause.DEVICE: Words(
        "a GPU fails or is missing: {message}",
        "see `nvidia-smi` on that node, and keep the job off it (`kubectl cordon`)",
    ),
    Cause.STORAGE: Words(
        "the checkpoint storage failed: {message}",
        "free space, or repair the volume; committed checkpoints are safe",
    ),
    Cause.RENDEZVOUS: Words(
        "the rendezvous failed: {message}",
        "check whether pods reach each other and the API server: `kdist doctor`",
    ),
    Cause.NODE_LOST: Words(
        "{where} lost its peers: {message}",
        "find the pod that was lost first: `kdist events`",
    ),
    Cause.SIGNAL: Words(
        "{where} was killed: {message}",
        "something outside the training ended it: `kdist events`",
    ),
    Cause.NODE: Words(
        "{where} runs on a node that cannot train: {message}",
        "an administrator must look at the node; keep the job off it until then",
    ),
    Cause.LOADER: Words(
        "a process of {where}'s data loader died: {message}",
        "see its log; lower train.loader.workers, or raise spec.resources.memory",
    ),
    Cause.EARLY_EXIT: Words(
        "{where} left while the others waited for it: {message}",
        "all ranks must enter the same collectives before they leave",
    ),
    Cause.RETRY: Words(
        "{where} asked to be tried again: {message}",
        "see its log",
    ),
    Cause.NETWORK: Words(
        "a server does not answer {where}: {message}",
        "check the network between the pods and that server",
    ),
    Cause.PREEMPTED: Words(
        "{where} was asked to end: {message}",
        "start it again, or have spec.maxRestarts do so; a Checkpointer keeps a script's work",
    ),
    Cause.UNKNOWN: Words(
        "{where} failed, and it is not known by what: {message}",
        "see its log",
    ),
}
"""Without `oom_host`, for which the command line has a rule that knows the pods' limits."""
ENDED_BY_ITSELF: Final = "{message}"
"""The sentence for a rank that exited with a code of its own, without an exception."""
PARTED: Final = Words(
    "the ranks no longer held the same model: {message}",
    "keep what a step changes in a state, or set train.recovery: restart",
)
"""For ranks that start again because their weights differ."""
SLOW_START: Final = "slow-start"
"""The signature of a run that ended because its nodes were lost whenever it started."""
SLOW: Final = Words(
    "{message}",
    "use nodes that live longer, or make the start shorter: pull the image onto the nodes "
    "beforehand, load less data before the first step, set spec.script.preload: torch for a "
    "script, train.recovery: inPlace and nodes.standby where nodes are lost one by one; "
    "checkpoint.every only limits what a loss costs",
)
HEALTH_CHECK: Final = "health-check"
"""The signature of a node that has failed its health check."""
UNLOADABLE: Final = Words(
    "the state of this training could not be given back: {message}",
    "change what the message names: a checkpoint must be able to give back all that it saves",
)
"""For a state that is refused when it is saved, since it could not be loaded."""


_SHM = "/dev/shm"  # noqa: S108 - the folder is read only
_PACKAGES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Packages whose name differs from that of their module."""


def fill_advice(advice: str, error: BaseException, place: str | None) -> str:
    """The advice with its fields filled in from the error and this process."""
    if "{" not in advice:
        return advice
    fields: defaultdict[str, str] = defaultdict(str)
    path = str(getattr(error, "filename", None) or "")
    folder = _SHM if _SHM in advice else path
    fields.update(
        place=shorten(place) or "your code",
        path=path or "the volume",
        free=_free(folder) if "{free}" in advice and folder else "",
        peak=_peak() if "{peak}" in advice else "",
    )
    if "{python}" in advice:
        fields.update(_installation(str(getattr(error, "name", None) or "the package")))
    return advice.format_map(fields).strip().removesuffix(";")


def shorten(place: str | None) -> str:
    """`File "x.py", line 3, in f` as `x.py:3`, which editors and terminals open."""
    if place is None:
        return ""
    file, _, rest = place.removeprefix('File "').partition('", line ')
    return f"{file}:{rest.partition(',')[0]}"


def _free(path: str) -> str:
    """The free space of the file system that a file is on, or would be."""
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        found = os.statvfs(folder)
    except OSError:
        return ""
    free, whole = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    return f" ({folder} has {free:,} of {whole:,} bytes free)"


def _peak() -> str:
    """The peak memory of this rank's GPU; empty without one."""
    torch = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return ""
        used, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    except Exception:  # noqa: BLE001 - a failed GPU may raise anything
        return ""
    return (
        f"at its peak this rank had {used / 2**30:.2f} GiB in tensors and {reserved / 2**30:.2f} "
        f"GiB in all of {whole / 2**30:.2f} GiB"
    )


def _installation(module: str) -> dict[str, str]:
    """The running Python, the active environment, and the command that installs the package."""
    module = module.partition(".")[0]
    package = _PACKAGES.get(module, module)
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX") or ""
    environment = ""
    if active and Path(active) != Path(sys.prefix):
        environment = f" (the environment that is active is another one, {active})"
    elif active:
        environment = f" (of the active environment {active})"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        install = f"add `RUN {sys.executable} -m pip install {package}` to the image"
    elif _is_of_uv():
        install = f"uv pip install --python {sys.executable} {package}"
    else:
        install = f"{sys.executable} -m pip install {package}"
    return {
        "python": sys.executable,
        "environment": environment,
        "install": install,
        "package": package,
    }


def _is_of_uv() -> bool:
    """Whether uv made the environment, which then has no pip."""
    try:
        return "\nuv = " in f"\n{(Path(sys.prefix) / 'pyvenv.cfg').read_text()}"
    except OSError:
        return False

"""Compares the GPUs that a job requests with those of this machine, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kdist.errors import UsageError
from kdist.job.local.launch import list_devices
from kdist.spec import TrainingJob
from kdist.units import count

# the drivers of ROCm and of WSL, whose GPUs have no files that `list_devices` knows
_OTHER_DRIVERS = (Path("/dev/kfd"), Path("/dev/dxg"))


def describe_missing_gpus(job: TrainingJob, environment: Mapping[str, str]) -> str:
    """What a job does here that requests more GPUs than this machine has, and what to change; empty
    if there are enough, or as many as torch will find.

    Args:
        job: the job.
        environment: the caller's environment, which may limit the GPUs to use.

    Raises:
        UsageError: the ranks that start here cannot hold a copy of the model.
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

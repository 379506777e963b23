"""Profiles a running job: requested from one agent, recorded by the ranks, downloaded when they are
done.

An `AgentTool` runs the trainer's own `python -m kdist_trainer.profiling` next to an agent: in its
pod, or on this machine.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kdist.cluster.polling import wait_until
from kdist.errors import Code, KdistError
from kdist.job.cluster import agents
from kdist.job.cluster.applied import AppliedJob
from kdist.job.cluster.job import ClusterJob
from kdist.job.job import Notify
from kdist.job.local.agents import ports as local_ports
from kdist.job.local.job import LocalJob
from kdist.job.local.run_dir import folder_of, location_of
from kdist.spec.validators import SCRATCH_MOUNT
from kdist.status import Pod, documents
from kdist.units import number
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_object

MODULE = "kdist_trainer.profiling"
AgentTool = Callable[[Sequence[str]], bytes]
"""Arguments of the module -> its standard output. Raises `KdistError`."""

_TOOL_TIMEOUT = 600.0
_TOP_OPERATIONS = 12
_MOST_OPERATIONS, _LONGEST_NAME = 10_000, 1000
_MOST_RANKS = 1 << 20
_COUNTS = ("rank", "first", "last")
_OPERATION = ("calls", "cpuSeconds", "deviceSeconds")


def agents_of(job: LocalJob | ClusterJob) -> list[AgentTool]:
    """The profiling tool of each running agent, in a cluster that of rank 0 first. Raises
    `KdistError` if there are none, or the job cannot be profiled.
    """
    if isinstance(job, LocalJob):
        return _local_agents(job.root)
    return _cluster_agents(job.applied)


def _cluster_agents(target: AppliedJob) -> list[AgentTool]:
    if target.job.spec.train is None:
        raise KdistError(
            f"{target.name} is a script: only the managed loop (spec.train) takes "
            "profiles on request"
        )
    first = agents.choose_pod(target)
    others = [
        pod for pod in target.pods() if pod.running and not pod.deleting and pod.name != first.name
    ]

    place = ["--scratch", SCRATCH_MOUNT]
    place += [] if target.uses_bucket else ["--root", target.checkpoints]

    def run(pod: Pod, arguments: Sequence[str]) -> bytes:
        command = ["python", "-m", MODULE, *arguments, *place]
        code, output = target.cluster.run(
            pod.name, command, container=pod.container, timeout=_TOOL_TIMEOUT
        )
        if code != 0:
            started = " ".join(command[:4])
            raise KdistError(f"pod {pod.name}: `{started}` ended with exit code {code}")
        return output

    return [partial(run, pod) for pod in (first, *others)]


def _local_agents(root: Path) -> list[AgentTool]:
    nodes = [root / node for node in local_ports(root)]
    if not nodes:
        raise KdistError(f"no agent of {root.name} answers yet", hint="try again in a second")
    place = [] if location_of(root).is_bucket else ["--root", str(folder_of(root))]

    def run(scratch: Path, arguments: Sequence[str]) -> bytes:
        command = [sys.executable, "-m", MODULE, *arguments, "--scratch", str(scratch), *place]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode != 0:
            printed = done.stderr.decode(errors="replace").strip().splitlines()
            last = printed[-1] if printed else f"exit code {done.returncode}"
            raise KdistError(f"the profile of {scratch.parent}: {last}")
        return done.stdout

    return [partial(run, node) for node in nodes]


def record(
    tools: Sequence[AgentTool],
    folder: Path,
    *,
    steps: int,
    ranks: str,
    timeout: float,
    notify: Notify,
) -> list[Mapping[str, Any]]:
    """Request a profile, wait until all selected ranks have recorded it, and write their traces to
    a folder, one file per rank. The first tool takes the request; `timeout` seconds count for the
    start of the recording, and again for its end.

    Returns the summary of each rank. Raises `KdistError` if ranks do not start or end in time
    (TIMEOUT), or do not exist (NOT_FOUND).
    """
    name = str(_read(tools[0](["ask", "--steps", str(steps), "--ranks", ranks])).get("name"))
    arguments = ["look", "--name", name]
    plan = wait_until(
        lambda: _read(tools[0](arguments)).get("plan") or None,
        timeout=timeout,
        what="the ranks to start recording",
        notify=notify,
        hint="ranks check for requests every train.syncEverySteps steps; is the job training?",
    )
    found = documents.at(plan, "ranks")
    if not isinstance(found, list) or not all(
        type(rank) is int and 0 <= rank < _MOST_RANKS for rank in found
    ):
        raise _unreadable()
    wanted = [str(rank) for rank in found[:_MOST_RANKS]]  # they become names of files
    if not wanted:
        raise KdistError(f"the job has none of the ranks {ranks}", code=Code.NOT_FOUND)
    first, last = (documents.integer(plan, name) for name in ("first", "last"))
    notify(f"{len(wanted)} ranks record the steps {first} to {last}")
    holders: dict[str, tuple[AgentTool, Mapping[str, Any]]] = {}

    def gather() -> bool | None:
        for tool in tools:
            found = documents.mapping(_read(tool(arguments)), "ranks")
            for rank in wanted:
                if rank in found:
                    holders.setdefault(rank, (tool, found[rank]))
            if len(holders) == len(wanted):
                return True
        return None

    wait_until(gather, timeout=timeout, what="all ranks to finish recording", notify=notify)
    folder.mkdir(parents=True, exist_ok=True)
    for rank, (tool, _) in holders.items():
        (folder / f"rank-{rank}.trace.json.gz").write_bytes(
            tool(["send", "--name", name, "--rank", rank])
        )
    return [_read_summary(holders[rank][1]) for rank in wanted]


def rank_rows(summaries: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row per rank: steps, time per step, and the share of time with a collective in progress."""
    rows: list[tuple[str, ...]] = []
    for one in summaries:
        steps, seconds = one["last"] - one["first"] + 1, float(one["seconds"])
        share = float(one["communicationSeconds"]) / seconds if seconds else 0.0
        rows.append(
            (
                str(one["rank"]),
                f"{one['first']}-{one['last']}",
                f"{seconds / max(1, steps) * 1e3:.2f} ms",
                f"{share:.0%}",
            )
        )
    return rows


def operation_rows(summaries: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The operations with the most self time, summed over all ranks."""
    sums: dict[str, list[float]] = {}
    for one in summaries:
        for each in one.get("operations", ()):
            found = sums.setdefault(str(each["name"]), [0, 0.0, 0.0])
            for index, key in enumerate(("calls", "cpuSeconds", "deviceSeconds")):
                found[index] += each[key]
    largest = sorted(sums.items(), key=lambda item: -(item[1][2] or item[1][1]))[:_TOP_OPERATIONS]
    total = sum(float(one["seconds"]) for one in summaries) or 1.0
    return [
        (
            name,
            number(int(calls)),
            f"{cpu * 1e3:.1f} ms",
            f"{device * 1e3:.1f} ms" if device else "-",
            f"{(device or cpu) / total:.0%}",
        )
        for name, (calls, cpu, device) in largest
    ]


def _read_summary(found: object) -> dict[str, Any]:
    """What a rank says of its profile. Raises `KdistError` if it is none."""
    numbers = {
        name: documents.integer(found, name) if name in _COUNTS else documents.number(found, name)
        for name in (*_COUNTS, "seconds", "communicationSeconds")
    }
    if not all(value is not None and math.isfinite(value) for value in numbers.values()):
        raise _unreadable()
    operations = [
        {
            "name": documents.text(each, "name")[:_LONGEST_NAME],
            **{name: documents.number(each, name) or 0.0 for name in _OPERATION},
        }
        for each in documents.items(found, "operations")[:_MOST_OPERATIONS]
    ]
    return {**numbers, "operations": operations}


def _unreadable() -> KdistError:
    return KdistError("the agent's response about the profile cannot be read")


def _read(data: bytes) -> dict[str, Any]:
    try:
        return parse_object(data)
    except MalformedTextError:
        raise _unreadable() from None

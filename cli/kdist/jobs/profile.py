"""A profile of a running training: asked of one agent, recorded by the ranks, fetched when they are
done.

`Ask` runs the trainer's own `python -m kdist_trainer.profiling` beside an agent: in its pod, or on
this machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdist.errors import Code, KdistError
from kdist.jobs import agents, wait
from kdist.jobs.job import ClusterJob
from kdist.jobs.wait import Tell
from kdist.units import number

MODULE = "kdist_trainer.profiling"
Ask = Callable[[Sequence[str]], bytes]
"""Words for the module -> what it writes to stdout. Raises `KdistError`."""

_SCRATCH = "/run/kdist"
_ANSWER_SECONDS = 600.0
_TOP = 12


def cluster_agents(target: ClusterJob) -> list[Ask]:
    """The agents of a job in the cluster, that of rank 0 first. Raises `KdistError` for a job that
    cannot be asked.
    """
    if target.job.spec.train is None:
        raise KdistError(
            f"{target.name} is a script: only the managed loop (spec.train) takes "
            "profiles on request"
        )
    first = agents.choose_pod(target)
    others = [
        pod for pod in target.pods() if pod.running and not pod.deleting and pod.name != first.name
    ]

    def of(name: str, container: str) -> Ask:
        def ask(words: Sequence[str]) -> bytes:
            command = [
                "python",
                "-m",
                MODULE,
                *words,
                "--scratch",
                _SCRATCH,
                "--root",
                target.checkpoints,
            ]
            code, output = target.cluster.run(
                name, command, container=container, timeout=_ANSWER_SECONDS
            )
            if code != 0:
                raise KdistError(
                    f"pod {name}: `{' '.join(command[:4])}` ended with exit code {code}"
                )
            return output

        return ask

    return [of(pod.name, pod.container) for pod in (first, *others)]


def record(
    asks: Sequence[Ask], folder: Path, *, steps: int, ranks: str, timeout: float, tell: Tell
) -> list[Mapping[str, Any]]:
    """Ask, wait until all ranks that are meant have recorded, and write their traces into `folder`;
    their summaries.

    Raises `KdistError` (TIMEOUT) where no rank begins, or some do not end, within `timeout`
    seconds.
    """
    name = str(_read(asks[0](["ask", "--steps", str(steps), "--ranks", ranks])).get("name"))
    words = ["look", "--name", name]
    plan = wait.wait_until(
        lambda: _read(asks[0](words)).get("plan") or None,
        timeout=timeout,
        what="the ranks to begin with the profile",
        tell=tell,
        hint="they look for requests when they confer (train.syncEverySteps); is it at its steps?",
    )
    wanted = [str(rank) for rank in plan["ranks"]]
    if not wanted:
        raise KdistError(f"the job has none of the ranks {ranks}", code=Code.NOT_FOUND)
    tell(f"{len(wanted)} ranks record the steps {plan['first']} to {plan['last']}")
    holders: dict[str, tuple[Ask, Mapping[str, Any]]] = {}

    def gather() -> bool | None:
        for ask in asks:
            found = _read(ask(words)).get("ranks", {})
            holders.update(
                {
                    rank: (ask, found[rank])
                    for rank in wanted
                    if rank in found and rank not in holders
                }
            )
            if len(holders) == len(wanted):
                return True
        return None

    wait.wait_until(gather, timeout=timeout, what="all of them to have recorded", tell=tell)
    folder.mkdir(parents=True, exist_ok=True)
    for rank, (ask, _) in holders.items():
        (folder / f"rank-{rank}.trace.json.gz").write_bytes(
            ask(["send", "--name", name, "--rank", rank])
        )
    return [holders[rank][1] for rank in wanted]


def rank_rows(summaries: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Of each rank: steps, seconds a step, and the share of the time in which a collective was
    under way.
    """
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
    """The operations that took most time themselves, over all ranks that recorded."""
    sums: dict[str, list[float]] = {}
    for one in summaries:
        for each in one.get("operations", ()):
            found = sums.setdefault(str(each["name"]), [0, 0.0, 0.0])
            for index, key in enumerate(("calls", "cpuSeconds", "deviceSeconds")):
                found[index] += each[key]
    largest = sorted(sums.items(), key=lambda item: -(item[1][2] or item[1][1]))[:_TOP]
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


def _read(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise KdistError("the agent's answer about the profile cannot be read")
    return document

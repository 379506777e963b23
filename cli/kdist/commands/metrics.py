"""`kdist metrics`: what the agents of a job measure, without Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options
from kdist.errors import KdistError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kdist.agent_metrics import AgentSample

_DETAIL = ("_bucket", "_created")
_ONE_OF = ("kdist_job_state",)  # of these series one is 1


@click.command()
@options.job_argument
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="Only the agent that has this rank, and only this rank's series.",
)
@click.option("--grep", default="", metavar="TEXT", help="Only metrics with this in their name.")
@click.option(
    "--local",
    is_flag=True,
    help="The run of `kdist run` on this machine, even where -n or a cluster is set.",
)
@options.cluster_options
@options.output_option("table", "prom", "json")
def command(
    job: str | None,
    file: str | None,
    *,
    rank: int | None,
    grep: str,
    local: bool,
    output: str,
    timeout: float | None,
    **place: Any,
) -> None:
    r"""Show what the agents of a job measure, without Prometheus.

    The table leaves out buckets of histograms and the states that a job is not in; `-o prom` has
    everything, each series with the label `pod`.

    \b
    Examples:
      kdist metrics digits
      kdist metrics digits --rank 0 --grep step
      kdist metrics digits -o prom > metrics.txt
    """
    from kdist import agent_metrics

    now = _read(job, file, local=local, timeout=timeout, **place)
    if rank is not None:
        now = agent_metrics.select(now, rank)
        if not now:
            raise NotFoundError(f"no agent has rank {rank}")
    _show(now, output, rank=rank, grep=grep)


def _read(
    job: str | None,
    file: str | None,
    *,
    local: bool,
    timeout: float | None,
    namespace: str | None,
    context: str | None,
) -> Mapping[str, AgentSample]:
    root = options.find_run(
        job, file, local=local, namespace=namespace, context=context, at_work=True
    )
    if root is not None:
        from kdist.local import agents as local_agents

        if now := local_agents.read(root, metrics=True):
            return now
        raise KdistError(
            f"no agent of {root.name} answers", next_command=f"kdist status {root.name}"
        )
    from kdist.jobs import agents

    target = options.find_target(job, file, namespace=namespace, context=context, timeout=timeout)
    if now := agents.read(target, target.pods(), metrics=True):
        return now
    raise agents.explain_silence(target)


def _show(now: Mapping[str, AgentSample], output: str, *, rank: int | None, grep: str) -> None:
    from kdist import agent_metrics
    from kdist.units import number

    if output == "prom":
        for line in agent_metrics.merge({owner: reading.metrics for owner, reading in now.items()}):
            console.result(line)
        return
    found = [
        (owner, sample)
        for owner, reading in now.items()
        for sample in reading.samples()
        if grep in sample.name
        and (rank is None or sample.labels.get("rank", str(rank)) == str(rank))
    ]
    if output == "json":
        samples = [
            {"pod": owner, **agent_metrics.to_document([sample])[0]} for owner, sample in found
        ]
        console.emit(
            {"apiVersion": "cli.kdist.dev/v1", "kind": "Metrics", "samples": samples}, output="json"
        )
        return
    shown = [
        (owner, sample.name, number(sample.value, 6), _labels(sample.labels))
        for owner, sample in found
        if not sample.name.endswith(_DETAIL) and (sample.value or sample.name not in _ONE_OF)
    ]
    console.table(shown, header=("POD", "METRIC", "VALUE", "LABELS"))


def _labels(labels: Mapping[str, str]) -> str:
    return (
        " ".join(f"{name}={value}" for name, value in labels.items() if name != "kdist_job") or "-"
    )

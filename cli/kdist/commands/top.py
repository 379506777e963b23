"""`kdist top`: the step time of every rank, live, and which ranks are slow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import NotFoundError
from kdist.units import count

if TYPE_CHECKING:
    from kdist.agents.metrics import AgentSample
    from kdist.job.job import Job


@click.command()
@options.job_argument
@click.option("--rank", type=click.IntRange(min=0), help="Show this rank only.")
@click.option(
    "--every",
    type=options.seconds,
    default="2s",
    show_default=True,
    help="Interval between two samples.",
)
@click.option(
    "--once",
    is_flag=True,
    help="Print one sample over the whole life of the agents, even on a terminal.",
)
@options.local_option
@options.cluster_options
@options.output_option("table", "json", "prom")
def command(*, rank: int | None, every: float, once: bool, output: str, **which: Any) -> None:
    r"""Show how each rank spends its time, and which one is slow.

    On a terminal the view is live and covers the time since the previous sample; elsewhere it is
    one table over two samples. A narrow terminal shows fewer columns; `-o json` has them all.

    \b
    Columns, each a mean time per step:
      STEP TIME    the whole step
      BUSY         the rank's own work: DATA + FORWARD + BACKWARD + OPTIMIZER
      DATA         waiting for the next batch
      FORWARD      forward pass
      BACKWARD     backward pass
      COLLECTIVES  a collective (all-reduce, all-gather, …) is under way
      COMM WAIT    the part of COLLECTIVES in which the rank computes nothing
      OPTIMIZER    optimizer step
      CHECKPOINT   training stopped to save a checkpoint

    STATE is what the rank is doing now; the last column marks ranks that are SLOW or silent.

    A slow rank is identified by BUSY: the other ranks wait for it, so its own COMM WAIT is the
    shortest.

    `-o prom` prints the metrics of all agents in Prometheus' text format, every series with the
    label `pod`; with --rank, those of the agent that runs this rank.

    \b
    Examples:
      kdist top digits
      kdist top digits -n ml --every 10s
      kdist top digits --once -o json
      kdist top digits -o prom | grep kdist_loss
    """
    found = targets.find(active=True, **which)
    now = found.samples()
    if not now:
        raise found.explain_silence()
    from kdist.agents import metrics

    selected = metrics.select(now, rank)
    if not selected:
        raise NotFoundError(f"no agent has rank {rank}")
    if output == "prom":
        for line in metrics.merge_samples(selected):
            console.result(line)
        return
    if console.can_draw() and not once and output == "table":
        _live(found, every, rank)
        return
    before = None
    if not once:
        time.sleep(every)
        before, now = now, found.samples() or now
    _show(found.name, now, before, output, rank)


def _show(
    name: str,
    now: Mapping[str, AgentSample],
    before: Mapping[str, AgentSample] | None,
    output: str,
    rank: int | None,
) -> None:
    from kdist.agents import metrics
    from kdist.views import top

    rows = metrics.breakdown_rows(now, before)
    selected = metrics.select_rows(rows, rank)
    if output == "json":
        for sentence in metrics.describe_slow(rows):
            console.warning(sentence)
        console.emit(top.to_document(name, now, selected), output="json")
        return
    shown, hidden = top.choose(selected)
    console.paragraph(top.headline(name, now))
    console.table([top.cells(row) for row in shown], header=top.HEADER)
    if hidden:
        console.message(f"… {count(hidden, 'more rank')}; -o json has all of them")
    for sentence in metrics.describe_slow(rows):
        console.warning(sentence)


def _live(found: Job, every: float, rank: int | None) -> None:
    """Refresh the view every `every` seconds until Ctrl-C."""
    from kdist.agents import metrics
    from kdist.views.live import TopFrame

    before: Mapping[str, AgentSample] | None = None
    try:
        with console.drawing() as drawing:
            while True:
                now = found.samples()
                rows = metrics.breakdown_rows(now, before)
                drawing.update(TopFrame(found.name, now, rows, rank))
                before = now or before
                time.sleep(every)
    except KeyboardInterrupt:
        return

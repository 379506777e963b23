"""`kdist top`: what every rank spends its steps on, live, and who is slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options
from kdist.errors import KdistError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kdist.agent_metrics import AgentSample, RankBreakdown

    Look = Callable[[], Mapping[str, AgentSample]]


@click.command()
@options.job_argument
@click.option(
    "--every",
    type=options.seconds,
    default="2s",
    show_default=True,
    help="Time between two readings.",
)
@click.option(
    "--once",
    is_flag=True,
    help="One reading over the whole life of the agents, also on a terminal.",
)
@click.option(
    "--local",
    is_flag=True,
    help="The run of `kdist run` on this machine, even where -n or a cluster is set.",
)
@options.cluster_options
@options.output_option("table", "json")
def command(
    job: str | None,
    file: str | None,
    *,
    every: float,
    once: bool,
    local: bool,
    output: str,
    timeout: float | None,
    **place: Any,
) -> None:
    r"""Show what every rank spends its steps on, and who is slow.

    On a terminal it is live, over the time since the reading before; elsewhere it is one table,
    over two readings. A slow rank is told by its busy time: the others wait for it, so its own
    all-reduces are the shortest.

    \b
    Examples:
      kdist top digits
      kdist top digits -n ml --every 10s
      kdist top digits --once -o json
    """
    name, look, explain_silence = _source(job, file, local=local, timeout=timeout, **place)
    now = look()
    if not now:
        raise explain_silence()
    if console.can_draw() and not once and output == "table":
        _live(name, look, every)
        return
    before = None
    if not once:
        time.sleep(every)
        before, now = now, look() or now
    _show(name, now, before, output)


def _source(
    job: str | None,
    file: str | None,
    *,
    local: bool,
    timeout: float | None,
    namespace: str | None,
    context: str | None,
) -> tuple[str, Look, Callable[[], KdistError]]:
    """Name of the job, how to read its agents, and why none answers."""
    root = options.find_run(
        job, file, local=local, namespace=namespace, context=context, at_work=True
    )
    if root is not None:
        from kdist.local import agents as local_agents

        silence = KdistError(
            f"no agent of {root.name} answers", next_command=f"kdist status {root.name}"
        )
        return root.name, lambda: local_agents.read(root, metrics=True), lambda: silence
    from kdist.jobs import agents

    target = options.find_target(job, file, namespace=namespace, context=context, timeout=timeout)
    return (
        target.name,
        lambda: agents.read(target, target.pods(), metrics=True),
        lambda: agents.explain_silence(target),
    )


def _show(
    name: str, now: Mapping[str, AgentSample], before: Mapping[str, AgentSample] | None, output: str
) -> None:
    from kdist import agent_metrics
    from kdist.views import top

    rows = agent_metrics.breakdown_rows(now, before)
    if output == "json":
        console.emit(top.to_document(name, now, rows), output="json")
        return
    console.result(top.headline(name, now))
    shown, left = top.choose(rows)
    console.table([top.cells(row) for row in shown], header=top.HEADER)
    if left:
        console.message(f"{left} more ranks; -o json has all of them")
    for sentence in agent_metrics.describe_slow(rows):
        console.warning(sentence)


def _live(name: str, look: Look, every: float) -> None:
    """Draw until Ctrl-C."""
    from kdist import agent_metrics

    before: Mapping[str, AgentSample] | None = None
    try:
        with console.drawing() as drawing:
            while True:
                now = look()
                rows = agent_metrics.breakdown_rows(now, before)
                drawing.update(_draw(name, now, rows), refresh=True)
                before = now or before
                time.sleep(every)
    except KeyboardInterrupt:
        return


def _draw(name: str, now: Mapping[str, AgentSample], rows: list[RankBreakdown]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from kdist import agent_metrics
    from kdist.views import top

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column, title in enumerate(top.HEADER):
        table.add_column(title, justify="left" if column in (1, 2, 13) else "right")
    shown, left = top.choose(rows)
    for row in shown:
        table.add_row(*top.cells(row), style="yellow" if row.slow else "")
    foot = [Text(sentence, style="yellow") for sentence in agent_metrics.describe_slow(rows)]
    if left:
        foot.append(Text(f"{left} more ranks", style="dim"))
    if not now:
        foot.append(Text("no agent answers", style="yellow"))
    return Group(
        Text(top.headline(name, now), style="bold"),
        table,
        *foot,
        Text("Ctrl-C ends this view, not the job", style="dim"),
    )

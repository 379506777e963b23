"""`kdist report`: the goodput receipt of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kdist import console
from kdist.commands import options
from kdist.errors import NotFoundError


@click.command()
@options.job_argument
@click.option(
    "--local",
    is_flag=True,
    help="The run of `kdist run` on this machine, even where -n or a cluster is set.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write it to this file instead of stdout.",
)
@options.cluster_options
@options.output_option("table", "json", "html")
def command(
    job: str | None,
    file: str | None,
    *,
    local: bool,
    out: Path | None,
    output: str,
    timeout: float | None,
    **place: Any,
) -> None:
    r"""Show where the time of a run went: its goodput receipt.

    By attempt and cause, from the ledger beside the checkpoints: queue, image pull, rendezvous,
    start, productive steps, waiting in all-reduces, checkpoints, work that was lost and redone, and
    the time in which nothing ran. It tells of runs that are over too. Queue and image pull are
    known while the pods are there. `-o html` is one page with drawings, for itself.

    \b
    Examples:
      kdist report digits
      kdist report .kdist/digits -o html --out report.html
      kdist report digits -n ml -o json | jq .secondsByCategory
    """
    root = options.find_run(
        job, file, local=local, namespace=place["namespace"], context=place["context"]
    )
    report = _read_local(root) if root else _read_cluster(job, file, timeout=timeout, **place)
    if output == "table":
        _show(report)
        return
    from kdist.report import html

    if out is None and output == "json":
        console.emit(report, output="json")
        return
    import json

    text = html.render_page(report) if output == "html" else json.dumps(report, indent=2) + "\n"
    if out is None:
        console.result(text.rstrip("\n"))
    else:
        out.write_text(text, encoding="utf-8")
        console.message(f"written to {out}")


def _read_local(root: Path) -> dict[str, Any]:
    import time

    from kdist.local import agents, run_dir, summary, trainer_tools
    from kdist.report import goodput, ledger

    run = run_dir.read_json(root / "run.json") or {}
    checkpoints = trainer_tools.checkpoints_of(root)
    events, steps = ledger.read_ledger(checkpoints)
    if not events:
        raise NotFoundError(f"there is no ledger of a run in {checkpoints}")
    lives = [(each["started"], each["ended"]) for each in run.get("invocations", ())] or [
        (events[0].get("time", 0.0), None)
    ]
    if agents.is_at_work(root):
        lives[-1] = (lives[-1][0], time.time())
    births = [goodput.PodStartup(began, began, up) for began, up in summary.starts(root, lives)]
    return _envelope(
        root.name, goodput.build_receipt(events, steps, lives=lives, births=births), str(root)
    )


def _read_cluster(job: str | None, file: str | None, **place: Any) -> dict[str, Any]:
    from kdist.jobs import history
    from kdist.report import goodput

    target = options.find_target(job, file, **place)
    found = history.read(target, tell=console.message)
    if not found.events:
        raise NotFoundError(
            f"{target.name} has written no ledger yet", next_command=target.command("status")
        )
    births = [goodput.PodStartup(*birth) for birth in found.births]
    built = goodput.build_receipt(found.events, found.steps, lives=found.lives, births=births)
    return _envelope(target.name, built, f"{target.namespace}/{target.name}")


def _envelope(name: str, built: dict[str, Any], where: str) -> dict[str, Any]:
    return {
        "apiVersion": "cli.kdist.dev/v1",
        "kind": "GoodputReceipt",
        "job": name,
        "from": where,
        **built,
    }


def _show(report: dict[str, Any]) -> None:
    from kdist.report import text

    console.result(f"{report['job']}: {text.headline(report)}")
    console.result("")
    console.table(text.totals(report), header=("CATEGORY", "TIME", "SHARE"))
    console.result(f"\n{text.GOODPUT}\n")
    console.table(text.attempts(report), header=text.ATTEMPTS)

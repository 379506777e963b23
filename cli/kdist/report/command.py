"""`kdist report`: the goodput report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import NotFoundError
from kdist_trainer.formats import CLI_API_VERSION
from kdist_trainer.formats.json_text import encode_json

if TYPE_CHECKING:
    from kdist.job.cluster.job import ClusterJob
    from kdist.job.find import Found
    from kdist.job.local.job import LocalJob


@click.command()
@options.job_argument
@options.local_option
@options.out_option("Write the report to this file instead of stdout.")
@options.accept_option
@options.cluster_options
@options.output_option("table", "json", "html")
def command(*, out: Path | None, output: str, **which: Any) -> None:
    r"""Show where the time of a run went: its goodput report.

    Divides the time by attempt and cause, as recorded in the ledger next to the checkpoints: queue,
    image pull, fetch of data, rendezvous, start, productive steps, all-reduce wait, checkpoint,
    steps that were lost or not saved, down, unobserved, and other. It also works for runs that have
    ended; queue, image pull and fetch are known only while the pods exist. `-o html` is a single
    page with charts.

    \b
    Examples:
      kdist report digits
      kdist report .kdist/digits -o html --out report.html
      kdist report digits -n ml -o json | jq .secondsByCategory
    """
    found = targets.find(**which)
    report = read_report(found)
    if output == "table":
        _show(report)
        return
    from kdist.report import html

    if out is None and output == "json":
        console.emit(report, output="json")
        return

    text = html.render_report(report) if output == "html" else encode_json(report, indent=2) + "\n"
    if out is None:
        console.document(text.rstrip("\n"))
    else:
        out.write_text(text, encoding="utf-8")
        console.list_files(out, output=output)


def read_report(job: Found) -> dict[str, Any]:
    """The report of a job, as `-o json` prints it."""
    from kdist.job.local.job import LocalJob

    return _read_local(job) if isinstance(job, LocalJob) else _read_cluster(job)


def _read_local(job: LocalJob) -> dict[str, Any]:
    import time

    from kdist import ledger
    from kdist.job.local import logs, run_dir
    from kdist.job.local.trainer_tools import refresh_records
    from kdist.report import goodput

    root, run = job.root, job.run
    checkpoints = refresh_records(root)
    events, steps = ledger.read_ledger(checkpoints)
    if not events:
        raise NotFoundError(f"there is no ledger of a run in {checkpoints}")
    active = [(each["started"], each["ended"]) for each in run.get("invocations", ())] or [
        (events[0].get("time", 0.0), None)
    ]
    is_active = job.active
    if is_active:
        active[-1] = (active[-1][0], time.time())
    startups = [
        goodput.PodStartup(began, began, up, fetched=fetched)
        for began, fetched, up in logs.starts(root, active)
    ]
    report = goodput.build_goodput_report(
        events,
        steps,
        active=active,
        startups=startups,
        unsaved=not is_active and not job.is_done,
    )
    ended = run_dir.read_json(root / "report.json") or {}
    report["nonFiniteLoss"] = ended.get("nonFiniteLoss")
    return {**_head(job.name, str(root)), **report}


def _read_cluster(job: ClusterJob) -> dict[str, Any]:
    from kdist.report import history

    target = job.applied
    report = history.read_report(target, notify=job.dialog.notify)
    return {**_head(target.name, f"{target.namespace}/{target.name}"), **report}


def _head(name: str, source: str) -> dict[str, str]:
    kind = {"apiVersion": CLI_API_VERSION, "kind": "GoodputReport"}
    return {**kind, "job": name, "from": source}


def _show(report: dict[str, Any]) -> None:
    from kdist.report import text

    console.paragraph(f"{report['job']}: {text.headline(report)}")
    for remark in text.remarks(report):
        console.paragraph(remark)
    console.result("")
    console.table(text.totals(report), header=("CATEGORY", "TIME", "SHARE"))
    console.result("")
    console.paragraph(text.GOODPUT)
    console.result("")
    console.table(text.attempts(report), header=text.ATTEMPTS)
    if lines := text.environment(report):
        for line in ("", *lines):
            console.result(line)

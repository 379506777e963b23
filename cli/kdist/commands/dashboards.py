"""`kdist dashboards`: the dashboards as files for Grafana, tried on a Grafana, or drawn from a
Prometheus without one.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import click

from kdist import console
from kdist.errors import Code, KdistError, UsageError


@click.group
def command() -> None:
    r"""Write the Grafana dashboards, or draw them from a Prometheus.

    \b
    Examples:
      kdist dashboards export training-job
      kdist dashboards export --out dashboards/
      kdist dashboards preview --prometheus http://localhost:9090 -o page.html
      kdist dashboards verify --grafana http://localhost:3000
    """


@command.command
@click.argument("name", required=False, metavar="[NAME]")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to write all of them to.",
)
def export(name: str | None, out: Path | None) -> None:
    r"""Print a dashboard as Grafana's JSON, or write all of them into a folder.

    \b
    Examples:
      kdist dashboards export training-job
      kdist dashboards export --out dashboards/
    """
    from kdist.dashboards import DASHBOARDS
    from kdist.dashboards.grafana import to_json

    if out is None:
        if name not in DASHBOARDS:
            raise UsageError(f"name one of {', '.join(DASHBOARDS)}, or a folder with --out")
        console.result(to_json(DASHBOARDS[name]).rstrip("\n"))
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        for each, dashboard in DASHBOARDS.items():
            (out / f"{each}.json").write_text(to_json(dashboard), encoding="utf-8")
            console.message(f"Wrote {out / each}.json.")
    except OSError as error:
        raise UsageError(f"cannot write into `{out}`: {error.strerror}") from None


@command.command
@click.option(
    "--grafana",
    required=True,
    metavar="URL",
    help="Address of the Grafana; $GRAFANA_TOKEN holds its token.",
)
def verify(grafana: str) -> int:
    r"""Import each dashboard into a Grafana, evaluate every panel there, and take them away again.

    \b
    Examples:
      GRAFANA_TOKEN=… kdist dashboards verify --grafana http://localhost:3000
    """
    from kdist.dashboards import DASHBOARDS
    from kdist.dashboards import verify as trial

    server = trial.Grafana(grafana, token=os.environ.get("GRAFANA_TOKEN"))
    found = [
        finding for dashboard in DASHBOARDS.values() for finding in trial.verify(server, dashboard)
    ]
    rows = [(one.dashboard, one.panel, str(one.series), one.error or "-") for one in found]
    console.table(rows, header=("DASHBOARD", "PANEL", "SERIES", "ERROR"))
    if failed := [one for one in found if one.error]:
        raise KdistError(f"{len(failed)} of {len(found)} panels failed")
    return Code.OK


@command.command
@click.argument("job", required=False, metavar="[JOB]")
@click.option(
    "--prometheus",
    required=True,
    metavar="URL",
    help="Address of the Prometheus that scrapes the trainings.",
)
@click.option(
    "--dashboard",
    "name",
    default="training-job",
    show_default=True,
    help="Which one: training-job or fleet.",
)
@click.option(
    "--since",
    default="1h",
    show_default=True,
    metavar="TIME",
    help="How far back to look, as 90s, 15m, 6h or 2d.",
)
@click.option(
    "--theme",
    type=click.Choice(["auto", "light", "dark"]),
    default="auto",
    help="Colours; auto as the reader's system.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default="dashboard.html",
    show_default=True,
)
def preview(
    job: str | None, *, prometheus: str, name: str, since: str, theme: str, out: Path
) -> None:
    r"""Draw a dashboard as one self-contained page from what a Prometheus knows; no Grafana needed.

    \b
    Examples:
      kdist dashboards preview --prometheus http://localhost:9090
      kdist dashboards preview digits --prometheus http://localhost:9090 --since 15m -o digits.html
      kdist dashboards preview --dashboard fleet --prometheus http://localhost:9090 -o fleet.html
    """
    from kdist.dashboards import DASHBOARDS
    from kdist.dashboards.preview import render_dashboard
    from kdist.dashboards.prometheus import Prometheus, Window, choose_job

    if name not in DASHBOARDS:
        raise UsageError(
            f"there is no dashboard `{name}`", hint=f"there are {', '.join(DASHBOARDS)}"
        )
    found = re.fullmatch(r"([1-9]\d{0,5})([smhd])", since)
    if found is None:
        raise UsageError(f"--since takes a time as 90s, 15m, 6h or 2d, found `{since}`")
    now = time.time()
    window = Window(
        now - int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]], now, 0
    )
    server = Prometheus(prometheus)
    chosen = (
        {} if name == "fleet" and job is None else {"kdist_job": choose_job(server, window, job)}
    )
    page = render_dashboard(DASHBOARDS[name], server, window, chosen=chosen, theme=theme)
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write `{out}`: {error.strerror}") from None
    console.message(f"Wrote {out}.")

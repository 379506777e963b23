"""`kdist dashboards`: the dashboards as files for Grafana, tried on a Grafana, or drawn from a Prometheus without one."""

from __future__ import annotations

import os
from pathlib import Path

import click

from kdist import console
from kdist.errors import Code, KdistError, UsageError


@click.group
def command() -> None:
    r"""Write the dashboards, or try them on a Grafana.

    \b
    Examples:
      kdist dashboards export training-job
      kdist dashboards export --out dashboards/
      kdist dashboards verify --grafana http://localhost:3000
    """


@command.command
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder to write all of them to.")
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
@click.option("--grafana", required=True, metavar="URL", help="Address of the Grafana; $GRAFANA_TOKEN holds its token.")
def verify(grafana: str) -> int:
    r"""Import each dashboard into a Grafana, evaluate every panel there, and take them away again.

    \b
    Examples:
      GRAFANA_TOKEN=… kdist dashboards verify --grafana http://localhost:3000
    """
    from kdist.dashboards import DASHBOARDS
    from kdist.dashboards import verify as trial

    server = trial.Grafana(grafana, token=os.environ.get("GRAFANA_TOKEN"))
    found = [finding for dashboard in DASHBOARDS.values() for finding in trial.verify(server, dashboard)]
    rows = [(one.dashboard, one.panel, str(one.series), one.error or "-") for one in found]
    console.table(rows, header=("DASHBOARD", "PANEL", "SERIES", "ERROR"))
    if failed := [one for one in found if one.error]:
        raise KdistError(f"{len(failed)} of {len(found)} panels failed")
    return Code.OK

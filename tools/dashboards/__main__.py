"""`python -m tools.dashboards export|preview|verify`: writes the dashboards to the chart, draws
them from a Prometheus, or evaluates them on a Grafana.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from kdist import app, console
from kdist.errors import Code, KdistError, UsageError
from tools.dashboards import DASHBOARDS
from tools.dashboards import verify as verification
from tools.dashboards.grafana import to_json
from tools.dashboards.page import render_dashboard
from tools.dashboards.prometheus import Prometheus, Window, choose_job

_CHART = Path(__file__).parents[2] / "charts/kdist/dashboards"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@click.group
def cli() -> None:
    r"""Write the Grafana dashboards, draw them from a Prometheus, or evaluate them on a Grafana.

    \b
    Examples:
      python -m tools.dashboards export
      python -m tools.dashboards preview --prometheus http://localhost:9090 -o page.html
      python -m tools.dashboards verify --grafana http://localhost:3000
    """


@cli.command
def export() -> None:
    r"""Write the JSON of all dashboards to the chart, from which the wheel takes it too.

    \b
    Examples:
      python -m tools.dashboards export
    """
    for name, dashboard in DASHBOARDS.items():
        (_CHART / f"{name}.json").write_text(to_json(dashboard), encoding="utf-8")


@cli.command
@click.option(
    "--grafana",
    required=True,
    metavar="URL",
    help="Address of the Grafana; $GRAFANA_TOKEN holds its token.",
)
def verify(grafana: str) -> int:
    r"""Import each dashboard into a Grafana, evaluate every panel there, and delete it again.

    \b
    Examples:
      GRAFANA_TOKEN=… python -m tools.dashboards verify --grafana http://localhost:3000
    """
    server = verification.Grafana(grafana, token=os.environ.get("GRAFANA_TOKEN"))
    findings = [
        finding
        for dashboard in DASHBOARDS.values()
        for finding in verification.verify(server, dashboard)
    ]
    rows = [(one.dashboard, one.panel, str(one.series), one.error or "-") for one in findings]
    console.table(rows, header=("DASHBOARD", "PANEL", "SERIES", "ERROR"))
    if failed := [one for one in findings if one.error]:
        raise KdistError(f"{len(failed)} of {len(findings)} panels failed")
    return Code.OK


@cli.command
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
    metavar="DURATION",
    help="How far back to look, as 90s, 15m, 6h or 2d.",
)
@click.option(
    "--theme",
    type=click.Choice(["auto", "light", "dark"]),
    default="auto",
    help="Colors; auto as the reader's system.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default="dashboard.html",
    show_default=True,
    help="File to write.",
)
def preview(
    job: str | None, *, prometheus: str, name: str, since: str, theme: str, out: Path
) -> None:
    r"""Draw a dashboard as one self-contained page from the series of a Prometheus.

    \b
    Examples:
      python -m tools.dashboards preview --prometheus http://localhost:9090
      python -m tools.dashboards preview digits --prometheus http://localhost:9090 --since 15m
      python -m tools.dashboards preview --dashboard fleet --prometheus http://localhost:9090
    """
    if name not in DASHBOARDS:
        raise UsageError(
            f"there is no dashboard `{name}`", hint=f"there are {', '.join(DASHBOARDS)}"
        )
    duration = re.fullmatch(r"([1-9]\d{0,5})([smhd])", since)
    if duration is None:
        raise UsageError(f"--since takes a duration as 90s, 15m, 6h or 2d, found `{since}`")
    now = time.time()
    window = Window(now - int(duration[1]) * _SECONDS[duration[2]], now, 0)
    server = Prometheus(prometheus)
    all_jobs = name == "fleet" and job is None
    chosen = {} if all_jobs else {"kdist_job": choose_job(server, window, job)}
    page = render_dashboard(DASHBOARDS[name], server, window, chosen=chosen, theme=theme)
    out.write_text(page, encoding="utf-8")
    console.message(f"Wrote {out}.")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code; errors are printed as `kdist` prints them."""
    try:
        code = cli.main(args, prog_name="python -m tools.dashboards", standalone_mode=False)
    except Exception as error:  # noqa: BLE001 - as in `kdist.app`: every error becomes text and a code
        code = app.report(error)
    sys.exit(code if isinstance(code, int) else Code.OK)


if __name__ == "__main__":
    main()

"""Takes the pictures of the dashboards in docs/: `make pictures`, or one of them:

    python -m tests.charts.pictures job|fleet [SECONDS [FOLDER]]

Real trainings lose ranks under a real Prometheus; `python -m tools.dashboards preview` draws its
series as a page, and headless Chromium takes a picture of that. The page is also left in FOLDER.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.charts import browser, fleet
from tests.charts.monitored import Training, scraping, until, write_job
from tests.cli.running import Run
from tests.house.tree import ROOT
from tools.dashboards.prometheus import Prometheus

DOCS = ROOT / "docs"
THEMES = ("light", "dark")
_ENOUGH = 0.9  # of the steps: a quick machine does them in less than the time


class Picture(NamedTuple):
    """A picture: its name, and the rows of the page after which it begins and ends; none is the
    page's own end.
    """

    name: str
    after: str | None = None
    until: str | None = None


class Plan(NamedTuple):
    """A dashboard to draw: the training for it, its seconds, and its pictures."""

    train: Callable[[Path, Prometheus, Path, int, Callable[[], None]], None]
    seconds: int
    arguments: tuple[str, ...]
    pictures: tuple[Picture, ...]


def train_one(
    home: Path, prometheus: Prometheus, targets: Path, seconds: int, then: Callable[[], None]
) -> None:
    """Train with two nodes of one rank each, kill one rank after two fifths of the time, and call
    `then` while they train on.
    """
    run = Run(home, write_job(home, seconds=seconds * 2))
    training = Training(run, "digits", targets)
    try:
        until(
            lambda: _update_targets(training) and training.events("first_step"), "first step", 240
        )
        begun, killed = time.monotonic(), False
        while (share := max((time.monotonic() - begun) / seconds, done(prometheus) / _ENOUGH)) < 1:
            assert run.process.poll() is None, run.errors()
            _update_targets(training)
            if not killed and share > 0.4:
                training.kill_rank()
                killed = True
            time.sleep(0.5)
        then()
    finally:
        run.close()


def done(prometheus: Prometheus) -> float:
    """The share of its steps that the training has finished."""
    found = prometheus.instant("max(kdist_last_step) / max(kdist_target_steps)", at=time.time())
    return found[0].last if found else 0.0


def _update_targets(training: Training) -> bool:
    with suppress(OSError):
        training.write_targets()
    return True


PLANS = {
    "job": Plan(
        train_one,
        240,
        ("digits",),
        (Picture("dashboard", until="Step breakdown"), Picture("dashboard-more", "Step breakdown")),
    ),
    "fleet": Plan(fleet.train_all, 240, ("--dashboard", "fleet"), (Picture("fleet"),)),
}


def draw(plan: Plan, prometheus: Prometheus, home: Path) -> None:
    """Draw the dashboard in each theme, and take its pictures; report texts that do not fit."""
    for theme in THEMES:
        path = home.absolute() / f"{plan.pictures[0].name}-{theme}.html"
        command = [
            sys.executable,
            "-m",
            "tools.dashboards",
            "preview",
            *plan.arguments,
            "--prometheus",
            prometheus.url,
        ]
        subprocess.run(
            [*command, "--theme", theme, "-o", str(path)], cwd=ROOT, check=True, timeout=120
        )
        page = path.read_text(encoding="utf-8")
        layout = browser.measure(page)
        sys.stderr.write(f"{path}: {len(layout.cut)} texts are cut {layout.cut}\n")
        for picture in plan.pictures:
            top = layout.bottoms[picture.after] if picture.after else 0
            bottom = layout.bottoms[picture.until] + 14 if picture.until else layout.height
            browser.shoot(page, DOCS / f"{picture.name}-{theme}.png", top=top, bottom=bottom)


def main(name: str, seconds: str = "", home: str = "") -> None:
    """Train, draw, and take the pictures."""
    plan = PLANS[name]
    if not browser.is_here():
        raise SystemExit("Chromium is missing: on Debian, `apt-get install chromium` installs it")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(home or folder)
        work.mkdir(parents=True, exist_ok=True)
        with scraping(work) as (prometheus, targets):
            plan.train(
                work,
                prometheus,
                targets,
                int(seconds or plan.seconds),
                lambda: draw(plan, prometheus, work),
            )


if __name__ == "__main__":
    main(*sys.argv[1:4])

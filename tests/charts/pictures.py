"""Makes the pictures of the dashboards in docs/: `make pictures`, or one of them:

    python -m tests.charts.pictures job|fleet [SECONDS [FOLDER]]

Real trainings lose ranks under a real Prometheus; `kdist dashboards preview` draws what it knows,
headless Chromium shoots that. What was shot, and the page, is also left in FOLDER.
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

from kdist.dashboards.prometheus import Prometheus
from tests.charts import browser, fleet
from tests.charts.monitored import Training, scraping, until, write_job
from tests.cli.running import Run
from tests.house.tree import ROOT

DOCS = ROOT / "docs"
THEMES = ("light", "dark")
_ENOUGH = 0.9  # of the steps: a quick machine does them in less than the time


class Piece(NamedTuple):
    """A picture: its name, and the rows of the page after which it begins and ends; none is the
    page's own end.
    """

    name: str
    after: str | None = None
    until: str | None = None


class Plan(NamedTuple):
    """A dashboard to shoot: who trains for it, how long, and its pictures."""

    train: Callable[[Path, Prometheus, Path, int, Callable[[], None]], None]
    seconds: int
    arguments: tuple[str, ...]
    pieces: tuple[Piece, ...]


def train_one(
    home: Path, prometheus: Prometheus, targets: Path, seconds: int, then: Callable[[], None]
) -> None:
    """Two nodes of a rank each, one of which is killed at two fifths of the time; `then` is called
    while they train on.
    """
    run = Run(home, write_job(home, seconds=seconds * 2))
    training = Training(run, "digits", targets)
    try:
        until(lambda: _told(training) and training.events("first_step"), "first step", 240)
        begun, killed = time.monotonic(), False
        while (share := max((time.monotonic() - begun) / seconds, done(prometheus) / _ENOUGH)) < 1:
            assert run.process.poll() is None, run.errors()
            _told(training)
            if not killed and share > 0.4:
                training.kill_rank()
                killed = True
            time.sleep(0.5)
        then()
    finally:
        run.close()


def done(prometheus: Prometheus) -> float:
    """The share of its steps that the training has done."""
    found = prometheus.instant("max(kdist_last_step) / max(kdist_target_steps)", at=time.time())
    return found[0].last if found else 0.0


def _told(training: Training) -> bool:
    with suppress(OSError):
        training.tell_targets()
    return True


PLANS = {
    "job": Plan(
        train_one,
        240,
        ("digits",),
        (Piece("dashboard", until="Step anatomy"), Piece("dashboard-more", "Step anatomy")),
    ),
    "fleet": Plan(fleet.train_all, 240, ("--dashboard", "fleet"), (Piece("fleet"),)),
}


def draw(plan: Plan, prometheus: Prometheus, home: Path) -> None:
    """Draw the dashboard as a user does, and shoot it; every text has to fit its place."""
    for theme in THEMES:
        path = home / f"{plan.pieces[0].name}-{theme}.html"
        command = [
            sys.executable,
            "-m",
            "kdist",
            "dashboards",
            "preview",
            *plan.arguments,
            "--prometheus",
            prometheus.url,
        ]
        subprocess.run([*command, "--theme", theme, "-o", str(path)], check=True, timeout=120)
        page = path.read_text(encoding="utf-8")
        layout = browser.measure(page)
        sys.stderr.write(f"{path}: {len(layout.cut)} texts are cut {layout.cut}\n")
        for piece in plan.pieces:
            top = layout.bottoms[piece.after] if piece.after else 0
            bottom = layout.bottoms[piece.until] + 14 if piece.until else layout.height
            browser.shoot(page, DOCS / f"{piece.name}-{theme}.png", top=top, bottom=bottom)


def main(name: str, seconds: str = "", home: str = "") -> None:
    """Train, look, shoot."""
    plan = PLANS[name]
    if not browser.is_here():
        raise SystemExit("there is no Chromium: on Debian `apt-get install chromium` helps")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(home or folder)
        place.mkdir(parents=True, exist_ok=True)
        with scraping(place) as (prometheus, targets):
            plan.train(
                place,
                prometheus,
                targets,
                int(seconds or plan.seconds),
                lambda: draw(plan, prometheus, place),
            )


if __name__ == "__main__":
    main(*sys.argv[1:4])

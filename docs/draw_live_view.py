"""Draws docs/live-view.svg, the README's picture, from a real training that has just recovered
from the loss of a worker.

    python docs/draw_live_view.py

It runs examples/digits.yaml as `kdist run` does, kills one rank after the second checkpoint, takes
the picture a few dozen steps after the recovery, and stops the training.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections import deque
from pathlib import Path

from rich.console import Console, Group, RenderableType

from kdist import render
from kdist.commands.run import _HINT
from kdist.events import Entry
from kdist.job import local
from kdist.job.local.progress import Progress
from kdist.job_file import load_file
from kdist.views import live
from kdist.views.frame import Frame
from kdist_trainer.processes.liveness import Heartbeat

HERE = Path(__file__).parent
JOB = HERE.parent / "examples" / "digits.yaml"
WIDTH = 112
LINES = 14


class Photographer:
    """A display that keeps the last lines, kills one rank, and takes one picture."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.lines: deque[RenderableType] = deque(maxlen=LINES)
        self.picture: RenderableType | None = None
        self.saves = 0
        self.recovered_at: int | None = None

    def show(self, entry: Entry) -> None:
        """Keep the line; after the second checkpoint kill the last rank."""
        self.lines.append(live.render_entry(entry))
        name = entry.event["event"] if entry.event else ""
        self.saves += name == "checkpoint-committed"
        if name == "checkpoint-committed" and self.saves == 2:
            ranks = sorted(self.home.glob("*/node-*/rank-*.heartbeat"))
            os.kill(Heartbeat(ranks[-1]).read().pid, signal.SIGKILL)
        if name == "first-step" and self.saves >= 2 and entry.event:
            self.recovered_at = int(entry.event["step"])

    def draw(self, progress: Progress) -> None:
        """Take the picture some steps after the recovery."""
        if (
            self.picture is None
            and self.recovered_at is not None
            and progress.step >= self.recovered_at + 60
        ):
            command = f"$ kdist run {JOB.relative_to(HERE.parent)}"
            view = live.from_progress(progress, hint=_HINT)
            self.picture = Group(command, *self.lines, Frame(view))
            os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    """Train, take the picture, write it."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["KDIST_HOME"] = home
        job = load_file(JOB)
        photographer = Photographer(Path(home))
        train_json = render.read_train_json(render.render(job))
        local.run_job(
            job,
            train_json,
            base=JOB.parent,
            fresh=False,
            display=photographer,
            lines_only=False,
            command=("run", str(JOB)),
        )
    if photographer.picture is None:
        raise SystemExit("the training ended before the picture was taken")
    with Path(os.devnull).open("w") as nowhere:
        console = Console(
            record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor"
        )
        console.print(photographer.picture)
    console.save_svg(str(HERE / "live-view.svg"), title="kdist")


if __name__ == "__main__":
    main()

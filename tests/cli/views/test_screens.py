"""Every screen at 60, 80, 120 and 200 columns, as a reader sees it.

`KDIST_REGENERATE=1 pytest tests/cli/views/test_screens.py` writes the texts of `screens` again, to
be read before they are committed.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from kdist.agents import metrics
from kdist.agents.metrics import AgentSample
from kdist.commands.get import Rows
from kdist.job.find import Listed
from kdist.job.local.progress import NodeProgress, Progress
from kdist.report import text as report_text
from kdist.status import Snapshot
from kdist.status.step_history import StepHistory
from kdist.terminal import columns
from kdist.units import age, moment
from kdist.views import checkpoints, status_table
from kdist.views.frame import Frame
from kdist.views.live import TopFrame, from_progress
from tests.cli.diagnose.scenes import FAILED, scene
from tests.cli.job.cluster.test_checkpoint_list import ENTRY
from tests.cli.job.cluster.test_checkpoint_list import document as checkpoint_list
from tests.cli.job.cluster.test_top import reading
from tests.cli.status.objects import (
    NOW,
    Document,
    config_map,
    ended_pod,
    pod,
    rank,
    record,
    report,
    unscheduled,
)
from tests.cli.views.test_live import view_of

SCREENS = Path(__file__).parent / "screens"
SIZES = ((60, 15), (80, 24), (120, 30), (200, 50))
Draw = Callable[[int, int], list[str]]


def draw(renderable: RenderableType, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(renderable)
    return [line.rstrip() for line in console.export_text().splitlines()]


def name(index: int) -> str:
    return f"digits-{index}-abcde"


def train(nodes: int, per_node: int, *, slow: int) -> Snapshot:
    """A job at work; the rank `slow` computes three times as long as the others."""
    reports: dict[str, Document] = {}
    for node in range(nodes):
        ranks = [rank(node * per_node + local, local) for local in range(per_node)]
        for each in ranks:
            each["step"] = 1200
            each["busy_seconds"] = 0.18 if each["rank"] == slow else 0.06
        found = report(world_size=nodes * per_node, step=1200, target_steps=12_000)
        found["last_checkpoint_step"] = 1000
        found["at_risk_seconds"] = 35.0 if node == 0 else None
        reports[name(node)] = {**found, "ranks": ranks}
    pods = [pod(index, node=f"worker-{index + 1}") for index in range(nodes)]
    return scene(pods, reports=reports, reported=config_map(least=nodes, most=nodes))


def history_of(snapshot: Snapshot) -> StepHistory:
    history = StepHistory()
    for step in range(60):
        history.record(snapshot.taken - 60 + step, 1140 + step, 2.0 / (1 + step / 8))
    history.record(snapshot.taken, snapshot.status.step, snapshot.status.loss)
    return history


RUNNING, LARGE = train(2, 2, slow=3), train(8, 8, slow=61)
PENDING = scene([unscheduled(0, "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")])
ENDED = scene(
    [
        ended_pod(0, 70, record=record(70, "user_code", message="ValueError: bad label 11")),
        ended_pod(1, 70, record=record(70, "user_code", message="ValueError: bad label 11")),
    ],
    state=FAILED,
)


def resumed() -> Progress:
    nodes = {each: NodeProgress(each) for each in ("node-0", "node-1")}
    saved_at = NOW.timestamp() - 3700
    return Progress(
        "digits",
        nodes,
        min_nodes=2,
        clock=lambda: 100.0,
        step=1200,
        saved_step=1200,
        saved_at=saved_at,
    )


def live(snapshot: Snapshot) -> Draw:
    return lambda width, height: draw(Frame(view_of(snapshot, history_of(snapshot))), width, height)


def status(snapshot: Snapshot) -> Draw:
    def lines(width: int, height: int) -> list[str]:
        found = snapshot.status
        rows = list(status_table.status_rows(found))
        ranks = status_table.rank_rows(found)
        return [
            *columns.Table(("JOB", found.name)).add(rows, width),
            "",
            *columns.Table(status_table.RANK_HEADER).add(ranks, width),
        ]

    return lines


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Draw:
    return lambda width, _: columns.Table(header).add(rows, width)


def show_top(ranks: int) -> Draw:
    now: dict[str, AgentSample] = {name(each): reading(each, 1200) for each in range(ranks)}
    now[name(ranks - 1)] = reading(ranks - 1, 1200, data=0.09)
    rows = metrics.breakdown_rows(now)
    return lambda width, height: draw(TopFrame("digits", now, rows, None), width, height)


def show_get() -> Draw:
    rows = Rows("table", all_namespaces=True, header=True, labels=False)
    found = [Listed(each.status, {}) for each in (RUNNING, PENDING, ENDED)]
    return table(rows._header(), [rows._row(each) for each in found])


def show_report() -> Draw:
    one = {
        "generation": 1,
        "reason": "restart after a failure",
        "fromStep": 0,
        "reachedStep": 1200,
        "keptSteps": 1000,
        "lostSteps": 200,
        "secondsByCategory": {"productive": 80.0, "allReduceWait": 10.0, "lost": 10.0},
        "endedBy": "user_code",
        "failure": {"message": "ValueError: bad label 11 in the batch of step 1,201", "rank": 1},
    }
    return table(report_text.ATTEMPTS, report_text.attempts({"attempts": [one, one]}))


EVENTS = table(
    ("LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"),
    [
        ("45s", "Normal", "Scheduled", f"pod/{name(0)}", f"Assigned ml/{name(0)} to worker-1"),
        (
            "5m30s",
            "Warning",
            "FailedScheduling",
            f"pod/{name(1)}",
            "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are "
            "available: 2 No preemption victims found for incoming pod. (x12)",
        ),
    ],
)
DAMAGED = {**ENTRY, "name": "step-00000010-e1", "step": 10, "state": "damaged"}
DAMAGED["problem"] = "rank-1.safetensors has 1,024 bytes instead of 2,048"
SHOWN: dict[str, Draw] = {
    "live-running": live(RUNNING),
    "live-64-ranks": live(LARGE),
    "live-pending": live(PENDING),
    "live-failed": live(ENDED),
    "live-resumed": lambda *size: draw(Frame(from_progress(resumed(), hint="Ctrl-C saves")), *size),
    "status-running": status(RUNNING),
    "status-pending": status(PENDING),
    "status-failed": status(ENDED),
    "top": show_top(4),
    "top-64-ranks": show_top(64),
    "get": show_get(),
    "report": show_report(),
    "events": EVENTS,
    "checkpoints": table(
        checkpoints.HEADER, checkpoints.checkpoint_rows(checkpoint_list(ENTRY, DAMAGED))
    ),
}


@pytest.mark.parametrize("screen", SHOWN)
def test_a_screen_fits_every_terminal_and_reads_as_before(
    screen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", NOW.timestamp)
    found = []
    for width, height in SIZES:
        lines = SHOWN[screen](width, height)
        assert max(map(len, lines)) <= width, (width, lines)
        if screen.startswith(("live", "top")):
            assert len(lines) < height, (height, lines)
        found += [f"{f' {width} x {height} ':=^{width}}", *lines, ""]
    text = "\n".join(found)
    golden = SCREENS / f"{screen}.txt"
    if os.environ.get("KDIST_REGENERATE"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("screen", SHOWN)
def test_a_tiny_terminal_is_no_trouble(screen: str) -> None:
    lines = SHOWN[screen](20, 5)
    assert lines
    if screen.startswith(("live", "top")):
        assert len(lines) < 5
        assert max(map(len, lines)) <= 20


def test_of_64_ranks_the_slow_one_stays() -> None:
    for screen in ("live-64-ranks", "top-64-ranks"):
        lines = SHOWN[screen](80, 15)
        assert any(line.split()[0] in ("61", "63") for line in lines if line), lines
        assert any("more ranks" in line for line in lines)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (45.9, "45s"),
        (119, "119s"),
        (330, "5m30s"),
        (600, "10m"),
        (11_400, "3h10m"),
        (90_000, "25h"),
        (2 * 86_400 + 3600, "2d1h"),
        (30 * 86_400, "30d"),
        (800 * 86_400, "2y70d"),
    ],
)
def test_ages_are_shown_as_kubectl_does(seconds: float, shown: str) -> None:
    assert age(seconds) == shown


def test_a_time_of_today_has_no_date() -> None:
    now = time.mktime((2026, 11, 23, 10, 44, 5, 0, 0, -1))
    assert moment(now, now) == "10:44:05"
    assert moment(now - 86_400, now) == "2026-11-22 10:44:05"

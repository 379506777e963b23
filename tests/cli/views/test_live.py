"""The live view of a job, on this machine and on a cluster, and the state that it renders."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console, RenderableType

from kdist.diagnose import diagnose
from kdist.events import Entry
from kdist.job.local.agents import StatusReply
from kdist.job.local.progress import NodeProgress, Progress
from kdist.status import Snapshot
from kdist.status.step_history import StepHistory
from kdist.views.frame import Frame, JobView, sparkline
from kdist.views.live import from_progress, from_status, render_entry
from tests.cli.diagnose.scenes import scene
from tests.cli.status.objects import pod, report, unscheduled


class Clock:
    """Time that only the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> Progress:
    return Progress(
        "digits",
        {name: NodeProgress(name) for name in ("node-0", "node-1")},
        min_nodes=2,
        clock=clock,
    )


def view_of(snapshot: Snapshot, history: StepHistory) -> JobView:
    """What `kdist status -w` draws of a job on a cluster."""
    cause = diagnose(snapshot)
    return from_status(snapshot.status, cause, history, now=snapshot.taken, gap=snapshot.gap)


def drawn(renderable: RenderableType, width: int = 120) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: PTH123, SIM115
    console.print(renderable)
    return console.export_text()


def observe(progress: Progress, name: str, node: str = "node-0", **fields: Any) -> None:
    progress.observe_event(node, {"event": name, **fields})


def answer(clock: Clock, **status: Any) -> StatusReply:
    return StatusReply(status, clock.now, clock.now)


def test_a_training_shows_step_loss_rate_and_what_is_left(progress: Progress, clock: Clock) -> None:
    clock.now = 108.0
    observe(progress, "progress", step=20, target=100, loss=0.6)
    clock.now = 110.0
    observe(
        progress,
        "progress",
        step=25,
        target=100,
        loss=0.5,
        learning_rate=0.001,
        samples_per_second=1234.0,
    )
    text = drawn(Frame(from_progress(progress)))
    for part in (
        "digits",
        "step 25/100  25%",
        "30s left",
        "10s so far",
        "loss 0.5",
        "1,234 samples/s",
        "learning rate 0.001",
    ):
        assert part in text


def test_the_rate_of_a_script_is_that_of_all_nodes(progress: Progress, clock: Clock) -> None:
    for node in ("node-0", "node-1"):
        progress.observe_reply(node, answer(clock, step=7, generation=1, samples_per_second=100.0))
    assert "200 samples/s" in drawn(Frame(from_progress(progress)))


def test_ranks_are_listed_with_their_state_and_heartbeat(progress: Progress, clock: Clock) -> None:
    observe(progress, "first-step", step=1)
    rank = {
        "rank": 0,
        "local_rank": 0,
        "step": 7,
        "step_seconds": 0.02,
        "busy_seconds": 0.004,
        "heartbeat_age": 0.5,
    }
    progress.observe_reply("node-0", answer(clock, ranks=[rank], generation=1, step=7))
    lines = drawn(Frame(from_progress(progress))).splitlines()
    (row,) = [line.split() for line in lines if line.startswith("node-0")]
    assert row == ["node-0", "0", "training", "7", "20", "ms", "4", "ms", "0.5", "s"]


def test_an_agent_that_does_not_answer_is_shown_as_such(progress: Progress, clock: Clock) -> None:
    observe(progress, "first-step", step=1)
    progress.observe_reply("node-0", answer(clock, ranks=[]))
    clock.now += 8
    assert "no answer for 8 s" in drawn(Frame(from_progress(progress)))


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        ([], "starting: 2 of 2 agents load torch"),
        (["rendezvous-started"], "starting: 1 of 2 agents load torch"),
        (
            ["rendezvous-started", "rendezvous-started"],
            "rendezvous: 2 of 2 nodes joined, 2 needed",
        ),
        (["rendezvous-completed", "rendezvous-completed"], "the ranks start and load the workload"),
        (["first-step", "agent-restarting"], "an agent ended and starts again"),
        (["first-step", "stopping"], "the ranks save their state and stop"),
    ],
)
def test_a_job_that_is_quiet_for_a_second_says_what_it_waits_for(
    progress: Progress, clock: Clock, events: list[str], sentence: str
) -> None:
    for node, event in zip(("node-0", "node-1"), events, strict=False):
        observe(progress, event, node)
    assert progress.waiting_for() is None
    clock.now += 1.1
    assert progress.waiting_for() == sentence
    assert f"… {sentence}" in drawn(Frame(from_progress(progress)))


def test_an_agent_that_failed_and_starts_again_has_nobody_reported_to_stop(
    progress: Progress, clock: Clock
) -> None:
    clock.now += 2
    progress.observe_event("node-0", {"event": "failed", "cause": "storage", "code": 203})
    assert progress.waiting_for() == "starting: 2 of 2 agents load torch"
    progress.observe_event("node-0", {"event": "failed", "cause": "user_code", "code": 70})
    assert progress.waiting_for() == "the other agents are stopped"
    del progress.nodes["node-1"]
    assert progress.waiting_for() == "the agent ends"


def test_a_training_that_moves_waits_for_nothing(progress: Progress, clock: Clock) -> None:
    observe(progress, "first-step", step=1)
    clock.now += 10
    observe(progress, "progress", step=2, loss=1.0)
    assert progress.waiting_for() is None
    assert "Ctrl-C" in drawn(Frame(from_progress(progress, hint="Ctrl-C saves")))


def test_a_script_that_reports_no_steps_is_not_called_stuck(clock: Clock) -> None:
    progress = Progress(
        "script", {"node-0": NodeProgress("node-0")}, min_nodes=1, managed=False, clock=clock
    )
    assert "step 0" not in drawn(Frame(from_progress(progress)))
    observe(progress, "rendezvous-completed", world_size=1)
    clock.now += 60
    assert progress.waiting_for() is None


def test_the_age_of_the_last_checkpoint_is_shown(progress: Progress) -> None:
    assert "no checkpoint yet" in drawn(Frame(from_progress(progress)))
    observe(progress, "checkpoint-committed", step=50)
    assert "last checkpoint step 50, committed just now" in drawn(Frame(from_progress(progress)))
    assert progress.saved_at is not None
    progress.saved_at -= 90
    assert "last checkpoint step 50, committed 90s ago" in drawn(Frame(from_progress(progress)))


def test_restarts_and_the_rest_of_the_budget_are_shown(progress: Progress, clock: Clock) -> None:
    observe(progress, "restarting", restarts=2, budget=10)
    assert "2 restarts (8 more without progress)" in drawn(Frame(from_progress(progress)))
    reply = answer(clock, generation=9, restarts=5, restarts_remaining=10)
    progress.observe_reply("node-0", reply)
    shown = drawn(Frame(from_progress(progress)))
    assert "5 restarts (10 more without progress)" in shown, "those of the run, after a commit"


def test_of_many_ranks_only_a_screenful_is_listed(clock: Clock) -> None:
    progress = Progress(
        "big",
        {f"node-{n}": NodeProgress(f"node-{n}") for n in range(64)},
        min_nodes=64,
        clock=clock,
    )
    text = drawn(Frame(from_progress(progress)))
    assert text.count("node-") == 16
    assert "48 more" in text


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([], 10, ""),
        ([1.0], 10, "▁"),
        ([1.0, 1.0], 10, "▁▁"),
        ([0.0, 7.0], 10, "▁█"),
        ([7.0, 0.0], 10, "█▁"),
        ([1.0] * 100, 10, "▁" * 10),
        ([float(n) for n in range(8)], 8, "▁▂▃▄▅▆▇█"),
    ],
)
def test_a_sparkline_goes_with_its_values(values: list[float], width: int, bars: str) -> None:
    assert sparkline(values, width) == bars


def test_square_brackets_that_a_rank_prints_are_no_markup() -> None:
    expected = "[node-0] [red]loss[/red] [/]"
    assert drawn(render_entry(Entry("node-0", None, "[red]loss[/red] [/]"))).rstrip() == expected


def test_the_newest_state_of_each_ranks_progress_bar_is_drawn_until_its_line_ends(
    progress: Progress,
) -> None:
    for rank, percent in ((0, 10), (1, 10), (0, 20)):
        progress.observe_print(
            Entry("node-0", None, f"[rank{rank}]: {percent}% [eta]", is_progress_bar=True)
        )
    rows = [
        row.rstrip() for row in drawn(Frame(from_progress(progress))).splitlines() if "%" in row
    ]
    assert rows == ["[rank0]: 20% [eta]", "[rank1]: 10% [eta]"]
    progress.observe_print(Entry("node-0", None, "[rank0]: 100% [eta]"))
    assert "[rank0]" not in drawn(Frame(from_progress(progress)))
    progress.observe_event("node-0", {"event": "rendezvous-completed", "world_size": 2})
    assert "[rank1]" not in drawn(Frame(from_progress(progress))), (
        "another process has that rank now"
    )


@pytest.mark.parametrize("width", [20, 60, 200])
def test_the_view_can_be_drawn_on_any_terminal(progress: Progress, width: int) -> None:
    observe(progress, "progress", step=25, target=100, loss="nan")
    assert (
        max(len(line) for line in drawn(Frame(from_progress(progress)), width).splitlines())
        <= width
    )


def test_what_rank_0_says_of_the_group_holds_for_every_node(progress: Progress) -> None:
    for node in ("node-0", "node-1"):
        observe(progress, "rendezvous-completed", node, world_size=2)
    observe(progress, "first-step", "node-0", step=1)
    assert [node.phase for node in progress.nodes.values()] == ["training", "training"]


def test_the_time_left_follows_the_pace_of_now_and_not_of_the_start(
    progress: Progress, clock: Clock
) -> None:
    for second in range(100):
        clock.now += 1
        observe(progress, "progress", step=1 + second, target=1000, loss=1.0)
    observe(progress, "resumed", step=50)
    assert progress.seconds_left() is None, "no pace yet after the fall back"
    for second in range(10):
        clock.now += 1
        observe(progress, "progress", step=60 + 10 * second, target=1000, loss=1.0)
    assert progress.seconds_left() == pytest.approx((1000 - 150) / 10, rel=0.15)


def test_an_older_answer_of_another_node_does_not_turn_the_clock_back(
    progress: Progress, clock: Clock
) -> None:
    observe(progress, "progress", step=10, target=100, loss=1.0, generation=1)
    for step in (20, 18, 30, 29):
        clock.now += 1
        progress.observe_reply("node-0", answer(clock, generation=1, step=step, loss=0.5))
    assert progress.step == 30
    assert progress.seconds_left() == pytest.approx(70 / (20 / 3))
    observe(progress, "rendezvous-completed", world_size=2, generation=2)
    progress.observe_reply("node-1", answer(clock, generation=2, step=7, loss=0.5))
    assert progress.step == 7


@pytest.mark.parametrize(
    ("phase", "sentence"),
    [
        ("evaluate", "the ranks evaluate the model"),
        ("data", "no step for 4 s; the ranks are in: data"),
        (None, "no step for 4 s"),
    ],
)
def test_a_training_that_stands_says_where_its_ranks_are(
    progress: Progress, clock: Clock, phase: str | None, sentence: str
) -> None:
    for node in progress.nodes:
        observe(progress, "rendezvous-completed", node)
    observe(progress, "first-step", step=1)
    progress.observe_reply("node-0", answer(clock, ranks=[{"rank": 0, "phase": phase}]))
    clock.now += 4
    assert progress.waiting_for() == sentence


def test_the_start_of_the_processes_does_not_count_as_time_without_a_step(
    progress: Progress, clock: Clock
) -> None:
    clock.now += 30
    for node in progress.nodes:
        observe(progress, "rendezvous-completed", node)
    observe(progress, "training-started")
    clock.now += 2
    assert progress.waiting_for() is None
    clock.now += 3
    assert progress.waiting_for() == "no step for 5 s"


def test_a_job_on_a_cluster_has_the_same_view_with_its_phase_and_its_pods() -> None:
    history = StepHistory()
    for number in range(1, 5):
        first = report(step=30 * number, loss=1 / number)
        both = {"digits-0-abcde": first, "digits-1-abcde": report(ranks=(1,), step=30 * number)}
        snapshot = scene([pod(0), pod(1)], reports=both)
        history.record(snapshot.taken + number, snapshot.status.step, snapshot.status.loss)
    text = drawn(Frame(view_of(snapshot, history)))
    for part in (
        "digits Running",
        "step 120/500  24%",
        "loss 0.25  █▃▂▁   2,000 samples/s",
        "2/2 nodes · 2 ranks · generation 1 · 0 restarts (10 left)",
        "last checkpoint step 100, committed 30s ago",
        "digits-1-abcde",
        "Ctrl-C ends this view, not the job",
    ):
        assert part in text


def test_the_view_of_a_stuck_job_ends_with_its_cause() -> None:
    snapshot = scene([unscheduled(0, "0/2 nodes are available: 2 Insufficient cpu.")])
    text = drawn(Frame(view_of(snapshot, StepHistory())))
    assert "… digits-0-abcde finds no node" in text
    assert "Ctrl-C" not in text


def test_what_is_at_risk_is_what_an_agent_that_is_there_tells_now(
    progress: Progress, clock: Clock
) -> None:
    def at_risk() -> float | None:
        return progress.at_risk

    progress.observe_reply("node-0", answer(clock, generation=1, at_risk_seconds=35.0))
    progress.observe_reply("node-1", answer(clock, generation=1, at_risk_seconds=None))
    assert at_risk() == 35.0
    clock.now += 1
    progress.observe_reply("node-0", answer(clock, generation=1, at_risk_seconds=None))
    assert at_risk() is None, "its ranks are gone"
    clock.now += 1
    progress.observe_reply("node-0", answer(clock, generation=1, at_risk_seconds=36.0))
    progress.observe_reply("node-1", answer(clock, generation=2, at_risk_seconds=2.0))
    assert at_risk() == 2.0, "node-0 tells of a group that has ended"
    observe(progress, "agent-killed", node="node-1")
    assert at_risk() == 36.0

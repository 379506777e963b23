"""`kdist status -w` on a real terminal: what it draws, how it follows the terminal's size, and how
it ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.cluster.api import Api, write_kubeconfig
from tests.cli.cluster.conftest import Serve
from tests.cli.job.cluster.terminal import Terminal
from tests.cli.job.cluster.test_wait import DONE, FAILED
from tests.cli.job.cluster.world import FIRST, SECOND, World
from tests.cli.status.objects import ended_pod, record, report
from tests.patience import soon

pytestmark = pytest.mark.processes

SHOW, HIDE = "\x1b[?25h", "\x1b[?25l"
Open = Callable[..., Terminal]


@pytest.fixture
def api(world: World, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Api:
    """The server that shows the world, named by the kubeconfig."""
    served = serve(world)
    write_kubeconfig(tmp_path / "kubeconfig", served.url)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return served


@pytest.fixture
def open_terminal(api: Api) -> Iterator[Open]:
    """`open_terminal("status", "digits", "-w")`; what runs there ends with the test."""
    opened: list[Terminal] = []

    def begin(*args: str, **how: Any) -> Terminal:
        opened.append(Terminal(*args, **how))
        return opened[-1]

    yield begin
    for each in opened:
        each.close()


def is_restored(terminal: Terminal) -> bool:
    """Whether the cursor is back and keys do what they did."""
    printed = terminal.read()
    return printed.rfind(SHOW) > printed.rfind(HIDE) and terminal.settings == terminal.before


def test_the_view_follows_the_job_and_the_terminal_and_ctrl_c_leaves_both_well(
    world: World, open_terminal: Open
) -> None:
    terminal = open_terminal("status", "digits", "-w")
    assert terminal.shows(
        lambda frame: "step 120/500  24%" in frame and FIRST in frame and SECOND in frame
    ), terminal.frame()
    assert HIDE in terminal.read()
    world.reports[FIRST] = report(step=130)
    assert terminal.shows(lambda frame: "step 130/500" in frame), terminal.frame()
    assert "step 120" not in "\n".join(terminal.frame()), "the frame before is gone"
    wide = max(map(len, terminal.frame()))
    terminal.resize(60)
    world.reports[FIRST] = report(step=140)
    assert terminal.shows(lambda frame: "140" in frame and "Ctrl-C" in frame), terminal.frame()
    assert max(map(len, terminal.frame())) <= 60 < wide
    terminal.press(b"\x03")
    assert terminal.end() == 130
    assert is_restored(terminal)
    assert "Traceback" not in terminal.written
    assert terminal.written.rstrip().endswith("Interrupted.")


def test_the_view_gives_way_to_the_last_status_and_the_code_of_the_end(
    world: World, open_terminal: Open
) -> None:
    terminal = open_terminal("status", "digits", "-w")
    assert terminal.shows(lambda frame: "Running" in frame)
    world.workload = FAILED
    world.pods = [ended_pod(0, 70, record=record(70, "user_code", message="ValueError: bad label"))]
    assert terminal.end() == 10
    assert is_restored(terminal)
    last = terminal.frame()
    assert any(line.split()[:2] == ["phase", "Failed"] for line in last), last


def test_a_server_that_goes_away_is_reported_above_the_view_and_holds_nobody_who_wants_to_leave(
    world: World, api: Api, serve: Serve, open_terminal: Open
) -> None:
    terminal = open_terminal("status", "digits", "-w")
    assert terminal.shows(lambda frame: "step 120/500" in frame)
    api.close()
    assert terminal.shows(lambda _: "does not answer" in terminal.written)
    again = serve(world, port=api.port)
    world.reports[FIRST] = report(step=150)
    assert terminal.shows(lambda frame: "step 150/500" in frame and "answer" not in frame), (
        terminal.frame()
    )
    assert "the API server answers again" in terminal.written
    again.close()
    assert terminal.shows(lambda _: terminal.written.count("does not answer") == 2)
    terminal.press(b"\x03")
    assert terminal.end(seconds=5) == 130
    assert is_restored(terminal)


def test_a_job_that_is_over_is_shown_once(world: World, open_terminal: Open) -> None:
    world.workload, world.pods = DONE, [ended_pod(0, 0, "Completed")]
    terminal = open_terminal("status", "digits", "-w")
    assert terminal.end() == 0
    assert is_restored(terminal)


@pytest.mark.sampled
def test_every_size_of_the_terminal_shows_one_whole_frame(
    world: World, open_terminal: Open
) -> None:
    terminal = open_terminal("status", "digits", "-w", columns=200, rows=40)
    step = 120
    for columns, rows in ((200, 40), (60, 15), (120, 40), (80, 24), (20, 5), (60, 15)):
        terminal.resize(columns, rows)
        step += 1
        world.reports[FIRST] = report(step=step)

        wanted = f"step {step}/500" if columns > 20 else "digits Running 25%"

        def shown(wanted: str = wanted) -> bool:
            terminal.read()
            return any(wanted in line for line in terminal.screen.lines)

        assert soon(shown, 30), (columns, rows, terminal.screen.lines)
        lines = [line for line in terminal.screen.lines if line]
        assert len(lines) < rows
        assert sum("digits Running" in line for line in lines) == 1, lines
        if rows > 5:
            assert lines[-1] == "Ctrl-C ends this view, not the job", lines
            assert sum("RANK" in line for line in lines) == 1, lines
            ranks = [line for line in lines if line.split()[0] in ("0", "1")]
            assert len(ranks) == 2, lines
    terminal.press(b"\x03")
    assert terminal.end() == 130
    assert is_restored(terminal)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_plain_or_a_tiny_terminal_shows_the_job_without_a_failure(
    world: World, open_terminal: Open, environment: dict[str, str]
) -> None:
    terminal = open_terminal("status", "digits", "-w", columns=20, rows=5, **environment)
    assert soon(lambda: "Running" in terminal.read(), 30), terminal.written
    world.workload, world.pods = DONE, [ended_pod(0, 0, "Completed")]
    assert terminal.end() == 0
    assert "Traceback" not in terminal.written
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.written), "a color"


def test_a_printed_table_fits_the_terminal_and_elsewhere_has_every_column(
    open_terminal: Open,
) -> None:
    printed = {}
    for columns in (60, 200):
        terminal = open_terminal("status", "digits", columns=columns)
        assert terminal.end() == 0
        printed[columns] = terminal.written.replace("\r", "").splitlines()
        assert max(map(len, printed[columns])) <= columns
    narrow, wide = (
        next(line.split() for line in printed[columns] if line.startswith("RANK"))
        for columns in (60, 200)
    )
    assert set(narrow) < set(wide)
    assert {"RANK", "POD", "STATUS", "STEP"} <= set(narrow)


def test_a_watched_list_fits_the_terminal(world: World, open_terminal: Open) -> None:
    terminal = open_terminal("get", "-n", "ml", "-w", columns=50)
    assert terminal.shows(lambda frame: "120/500" in frame), terminal.frame()
    world.reports[FIRST] = report(step=130)
    assert terminal.shows(lambda frame: "130/500" in frame), terminal.frame()
    terminal.press(b"\x03")
    assert terminal.end() == 130
    header, before, after, *_ = terminal.frame()
    assert max(map(len, (header, before, after))) <= 50
    assert header.index("STEP") == before.index("120/500") == after.index("130/500")
    assert "AGE" in header
    assert "LOSS" not in header, "a column that gives way"

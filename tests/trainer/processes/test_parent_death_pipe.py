"""The parent-death pipe: whoever watches it notices the owner's death, however it happened."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

from kdist_trainer.processes.liveness import ParentDeathPipe, watch


def test_a_watcher_sleeps_while_the_owner_lives_and_wakes_when_it_lets_go(tmp_path: Path) -> None:
    ended = threading.Event()
    with closing(ParentDeathPipe.create(tmp_path / "line")):
        watch(tmp_path / "line", ended.set)
        assert not ended.wait(0.2)
    assert ended.wait(60)


def test_a_line_without_an_owner_or_without_a_pipe_counts_as_ended(tmp_path: Path) -> None:
    ParentDeathPipe.create(tmp_path / "line").close()
    for path in (tmp_path / "line", tmp_path / "nothing"):
        ended = threading.Event()
        watch(path, ended.set)
        assert ended.wait(60)


def test_watchers_of_a_dead_owner_do_not_mistake_its_successor_for_it(tmp_path: Path) -> None:
    ended = threading.Event()
    first = ParentDeathPipe.create(tmp_path / "line")
    watch(tmp_path / "line", ended.set)
    with closing(ParentDeathPipe.create(tmp_path / "line")):
        first.close()
        assert ended.wait(60)


def test_a_killed_owner_takes_the_group_of_its_watcher_along(tmp_path: Path) -> None:
    owner = (
        "import sys, time; from pathlib import Path\n"
        "from kdist_trainer.processes.liveness import ParentDeathPipe\n"
        "pipe = ParentDeathPipe.create(Path(sys.argv[1]))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    watcher = (
        "import os, subprocess, sys, time; from pathlib import Path; from "
        "kdist_trainer.processes.liveness import watch\n"
    )
    watcher += (
        "child = subprocess.Popen(['sleep', '60']); watch(Path(sys.argv[1])); "
        "print(child.pid, flush=True); time.sleep(60)"
    )
    line = str(tmp_path / "line")
    holding = subprocess.Popen([sys.executable, "-c", owner, line], stdout=subprocess.PIPE)
    assert holding.stdout is not None
    holding.stdout.readline()
    watching = subprocess.Popen(
        [sys.executable, "-c", watcher, line], stdout=subprocess.PIPE, start_new_session=True
    )
    assert watching.stdout is not None
    child = int(watching.stdout.readline())
    holding.kill()
    holding.wait()
    assert watching.wait(60) == -9
    deadline = time.monotonic() + 60
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"

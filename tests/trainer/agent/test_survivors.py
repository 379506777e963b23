"""The processes of a group that was left are ended once, and those of the next group again."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from pathlib import Path

from kdist_trainer.agent.survivors import Survivors
from kdist_trainer.agent.workers import WorkerProcesses
from kdist_trainer.config import Nodes, Script, TrainConfig
from tests.patience import soon

CONFIG = TrainConfig(name="job", nodes=Nodes(min=1, max=1), script=Script(path="train.py"))


def test_what_a_group_has_started_is_ended_with_it_and_so_it_is_in_the_next_group(
    tmp_path: Path,
) -> None:
    # in a process of its own, since all processes below it are ended
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_leave_two_groups, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def _leave_two_groups(scratch: Path) -> None:
    workers = WorkerProcesses()
    survivors = Survivors(CONFIG, scratch, procs=1)
    first = _start_process()
    survivors.keep(workers)
    assert soon(lambda: not _exists(first), 10.0)
    later = _start_process()
    assert survivors.end_others(workers, timeout_seconds=10) == []
    assert _exists(later), "all of the group had ended before"
    survivors.join(workers, {})
    assert survivors.end_others(workers, timeout_seconds=10) == []
    assert soon(lambda: not _exists(later), 10.0)


def _start_process() -> int:
    return subprocess.Popen(["sleep", "300"]).pid


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:  # it has ended and was waited for
        return False
    return True

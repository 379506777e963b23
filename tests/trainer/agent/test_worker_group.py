"""The processes of a group that was left are ended once, and those of the next group again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from kdist_trainer.agent.worker_group import Survivors, WorkerProcesses
from kdist_trainer.config import Nodes, Script, TrainConfig
from kdist_trainer.processes import process_tree
from tests.patience import soon

CONFIG = TrainConfig(name="job", nodes=Nodes(min=1, max=1), script=Script(path="train.py"))


def test_what_a_group_has_started_is_ended_with_it_and_so_it_is_in_the_next_group(
    tmp_path: Path,
) -> None:
    assert run_apart(_leave_two_groups, tmp_path) == 0


def test_what_workers_have_started_and_left_goes_on_while_none_of_them_is_lost(
    tmp_path: Path,
) -> None:
    assert run_apart(_leave_a_daemon, tmp_path) == 0


def run_apart(work: Callable[[Path], None], folder: Path) -> int | None:
    """Call `work` in a process of its own, since all processes below it are ended; returns the exit
    code.
    """
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=work, args=(folder,))
    process.start()
    process.join(60)
    return process.exitcode


def _leave_two_groups(scratch: Path) -> None:
    workers = WorkerProcesses()
    survivors = Survivors(CONFIG, scratch)
    first = _start_process()
    survivors.keep(workers)
    assert soon(lambda: not _exists(first), 10.0)
    later = _start_process()
    assert survivors.end_others(workers, timeout_seconds=10) == []
    assert _exists(later), "all of the group had ended before"
    survivors.join(workers, {})
    assert survivors.end_others(workers, timeout_seconds=10) == []
    assert soon(lambda: not _exists(later), 10.0)


def _leave_a_daemon(scratch: Path) -> None:
    process_tree.adopt()
    note = scratch / "daemon"
    daemon = f"(setsid sleep 300 & echo $! > {note}.new; mv {note}.new {note}); exec sleep 300"
    context = start_processes(
        "workers",
        "sh",
        args={0: ("-c", daemon), 1: ("-c", "exec sleep 300")},
        envs={0: {}, 1: {}},
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch / "logs")),
    )
    workers = WorkerProcesses()
    workers.add(context, [0, 1])
    assert soon(note.exists, 30.0)
    left = int(note.read_text())
    assert soon(lambda: left in process_tree.find_children(), 30.0), "its parent has ended"
    assert workers.kill(keep=[0, 1]) == []
    assert _exists(left), "both workers go on"
    os.kill(workers.pid(1), signal.SIGKILL)
    assert soon(lambda: 1 in workers.exits(), 30.0)
    assert workers.kill(keep=[0]) == []
    assert soon(lambda: left not in process_tree.find(), 30.0), "it may be the lost worker's"
    assert workers.living == [0]
    workers.kill()


def _start_process() -> int:
    return subprocess.Popen(["sleep", "300"]).pid


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:  # it has ended and was waited for
        return False
    return True

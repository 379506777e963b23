"""Threads for functions that run while the training continues: one that is free is used again."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from functools import partial

import pytest

from kdist_trainer.processes.threads import BackgroundTask
from tests.house.tree import ROOT
from tests.patience import soon

SECONDS = 60.0


def thread_of_a_function() -> int:
    task = BackgroundTask[int]()
    task.start(threading.get_native_id)
    return task.collect()


def test_functions_one_after_the_other_run_on_one_thread() -> None:
    assert len({thread_of_a_function() for _ in range(50)}) == 1


def test_a_thread_that_is_free_keeps_nothing_of_what_it_has_called() -> None:
    class Held:
        pass

    held, task = Held(), BackgroundTask[int]()
    task.start(partial(id, held))
    task.collect()
    reference = weakref.ref(held)
    del held, task
    assert soon(lambda: reference() is None, SECONDS)


def test_functions_at_the_same_time_run_each_on_a_thread_of_its_own() -> None:
    together = threading.Barrier(8)
    tasks = [BackgroundTask[int]() for _ in range(8)]
    for task in tasks:
        task.start(lambda: together.wait(SECONDS))
    assert sorted(task.collect() for task in tasks) == list(range(8))
    assert soon(lambda: len(background_threads()) <= 4, SECONDS), "few of them are kept"


def test_a_function_that_does_not_end_keeps_no_other_one_waiting() -> None:
    hung, end = BackgroundTask[bool](), threading.Event()
    hung.start(lambda: end.wait(SECONDS))
    assert not hung.wait(0.01)
    assert hung.busy
    assert thread_of_a_function() > 0
    end.set()
    assert hung.collect()
    assert not hung.pending


FORKS = """
import os, threading
from kdist_trainer.processes.threads import BackgroundTask

def run():
    task = BackgroundTask()
    task.start(threading.get_native_id)
    return task.collect()

first = run()
assert run() == first
child = os.fork()
if child == 0:
    os._exit(0 if run() != first else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.sampled
def test_a_forked_process_has_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], cwd=ROOT, check=False, timeout=SECONDS)
    assert done.returncode == 0


def background_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "background"]

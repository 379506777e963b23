"""The queue: each job once at a time, none forgotten, failures ever later."""

from __future__ import annotations

import queue as queues
import threading
import time
from collections.abc import Callable, Iterable

import pytest

from kdist.cluster import Cluster
from kdist_controller import controller as controllers
from kdist_controller import work_queue
from kdist_controller.controller import Controller, Observer
from kdist_controller.election import Election
from kdist_controller.resource import JobKey
from kdist_controller.work_queue import FIRST_PAUSE, LONGEST_PAUSE, WorkQueue

PATIENCE = 20.0
ONE, OTHER = JobKey("ml", "one"), JobKey("ml", "other")


def test_a_job_that_is_added_twice_is_taken_once() -> None:
    queue = WorkQueue()
    queue.add(ONE)
    queue.add(ONE)
    queue.add(OTHER)
    assert {queue.take(), queue.take()} == {ONE, OTHER}
    assert len(queue) == 0


def test_a_job_that_changes_while_it_is_looked_at_comes_again_afterwards() -> None:
    queue = WorkQueue()
    queue.add(ONE)
    assert queue.take() == ONE
    queue.add(ONE)
    queue.add(OTHER)
    assert queue.take() == OTHER  # one is not taken by a second worker meanwhile
    queue.done(ONE)
    assert queue.take() == ONE


def test_the_earlier_of_two_times_counts() -> None:
    queue = WorkQueue()
    queue.add(ONE, after=3600.0)
    queue.add(ONE)
    assert queue.take() == ONE
    queue.done(ONE)
    assert len(queue) == 0


def test_pauses_after_failures_double_up_to_a_limit_and_begin_again_after_a_success() -> None:
    queue = WorkQueue()
    pauses = [queue.count_failure(ONE) for _ in range(40)]
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert max(pauses) == LONGEST_PAUSE
    assert queue.count_failure(OTHER) == FIRST_PAUSE
    queue.forgive(ONE)
    assert queue.count_failure(ONE) == FIRST_PAUSE


def test_a_closed_queue_lets_every_worker_go() -> None:
    queue = WorkQueue()
    taken: list[JobKey | None] = []
    threads = [threading.Thread(target=lambda: taken.append(queue.take())) for _ in range(3)]
    for thread in threads:
        thread.start()
    queue.close()
    for thread in threads:
        thread.join(10.0)
    assert taken == [None, None, None]


def test_a_namespace_gets_no_more_threads_than_its_share() -> None:
    queue = WorkQueue(share=2)
    for number in range(50):
        queue.add(JobKey("greedy", f"job-{number}"))
    taken = [queue.take(), queue.take()]
    queue.add(ONE)
    assert queue.take() == ONE
    rest: list[JobKey | None] = []
    thread = threading.Thread(target=lambda: rest.append(queue.take()))
    thread.start()
    assert taken[0] is not None
    queue.done(taken[0])
    thread.join(10.0)
    assert rest[0] is not None
    assert rest[0].namespace == "greedy"


def test_a_namespace_that_keeps_no_thread_busy_comes_before_one_that_does() -> None:
    queue = WorkQueue(share=8)
    for number in range(4):
        queue.add(JobKey("greedy", f"job-{number}"))
    first = queue.take()
    queue.add(ONE)
    assert first is not None
    assert first.namespace == "greedy"
    assert queue.take() == ONE


def _end(queue: WorkQueue, threads: Iterable[threading.Thread]) -> None:
    """Close the queue, and see its threads end."""
    queue.close()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_each_thread_works_on_a_job_of_its_own_and_ends_with_the_queue() -> None:
    queue, together = WorkQueue(), threading.Barrier(2)
    worked: queues.Queue[tuple[JobKey, str]] = queues.Queue()

    def work(key: JobKey) -> None:
        together.wait(PATIENCE)
        worked.put((key, threading.current_thread().name))

    threads = queue.start(work, threads=2, name="worker")
    queue.add(ONE)
    queue.add(OTHER)
    keys, names = zip(*(worked.get(timeout=PATIENCE) for _ in range(2)), strict=True)
    assert (set(keys), set(names)) == ({ONE, OTHER}, {"worker-0", "worker-1"})
    _end(queue, threads)


def test_a_job_comes_again_if_its_work_says_when_or_fails_and_no_thread_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_queue, "_ERROR_PAUSE", 0.0)
    queue, worked = WorkQueue(), queues.SimpleQueue[JobKey]()
    fates: list[float | Exception | None] = [0.0, ValueError("rubbish"), None, None]

    def work(key: JobKey) -> float | None:
        fate = fates.pop(0)
        worked.put(key)
        if isinstance(fate, Exception):
            raise fate
        return fate

    queue.add(ONE)
    threads = queue.start(work, threads=1, name="worker")
    assert [worked.get(timeout=PATIENCE) for _ in range(3)] == [ONE, ONE, ONE]
    queue.add(OTHER)
    assert worked.get(timeout=PATIENCE) == OTHER, "the job whose work said nothing is over"
    _end(queue, threads)
    said = "ml/one: thread pool worker: unexpected error; again in 0 s"
    assert [record.getMessage() for record in caplog.records] == [said]
    assert "ValueError: rubbish" in caplog.text


def test_the_job_that_was_taken_first_says_how_long_work_takes_at_most() -> None:
    queue = WorkQueue()
    assert queue.longest() == 0.0
    for key in (ONE, OTHER):
        queue.add(key)
    before = time.monotonic()
    first = queue.take()
    between = time.monotonic()
    second = queue.take()
    assert first is not None
    assert second is not None
    now = time.monotonic()
    assert now - between <= queue.longest() <= time.monotonic() - before
    queue.done(first)
    assert queue.longest() <= time.monotonic() - between
    queue.done(second)
    assert queue.longest() == 0.0


class Told:
    """In place of an informer: tells of one job, and watches nothing."""

    def __init__(self, *_: object, notify: Callable[[list[JobKey]], None], **__: object) -> None:
        self.synced = threading.Event()
        self._notify = notify

    def start(self) -> None:
        self._notify([ONE])
        self.synced.set()


def test_a_controller_is_healthy_until_a_worker_is_stuck_or_has_ended(
    connection: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def observe(*_: object, **__: object) -> None:
        began.set()
        assert go_on.wait(PATIENCE)

    monkeypatch.setattr(Observer, "observe", observe)
    monkeypatch.setattr(controllers, "Informer", Told)
    election = Election(connection, "kdist-controller", namespace="ml", identity="first")
    controller = Controller(
        connection, election, lambda _, __: pytest.fail("asked over the network"), ["ml"]
    )
    healthy = {}
    leading = threading.Thread(target=controller.run, daemon=True)
    with monkeypatch.context() as patch:
        patch.setattr(controllers, "_STUCK_SECONDS", 1e-9)
        healthy["idle"] = controller.healthy
        leading.start()
        assert began.wait(PATIENCE)
        healthy["stuck"] = controller.healthy
    healthy["busy for a short time"] = controller.healthy
    go_on.set()
    controller.stop()
    leading.join(PATIENCE)
    healthy["ended"] = controller.healthy
    expected = {"idle": True, "stuck": False, "busy for a short time": True, "ended": False}
    assert healthy == expected

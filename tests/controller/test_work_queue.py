"""The queue: each job once at a time, none forgotten, failures ever later."""

from __future__ import annotations

import threading

from kdist_controller.resource import JobKey
from kdist_controller.work_queue import FIRST_PAUSE, LONGEST_PAUSE, WorkQueue

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
    pauses = [queue.pause(ONE) for _ in range(40)]
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert max(pauses) == LONGEST_PAUSE
    assert queue.pause(OTHER) == FIRST_PAUSE
    queue.forgive(ONE)
    assert queue.pause(ONE) == FIRST_PAUSE


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

"""Which processes below this one are found and killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from kdist_trainer.processes import process_tree

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def families() -> Iterator[list[tuple[subprocess.Popen[str], int]]]:
    """Two processes that each have a child, with its pid."""
    made = []
    try:
        for _ in range(2):
            parent = subprocess.Popen(
                [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
            )
            assert parent.stdout is not None
            pid = next(int(line) for line in parent.stdout if line.strip())
            made.append((parent, pid))
        yield made
    finally:
        process_tree.kill(below=[pid for parent, child in made for pid in (parent.pid, child)])
        for parent, _ in made:
            parent.communicate()


def test_spared_processes_are_left_out_with_all_below_them(
    families: list[tuple[subprocess.Popen[str], int]],
) -> None:
    (first, first_child), (second, second_child) = families
    found = set(process_tree.find(spared=[first.pid]))
    assert {second.pid, second_child} <= found
    assert not {first.pid, first_child} & found
    kept = set(process_tree.find(keep=[first.pid]))
    assert first.pid not in kept
    assert first_child in kept


def test_what_is_killed_takes_all_below_it_along_and_spares_the_others(
    families: list[tuple[subprocess.Popen[str], int]],
) -> None:
    (first, first_child), (second, second_child) = families
    assert not process_tree.kill(below=[second.pid])
    running = process_tree.find(below=[first.pid, second.pid, second_child])
    assert set(running) == {first.pid, first_child}

"""A rank that is killed leaves no loader processes behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import soon

pytestmark = pytest.mark.processes

_RANK = """
import os, time
from torch.utils.data import DataLoader
from kdist_trainer.data.loader import exit_with_rank

class Pids:
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return os.getpid(), os.getppid()

if __name__ == "__main__":
    context = {"multiprocessing_context": "forkserver", "worker_init_fn": exit_with_rank}
    pids = iter(DataLoader(Pids(), batch_size=None, num_workers=1, collate_fn=list, **context))
    print(*next(pids), flush=True)
    time.sleep(3600)
"""


@pytest.mark.sampled
def test_loader_processes_end_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(_RANK)
    rank = subprocess.Popen(
        [sys.executable, str(tmp_path / "rank.py")], stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    loader, server = rank.stdout.readline().split()
    rank.kill()
    rank.wait()
    rank.stdout.close()
    assert soon(lambda: not (alive(loader) or alive(server)), 30), "they stay for ever"


def alive(pid: str) -> bool:
    """Whether a process runs, and is not one that only waits to be looked after."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False

"""Storage that stops answering in the middle of a save: ranks that continue in place do not wait
for it, and the save ends while they train.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kdist.job.local.agents import fetch_samples

from .test_in_place import wait_for_generation
from .test_renewal import GROUPS, LOSSES
from .training_run import Rank, TrainingRun, describe_job, is_alive, kill

pytestmark = [pytest.mark.processes, pytest.mark.chaos, pytest.mark.sampled]

CODE = Path(__file__).parent / "code"


class Storage:
    """The storage of `code/paused.py`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def hold(self) -> None:
        for each in self.folder.glob("reached-*"):
            each.unlink()
        (self.folder / "hold").touch()

    def release(self) -> None:
        (self.folder / "hold").unlink()

    def waiting(self) -> dict[int, int]:
        """The processes that wait for it, and the steps that they save."""
        return {
            int(path.name.partition("-")[2]): int(path.read_text())
            for path in self.folder.glob("reached-*")
        }


def describe(storage: Storage, at: str, **train: Any) -> dict[str, Any]:
    settings = {
        "workload": "paused:Paused",
        "options": {"folder": str(storage.folder), "at": at},
        "steps": 1_000_000,
        "globalBatch": 64,
        "syncEverySteps": 5,
        "checkpoint": {"every": {"seconds": 1}},
        **train,
    }
    group: dict[str, Any] = {"nodes": 1, "procsPerNode": 2, "code": str(CODE)}
    return describe_job("paused", maxRestarts=100, train=settings, **group)


def commits(run: TrainingRun) -> list[int]:
    return [event["step"] for event in run.events("commit")]


def shown_bytes(run: TrainingRun) -> set[Any]:
    """The size of the last checkpoint, as the agents show it."""
    return {one.status.get("checkpoint_bytes") for one in fetch_samples(run.folder).values()}


def find_other(run: TrainingRun, pid: int) -> Rank:
    """The rank that is not this process."""
    others: list[Rank] = run.wait_until(
        lambda: len(found := run.ranks()) == 2 and [rank for rank in found if rank.pid != pid],
        "two ranks",
    )
    (other,) = others
    return other


@pytest.mark.parametrize("at", ["manifest", "rename", "latest"])
def test_a_recovery_in_place_does_not_wait_for_a_commit_which_ends_beside_it(
    at: str, tmp_path: Path
) -> None:
    storage = Storage(tmp_path / "storage")
    storage.hold()
    with TrainingRun(tmp_path, describe(storage, at)) as run:
        run.wait_until(storage.waiting, "a commit that waits for the storage")
        ((committer, step),) = storage.waiting().items()
        for generation in (2, 3):
            kill(find_other(run, committer).pid)
            wait_for_generation(run, generation, world_size=2)
            assert not commits(run), "the commit still waits"
        storage.release()
        run.wait_until(partial(commits, run), "the commit")
        assert commits(run)[0] == step
        assert committer in [rank.pid for rank in run.ranks()], "it was kept"
        assert not run.events("save_cut")
        assert all("kept_step" in one for one in run.events("generation")[1:])
        (found,) = run.checkpoints.glob(f"step-{step:08}-e?")
        size = run.events("commit")[0]["bytes"]
        assert size == sum(each.stat().st_size for each in found.iterdir()) - manifest_bytes(found)
        run.wait_until(lambda: shown_bytes(run) == {size}, "the size in the metrics")
        for rank in run.ranks():
            kill(rank.pid)
        run.wait_until(partial(went_back, run, step), "training from a checkpoint")


def have_ended(pids: list[int]) -> bool:
    return not any(map(is_alive, pids))


def manifest_bytes(folder: Path) -> int:
    return (folder / "manifest.json").stat().st_size


def went_back(run: TrainingRun, step: int) -> bool:
    """Whether the newest group has begun at a checkpoint of this step or later, and trains."""
    newest = run.events("generation")[-1]
    lines = [one["step"] for one in run.steps() if one["generation"] == newest["generation"]]
    start = newest["from_step"]
    return "kept_step" not in newest and start >= step and start + 1 in lines


def test_a_rollback_gives_up_the_save_that_a_rank_carries(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "storage")
    with TrainingRun(tmp_path, describe(storage, "write", onNonfinite="rollback")) as run:
        run.wait_until(partial(commits, run), "a checkpoint")
        storage.hold()
        run.wait_until(lambda: len(storage.waiting()) == 2, "a save")
        saved, carrier = commits(run)[-1], run.ranks()[0].pid
        cut = storage.waiting()[carrier]
        kill(find_other(run, carrier).pid)
        wait_for_generation(run, 2, world_size=2)
        run.wait_until(lambda: storage.waiting()[carrier] > cut, "the save that one carries")
        carried = storage.waiting()[carrier]
        (storage.folder / "bad").touch()
        back = run.wait_until(partial(run.events, "rolled_back"), "the rollback")[0]
        assert back["step"] == saved
        assert back["refused"] > carried
        storage.release()
        run.wait_until(lambda: len(run.events("commit")) > 3, "more checkpoints")
        run.wait_until(lambda: not [*run.checkpoints.glob("*-carried")], "its files to be removed")
        long = [each["step"] for each in run.events("commit") if each["seconds"] > 0.3]
        assert carried not in long, "what was rolled back is not saved"
        kept = commits(run)[commits(run).index(saved) :]
        assert kept == sorted(kept)


def test_a_rank_that_carries_a_save_is_replaced_only_after_it(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "storage")
    storage.hold()
    train = {
        "workload": "crowded:Crowded",
        "options": {"groups": GROUPS, "folder": str(storage.folder)},
        "steps": 1_000_000,
        "globalBatch": 64,
        "syncEverySteps": 5,
        "checkpoint": {"every": {"seconds": 1}},
    }
    job = describe_job("crowded", nodes=2, code=str(CODE), train=train, maxRestarts=100)
    job["spec"]["collectiveTimeoutSeconds"] = 600
    with TrainingRun(tmp_path, job) as run:
        run.wait_until(lambda: len(storage.waiting()) == 2, "a save")
        crowded = next(rank.pid for rank in run.ranks() if rank.node == "node-0")
        for generation in range(2, LOSSES + 2):
            kill(find_other(run, crowded).pid)
            wait_for_generation(run, generation, world_size=2)
        last = run.steps()[-1]["step"]
        run.wait_until(lambda: run.steps()[-1]["step"] > last + 300, "seconds of training")
        assert crowded in [rank.pid for rank in run.ranks()], "it has too many groups, and a save"
        assert not commits(run)
        storage.release()
        wait_for_generation(run, LOSSES + 2, world_size=2)
        assert commits(run), "the save was not lost with the process"
        assert crowded not in [rank.pid for rank in run.ranks()]
        assert run.events("generation")[-1]["reason"] == "renew"


def test_a_script_whose_saves_are_cut_twice_waits_for_the_third(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "storage")
    storage.hold()
    job = describe_job("saving", nodes=1, procsPerNode=2, code=str(CODE), maxRestarts=100, train={})
    del job["spec"]["train"]
    run = TrainingRun(tmp_path, job)
    script = {"path": "saving.py", "args": [str(storage.folder), str(run.checkpoints)]}
    job["spec"]["script"] = script
    run = TrainingRun(tmp_path, job)

    def steps(generation: int) -> dict[int, bool]:
        """The steps that it has done, and whether there was a checkpoint after each."""
        lines = (storage.folder / "steps").read_text().split("\n")[:-1]
        found = [list(map(int, line.split())) for line in lines]
        return {step: bool(saved) for number, step, saved in found if number == generation}

    def goes_on(generation: int, step: int) -> bool:
        return max(steps(generation), default=0) > step + 5

    with run:
        for generation in (1, 2):
            run.wait_until(lambda: len(storage.waiting()) == 2, "a save")
            (step,) = set(storage.waiting().values())
            run.wait_until(partial(goes_on, generation, step), "that it goes on meanwhile")
            gone = list(storage.waiting())
            kill(gone[-1])
            run.wait_until(partial(have_ended, gone), "the others to end")
            storage.hold()
        run.wait_until(lambda: len(storage.waiting()) == 2, "the third save")
        (step,) = set(storage.waiting().values())
        storage.release()
        run.wait_until(lambda: len(steps(3)) > step + 5, "more steps")
    assert commits(run)[0] == step
    assert len(run.events("save_cut")) == 2
    assert all(is_saved for number, is_saved in steps(3).items() if number >= step), (
        "it has waited for the save"
    )

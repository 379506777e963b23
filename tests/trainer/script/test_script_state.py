"""All that a script's training is comes back: modules and optimizers, groups and layers that change
in mid-run, scalers, NumPy's numbers, objects and generators of each rank.

A training is interrupted twice and compared, bit by bit, with one that is not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kdist_trainer import Checkpointer, Reporter, log
from kdist_trainer.checkpoint.manifest import UnloadableStateError
from kdist_trainer.errors import CheckpointMismatchError, ConfigError
from kdist_trainer.metrics.transport import shared_stats
from kdist_trainer.script.state import Part, RankPart
from kdist_trainer.state import describe
from tests.trainer.checkpoint.ranks import Rank, run_ranks
from tests.trainer.script.script_trainings import (
    Drawing,
    Sampler,
    Schedules,
    Training,
    TwoPlayers,
    Unfreezing,
    Unused,
    checkpointer_of,
    train,
)

STEPS = 9
STOPS = (5, 7, STEPS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Has the next `Checkpointer` find its job's checkpoints in a folder of this name."""
    former = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("KDIST_RUN_ID", "run-1")

    def choose(name: str) -> None:
        monkeypatch.setenv("KDIST_CHECKPOINTS", str(tmp_path / name))

    choose("checkpoints")
    yield choose
    signal.signal(signal.SIGTERM, former)


@pytest.mark.parametrize(
    "kind", [TwoPlayers, Unfreezing, Unused, Schedules, Drawing], ids=lambda one: one.__name__
)
@pytest.mark.sampled
def test_a_training_that_is_interrupted_twice_ends_as_one_that_is_not(
    kind: type[Training], folder: Callable[[str], None]
) -> None:
    folder("whole")
    whole = train(kind, STEPS)
    folder("interrupted")
    for stop in STOPS:
        resumed = train(kind, stop)
    found = [torch.equal(*pair) for pair in zip(resumed.tensors(), whole.tensors(), strict=True)]
    assert all(found), found


def test_the_states_are_there_before_resume_and_keep_their_types(
    folder: Callable[[str], None],
) -> None:
    train(Drawing, 4)
    with checkpointer_of(Drawing()) as checkpointer:
        assert checkpointer.state == {1: (1,), 2: (2,), 3: (3,), 4: (4,)}
        assert checkpointer.shared_state == {"last": {"step": 4}}
        assert checkpointer.saved_states == [checkpointer.state]
        assert checkpointer.resume() == 4


@pytest.mark.parametrize(
    ("values", "path"),
    [({"a": [object()]}, "Checkpointer.state['a'][0]"), ({(object,): 1}, "Checkpointer.state")],
)
def test_what_a_state_cannot_hold_is_refused_with_its_path(
    values: dict[Any, Any], path: str, folder: Callable[[str], None]
) -> None:
    checkpointer = checkpointer_of(Training())
    checkpointer.state = values
    with pytest.raises(UnloadableStateError) as refused:
        checkpointer.save(1)
    assert path in str(refused.value)
    checkpointer.close()


def test_edits_of_the_script_lose_and_are_told(
    folder: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    def build(rate: float, length: int) -> Training:
        one = Training()
        one.optimizer = torch.optim.AdamW(one.model.parameters(), lr=rate, weight_decay=rate)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(one.optimizer, T_max=length)
        one.extra = {"scheduler": cosine}
        return one

    def resume(one: Training) -> float:
        with checkpointer_of(one) as checkpointer:
            for step in range(checkpointer.resume() + 1, 3):
                one.do(step, checkpointer)
                one.extra["scheduler"].step()
                checkpointer.maybe_save(step)
        return float(one.optimizer.param_groups[0]["lr"])

    saved = resume(build(0.1, 8))
    assert resume(build(0.1, 8)) == saved
    assert "settings-edited" not in capfd.readouterr().err, "nothing was edited"
    edited = build(0.01, 16)
    assert resume(edited) == saved
    assert edited.extra["scheduler"].T_max == 8
    said = capfd.readouterr().err
    for part in (
        "optimizer.param_groups[0].lr was 0.1 and is 0.01",
        "weight_decay was 0.1 and is 0.01",
        "scheduler.T_max was 8 and is 16",
        "The saved values win",
    ):
        assert part in said


def refusal(work: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as refused:
        work()
    return str(refused.value)


def test_other_classes_objects_and_groups_are_refused_with_what_to_do(
    folder: Callable[[str], None],
) -> None:
    def resume(change: Callable[[Training], None], kind: type[Training]) -> str:
        one = kind()
        change(one)
        checkpointer = checkpointer_of(one)
        said = refusal(checkpointer.resume, CheckpointMismatchError)
        checkpointer.close()
        return said

    train(Drawing, 2)
    assert "it has no 'other'" in resume(
        lambda one: one.extra.update(stateful={"other": Sampler()}), Drawing
    )

    def take_sgd(one: Training) -> None:
        one.optimizer = torch.optim.SGD(one.model.parameters(), lr=0.1)

    assert "optimizer was AdamW and is SGD" in resume(take_sgd, Drawing)

    def add_early(one: Training) -> None:
        one.model.append(nn.Linear(2, 2))
        one.optimizer.add_param_group({"params": one.model[2].parameters()})

    assert "only after Checkpointer.resume()" in resume(add_early, Drawing)
    folder("groups")
    train(Unfreezing, 4)

    def lack_a_layer(one: Training) -> None:
        one.model = nn.Sequential(nn.Identity(), one.model[1])

    assert "0.weight is not in the model" in resume(lack_a_layer, Unfreezing)


def test_steps_that_go_back_are_refused_with_the_reason(folder: Callable[[str], None]) -> None:
    train(Training, 4)
    one = Training()
    with checkpointer_of(one) as checkpointer:
        for save in (checkpointer.save, checkpointer.maybe_save, checkpointer.finish):
            said = refusal(lambda save=save: save(3), ValueError)  # type: ignore[misc]
            assert "step 3 comes after step 4, which is saved" in said
        assert checkpointer.resume() == 4
        checkpointer.save(np.int64(6))  # type: ignore[arg-type]  # what len() of arrays gives
        assert "step 5 comes after step 6" in refusal(lambda: checkpointer.save(5), ValueError)


def test_a_second_checkpointer_is_refused_until_the_first_is_closed(
    folder: Callable[[str], None],
) -> None:
    with checkpointer_of(Training()):
        assert "give one Checkpointer all modules and optimizers by name" in refusal(
            lambda: checkpointer_of(Training()), ConfigError
        )
    checkpointer_of(Training()).close()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"model": {"a b": nn.Linear(1, 1)}}, "names are identifiers"),
        ({"model": {"forward": nn.Linear(1, 1)}}, "exists"),
        ({"optimizer": {}}, "at least one optimizer"),
        ({"optimizer": {"state": torch.optim.SGD([torch.zeros(1)])}}, "choose another name"),
        ({"optimizer": torch.optim.SGD([torch.zeros(2)])}, "is in no module of model="),
        ({"keep": {"best": {}}}, "only a managed training"),
        ({"model": "model"}, "not of torch's Module"),
    ],
)
def test_arguments_that_no_checkpoint_can_hold_are_refused(
    arguments: dict[str, Any], reason: str
) -> None:
    module = nn.Linear(1, 1)
    given = {"model": module, "optimizer": torch.optim.SGD(module.parameters()), **arguments}
    assert reason in refusal(lambda: Checkpointer(**given), ConfigError)


def skip_and_train(loader: Any, last: int) -> list[float]:
    """A loop that begins its loader again and skips what is done; the numbers that it has drawn."""
    one = Training()
    drawn = []
    with checkpointer_of(one) as checkpointer:
        checkpointer.resume()
        for step, (batch,) in enumerate(loader(), 1):
            if checkpointer.skips(step):
                continue
            if step > last:
                break
            drawn.append(float(batch.sum()) + float(torch.rand(1)))
            one.do(step, checkpointer)
            checkpointer.maybe_save(step)
    return drawn


def test_a_loop_that_skips_what_is_done_goes_on_with_the_generators_as_they_were(
    folder: Callable[[str], None],
) -> None:
    class Noisy(torch.utils.data.Dataset[tuple[Tensor]]):
        def __getitem__(self, index: int) -> tuple[Tensor]:
            return (index + torch.rand(2),)

        def __len__(self) -> int:
            return 10

    def loader() -> Any:
        return torch.utils.data.DataLoader(Noisy(), batch_size=1)

    folder("whole")
    whole = skip_and_train(loader, 8)
    folder("interrupted")
    skip_and_train(loader, 5)
    assert skip_and_train(loader, 8) == whole[4:], "the batch of a skipped step draws numbers too"


def test_reporter_counts_on_from_the_resumed_step(
    folder: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KDIST_METRICS_SOCKET", str(tmp_path / "nobody"))
    train(Training, 4)
    reporter = Reporter()
    reporter.stats.last_step = None
    with checkpointer_of(Training()) as checkpointer:
        done = checkpointer.resume()
    reporter.step(samples=1)
    assert (done, shared_stats().last_step) == (4, 5)
    reporter.close()


class Rescaling(Sampler):
    """One that goes on at any number of ranks."""

    def load_all_state_dicts(self, states: list[dict[Any, Any]], rank: int, size: int) -> None:
        self.position = sum(int(one["position"]) for one in states) * 100 + 10 * rank + size


def keep_cursors(
    rank: Rank, root: Path, last: int, kind: type[Sampler] = Rescaling
) -> tuple[int, Any, Any, int, float, str]:
    """(resumed step, state, shared state, number of saved states, a number drawn then, log)."""
    lines: list[bytes] = []
    log.write_to(lines.append)
    os.environ |= {"KDIST_CHECKPOINTS": str(root), "KDIST_RUN_ID": "run-1"}
    os.environ["KDIST_GENERATION"] = str(rank.generation)
    one = Training()
    torch.manual_seed(rank.rank)
    sampler = kind()
    one.extra = {"stateful": {"sampler": sampler}}
    with checkpointer_of(one) as checkpointer:
        seen = dict(checkpointer.state)
        done = checkpointer.resume()
        assert checkpointer.state == seen
        found = (
            done,
            seen,
            dict(checkpointer.shared_state),
            len(checkpointer.saved_states),
            float(torch.rand(1)),
        )
        for step in range(done + 1, last + 1):
            sampler.draw()
            checkpointer.state["row"] = (rank.rank, step)
            checkpointer.shared_state["best"] = (rank.rank, step)
            checkpointer.maybe_save(step)
    return (*found, b"".join(lines).decode())


@pytest.mark.processes
@pytest.mark.sampled
def test_each_rank_has_its_own_state_and_a_change_of_their_number_is_told_by_name(
    tmp_path: Path,
) -> None:
    root = tmp_path / "checkpoints"
    run_ranks(3, keep_cursors, tmp_path, root, 2)
    same = run_ranks(3, keep_cursors, tmp_path, root, 2, generation=2)
    assert [one[:4] for one in same] == [
        (2, {"row": (rank, 2)}, {"best": (0, 2)}, 3) for rank in range(3)
    ]
    assert len({one[4] for one in same}) == 3, "each rank goes on with its own numbers"
    assert not any("rank-parts-changed" in one[5] for one in same)
    fewer = run_ranks(2, keep_cursors, tmp_path, root, 4, generation=3)
    assert [one[:4] for one in fewer] == [
        (2, {"row": (rank, 2)}, {"best": (0, 2)}, 3) for rank in range(2)
    ]
    assert [one[4] for one in fewer] == [one[4] for one in same[:2]]
    assert "rank 2: state['row'], random numbers" in fewer[0][5]
    more = run_ranks(3, keep_cursors, tmp_path, root, 4, generation=4)
    assert [one[1] for one in more] == [{"row": (0, 4)}, {"row": (1, 4)}, {}]
    assert "New: rank 2, with an empty Checkpointer.state" in more[0][5]


def test_an_object_says_how_it_goes_on_at_another_number_of_ranks_or_is_refused() -> None:
    def part(position: int) -> Part:
        sampler = Sampler()
        sampler.position = position
        found = RankPart({"sampler": sampler}).read()
        found.own["stateful"]["sampler"]["array"] = np.arange(3)  # as it is read back
        return found

    parts = [part(3), part(4)]
    one = Rescaling()
    RankPart({"sampler": one}).load(parts, 2, 3)
    assert one.position == 723
    fixed = RankPart({"sampler": Sampler()})
    fixed.load(parts, 1, 2)
    for size in (1, 3):
        with pytest.raises(CheckpointMismatchError) as raised:
            fixed.load(parts, 0, size)
        told = f"saved by 2 ranks, and the job has {size} now: stateful['sampler'] (Sampler)"
        assert told in str(raised.value)
    RankPart({}).load([Part({}, {}), Part({}, {})], 2, 3)


def test_what_a_resume_would_not_ask_for_is_found_before_it_counts(
    folder: Callable[[str], None],
) -> None:
    one = Unused()
    with checkpointer_of(one) as checkpointer:
        one.do(1, checkpointer)
        script = checkpointer._script
        state = {**one_state(checkpointer), "ranks": None}
        assert script.find_problems(state, describe(state)) == []
        state["model"]["ghost"] = torch.zeros(1)
        problems = script.find_problems(state, describe(state))
        assert any("model.ghost" in one for one in problems), problems


def one_state(checkpointer: Checkpointer) -> dict[str, Any]:
    return checkpointer._objects.read()

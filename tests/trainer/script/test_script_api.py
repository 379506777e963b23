"""`Checkpointer` in a user's own loop: it resumes bitwise, stops when asked on one rank, and is
nothing outside kdist.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kdist_trainer import Checkpointer, Reporter
from kdist_trainer.checkpoint import interval
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.manifest import CheckpointDirectory, read_manifest
from kdist_trainer.errors import CheckpointMismatchError
from kdist_trainer.metrics.transport import GAUGES, SLOTS, unpack
from kdist_trainer.processes import signals
from tests.trainer.checkpoint.exported import digest_of, digest_of_export
from tests.trainer.checkpoint.ranks import Rank, prepared_context, run_ranks

pytestmark = pytest.mark.processes

STEPS = 300
EVERY = 50


def enter_kdist(root: Path, generation: int) -> None:
    """The environment that kdist gives a script."""
    os.environ |= {
        "KDIST_CHECKPOINTS": str(root),
        "KDIST_RUN_ID": "run-1",
        "KDIST_GENERATION": str(generation),
    }


def train(
    rank: Rank, root: Path | None, stop_at: int = -1, crash_at: int = -1
) -> tuple[str, int, int, float, str, str]:
    """A user's loop. Returns how it ended, its first and last step, the learning rate, digests of
    all state and of the model.
    """
    if root is not None:
        enter_kdist(root, rank.generation)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[30, 60])
    with Checkpointer(
        model=model, optimizer=optimizer, scheduler=scheduler, every_steps=EVERY
    ) as checkpointer:
        step = first = checkpointer.resume()
        assert checkpointer.state.get("steps", 0) == first
        while step < STEPS and not checkpointer.stop_requested:
            torch.manual_seed(step * 100 + rank.rank)
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            checkpointer.state["steps"] = step
            if step == stop_at and rank.rank == 1:
                signal.raise_signal(signal.SIGTERM)
            if step == crash_at:
                return "crashed", first, step, 0.0, "", ""
            checkpointer.maybe_save(step)
        if not checkpointer.stop_requested:
            checkpointer.finish(step, accuracy=0.5)
        word = "stopped" if checkpointer.stop_requested else "done"
    digest = hashlib.sha256()
    moments = optimizer.state_dict()["state"][0]
    for tensor in (*model.state_dict().values(), *(moments[name] for name in sorted(moments))):
        digest.update(tensor.numpy().tobytes())
    return (
        word,
        first,
        step,
        float(scheduler.get_last_lr()[0]),
        digest.hexdigest(),
        digest_of(model.module.state_dict()),
    )


@pytest.mark.sampled
def test_a_script_that_is_asked_to_stop_on_one_rank_saves_on_all_and_resumes_to_the_bit(
    tmp_path: Path,
) -> None:
    uninterrupted = run_ranks(2, train, tmp_path, None)
    assert [one[:3] for one in uninterrupted] == [("done", 0, STEPS)] * 2
    root = tmp_path / "checkpoints"
    stopped = run_ranks(2, train, tmp_path, root, 5)
    word, first, last, *_, weights = stopped[0]
    assert (word, first) == ("stopped", 0)
    assert 5 <= last < STEPS
    assert stopped[1][:3] == stopped[0][:3], "all ranks stop at the same step"
    directory = CheckpointDirectory(root)
    assert directory.committed()[0].step == last, "what had been done is saved"
    assert digest_of_export(root, step=last) == weights != stopped[1][-1], (
        "running means differ, and all are rank 0's"
    )
    claim = Lock(root).last()
    assert claim is not None
    assert claim.released
    resumed = run_ranks(2, train, tmp_path, root, generation=2)
    assert [one[:3] for one in resumed] == [("done", last, STEPS)] * 2
    assert [one[3:] for one in resumed] == [one[3:] for one in uninterrupted], (
        "the same rate and bits as without a break"
    )
    done = directory.done()
    assert done is not None
    assert done["run_id"] == "run-1"
    assert done["step"] == STEPS
    assert done["outcome"] == "done"
    assert done["accuracy"] == 0.5


@pytest.mark.sampled
def test_a_script_that_dies_resumes_from_its_last_regular_save(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert run_ranks(1, train, tmp_path, root, -1, 2 * EVERY + 7)[0][0] == "crashed"
    for one in CheckpointDirectory(root).committed():
        assert read_manifest(one.path).samples_seen is None, "nobody has counted them"
    assert run_ranks(1, train, tmp_path, root, generation=2)[0][:3] == ("done", 2 * EVERY, STEPS)


def report_saves(rank: Rank, root: Path, socket_path: str) -> None:
    """Three steps of a script that reports them, each saved."""
    os.environ["KDIST_METRICS_SOCKET"] = socket_path
    enter_kdist(root, rank.generation)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        Reporter() as reporter,
        Checkpointer(model=model, optimizer=optimizer, every_seconds=60) as checkpointer,
    ):
        first = checkpointer.resume()
        for step in range(first + 1, first + 4):
            reporter.step(step=step)
            checkpointer.save(step, required=True)


@pytest.mark.sampled
def test_the_checkpoints_of_a_script_are_in_its_metrics(tmp_path: Path) -> None:
    address = tmp_path / "metrics"
    for generation, attempts in ((1, [3, 0]), (2, [3, 1])):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
            agent.bind(str(address))
            root = tmp_path / "checkpoints"
            run_ranks(1, report_saves, tmp_path, root, str(address), generation=generation)
            agent.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    last = unpack(agent.recv(2048))
        address.unlink()
        assert last.gauges[GAUGES["kdist_checkpoint_last_success_step"]] == 3 * generation
        assert last.gauges[GAUGES["kdist_checkpoint_interval_seconds"]] == 60
        slots = SLOTS["kdist_checkpoint_attempts_total"]
        assert list(last.counters[slots]) == attempts


def save_by_itself(rank: Rank, root: Path) -> tuple[list[int], float | None]:
    """A script that names no interval, with short bounds; the steps that are saved, and what a save
    costs this rank.
    """
    enter_kdist(root, rank.generation)
    interval._LEAST_SECONDS = 0.3  # type: ignore[misc]
    model = DistributedDataParallel(nn.Linear(3, 3))
    saved: list[int] = []
    with Checkpointer(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    ) as checkpointer:
        step = checkpointer.resume()
        while len(saved) < 3:
            step += 1
            model(torch.ones(1, 3)).sum().backward()
            if checkpointer.maybe_save(step):
                saved.append(step)
        return saved, checkpointer._clock.interval.cost


@pytest.mark.sampled
def test_a_script_that_names_no_interval_saves_by_itself_on_all_ranks(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    (saved, cost), (other, _) = run_ranks(2, save_by_itself, tmp_path, root)
    assert saved == other
    assert cost is not None
    assert cost > 0
    names = [one["event"] for one in RunLedger(root).events()]
    assert names.count("save_interval") == 1
    assert names.count("commit") >= 2


def resume_another_model(rank: Rank, root: Path) -> str:
    enter_kdist(root, rank.generation)
    model = nn.Linear(3, 3)
    checkpointer = Checkpointer(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        checkpointer.resume()
    except CheckpointMismatchError as error:
        return str(error)
    return "resumed"


@pytest.mark.sampled
def test_a_script_with_another_model_is_reported_what_does_not_fit(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    run_ranks(1, train, tmp_path, root)
    said = run_ranks(1, resume_another_model, tmp_path, root, generation=2)[0]
    assert "optimizer was AdamW and is SGD" in said


def count_signals(answers: Connection, root: Path) -> None:
    enter_kdist(root, 1)
    signals.SAME_REQUEST_SECONDS = 0  # type: ignore[misc]  # the test need not wait
    model = nn.Linear(2, 2)
    checkpointer = Checkpointer(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    answers.send("ready")
    assert checkpointer._agreement is not None
    while not checkpointer._agreement.requested:
        time.sleep(0.001)
    assert not checkpointer.stop_requested, "one rank's flag is no agreement yet"
    assert checkpointer.maybe_save(1)
    answers.send(checkpointer.stop_requested)
    while True:
        signal.pause()


def test_the_first_sigterm_saves_and_stops_and_a_later_one_ends_the_process_at_once(
    tmp_path: Path,
) -> None:
    context = prepared_context()
    ours, theirs = context.Pipe()
    process = context.Process(
        target=count_signals, args=(theirs, tmp_path / "checkpoints"), daemon=True
    )
    process.start()
    assert ours.poll(120)
    assert ours.recv() == "ready"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    assert ours.poll(120)
    assert ours.recv() is True
    assert [one.step for one in CheckpointDirectory(tmp_path / "checkpoints").committed()] == [1]
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    assert process.exitcode == 143


def test_outside_kdist_a_script_runs_as_if_there_were_no_checkpointer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("KDIST_CHECKPOINTS", "KDIST_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    before = signal.getsignal(signal.SIGTERM)
    model = nn.Linear(2, 2)
    with Checkpointer(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), every_steps=1
    ) as checkpointer:
        assert checkpointer.resume() == 0
        assert not checkpointer.maybe_save(1)
        checkpointer.save(1)
        checkpointer.finish(1)
        assert not checkpointer.stop_requested
    assert capfd.readouterr().err.count("checkpoints-off") == 1
    assert signal.getsignal(signal.SIGTERM) is before
    assert list(tmp_path.iterdir()) == []

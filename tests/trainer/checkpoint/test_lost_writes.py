"""Every point of a recorded save is a crash after which un-synced writes and names are lost or
garbled: old or new remains.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.manifest import (
    CheckpointDirectory,
    DamagedCheckpointError,
    check_digests,
)
from kdist_trainer.checkpoint.reader import inspect
from kdist_trainer.checkpoint.storage import Operation
from tests.trainer.checkpoint.disk import Disk, Fate
from tests.trainer.checkpoint.states import load, open_store, resumable_step, save

OLD, NEW = 1, 2
Decide = Callable[[bool], Fate]


@dataclass(frozen=True)
class Recording:
    """The operations of saving NEW over a folder that holds OLD; `acknowledged` of them had been
    done when save returned.
    """

    before: Path
    root: Path
    operations: list[Operation]
    renamed: int
    acknowledged: int


def record(folder: Path, *, keep: int) -> Recording:
    root = folder / "checkpoints"
    store = open_store(root, keep=keep)
    load(store)
    assert save(store, OLD).ok
    before = Path(shutil.copytree(root, folder / "before"))
    operations: list[Operation] = []
    with storage.observed(operations.append):
        assert save(store, NEW).ok
    name = f"step-{NEW:08d}-e1"
    renamed = next(
        at
        for at, one in enumerate(operations)
        if one.name == "rename" and one.target and one.target.name == name
    )
    latest = next(
        at
        for at, one in enumerate(operations)
        if one.name == "replace" and one.target and one.target.name == "LATEST"
    )
    acknowledged = (
        next(at for at in range(latest, len(operations)) if operations[at].name == "fsync_folder")
        + 1
    )
    return Recording(before, root, operations, renamed, acknowledged)


@pytest.fixture(scope="module", params=[1, 3], ids=["keep=1", "keep=3"])
def recording(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Recording:
    return record(tmp_path_factory.mktemp("recording"), keep=request.param)


def disk_after(recording: Recording, operations: list[Operation]) -> Disk:
    disk = Disk(recording.before)
    disk.root = recording.root
    for operation in operations:
        disk.apply(operation)
    return disk


def chosen(root: Path) -> int | None:
    """The step that the reader would choose: the newest whose manifest, index and digests
    verify.
    """
    for one in Lock(root).valid(CheckpointDirectory(root).committed()):
        try:
            found = inspect(one.path)
            check_digests(one.path, found.manifest, found.manifest.files)
        except DamagedCheckpointError:
            continue
        assert found.state["step"] == one.step
        return one.step
    return None


def extremes(pending: int) -> Iterator[Decide]:
    """All lost, all kept, all garbled, only the names, only the writes; then each single piece
    against the rest.
    """
    yield lambda _: "lost"
    yield lambda _: "kept"
    yield lambda is_write: "garbled" if is_write else "kept"
    yield lambda is_write: "lost" if is_write else "kept"
    yield lambda is_write: "kept" if is_write else "lost"
    for single in range(min(pending, 6)):
        for one, rest in (("lost", "kept"), ("kept", "lost"), ("garbled", "kept")):
            yield one_against_the_rest(single, one, rest)  # type: ignore[arg-type]


def one_against_the_rest(single: int, one: Fate, rest: Fate) -> Decide:
    asked = iter(range(1 << 30))

    def decide(is_write: bool) -> Fate:
        fate = one if next(asked) == single else rest
        return fate if is_write or fate != "garbled" else "lost"

    return decide


def at_random(seed: int) -> Decide:
    draw = random.Random(seed)
    return lambda is_write: draw.choice(
        ("kept", "lost", "garbled") if is_write else ("kept", "lost")
    )


def crash_points(operations: list[Operation], *, stride: int) -> list[int]:
    """Before every operation but writes, and before every `stride`-th of those: writes in a row
    differ little.
    """
    writes = [at for at, one in enumerate(operations) if one.name == "write"]
    skipped = set(writes) - set(writes[::stride])
    return [at for at in range(len(operations) + 1) if at not in skipped]


def enumerate_crashes(
    recording: Recording, target: Path, *, stride: int, seeds: int
) -> dict[int | None, int]:
    """Crash at every point in many ways and check what the reader would choose; how often it was
    which step.
    """
    counts: dict[int | None, int] = {}
    disk = disk_after(recording, [])
    points = set(crash_points(recording.operations, stride=stride))
    for at in range(len(recording.operations) + 1):
        if at > 0:
            disk.apply(recording.operations[at - 1])
        if at not in points:
            continue
        pending = disk.pending()
        ways = (
            [*extremes(pending), *(at_random(at * 1000 + seed) for seed in range(seeds))]
            if pending
            else [at_random(0)]
        )
        for number, decide in enumerate(ways):
            disk.crash(decide, target)
            step = chosen(target)
            where = f"crash before operation {at} of {len(recording.operations)}, way {number}"
            assert step in (OLD, NEW), f"{where}: {step} would be loaded"
            assert step == OLD or at > recording.renamed, (
                f"{where}: the new one counts before it is committed"
            )
            assert step == NEW or at < recording.acknowledged, (
                f"{where}: what was acknowledged is lost"
            )
            counts[step] = counts.get(step, 0) + 1
            shutil.rmtree(target)
    return counts


@pytest.mark.sampled
def test_whatever_a_crash_loses_old_or_new_remains(recording: Recording, tmp_path: Path) -> None:
    counts = enumerate_crashes(recording, tmp_path / "disk", stride=40, seeds=3)
    assert counts[OLD] > 100
    assert counts[NEW] > 20


@pytest.mark.sampled
@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_whatever_a_crash_loses_at_any_single_write_old_or_new_remains(
    recording: Recording, tmp_path: Path
) -> None:
    counts = enumerate_crashes(recording, tmp_path / "disk", stride=2, seeds=10)
    assert counts[OLD] > 1000
    assert counts[NEW] > 50


@pytest.mark.sampled
def test_the_real_store_resumes_to_the_bit_from_what_crashes_leave(
    recording: Recording, tmp_path: Path
) -> None:
    points = crash_points(recording.operations, stride=1000)
    for at in points[:: max(1, len(points) // 12)]:
        disk = disk_after(recording, recording.operations[:at])
        disk.crash(at_random(at), tmp_path / f"disk-{at}")
        assert resumable_step(tmp_path / f"disk-{at}") in (OLD, NEW)


@pytest.mark.parametrize("forgotten", ["fsync", "fsync_folder"])
def test_the_enumeration_notices_a_protocol_that_forgets_to_sync(
    tmp_path: Path, forgotten: str
) -> None:
    recording = record(tmp_path, keep=3)
    careless = [one for one in recording.operations if one.name != forgotten]
    disk = disk_after(recording, careless)
    lost = set()
    for number, decide in enumerate(extremes(disk.pending())):
        disk.crash(decide, tmp_path / f"disk-{number}")
        lost.add(chosen(tmp_path / f"disk-{number}"))
    assert OLD in lost, (
        "an acknowledged checkpoint can be lost then, and the checks above would say so"
    )

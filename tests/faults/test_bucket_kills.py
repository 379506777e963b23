"""Random kills of workers and agents of a training whose checkpoints are in a real S3 server: it
ends with the weights of a run on a disk that nobody disturbed.

KDIST_SEEDS says from how many seeds one is drawn (20); without `not wide` all of them run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.storage import StoragePath, open_location
from tests.patience import soon
from tests.trainer.object_store.s3_server import ACCESS_KEY, BUCKET, SECRET
from tests.trainer.object_store.versitygw import versitygw

from .check_ledger import assert_every_sample_once, assert_repeats_are_equal
from .test_random_kills import (
    DRAWN,
    EPOCHS,
    JOB,
    SAMPLES,
    SEEDS,
    is_in_phase,
    plan_kills,
    strike,
)
from .training_run import PATIENCE, TrainingRun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Bucket:
    """Where the runs of this module keep their checkpoints."""

    endpoint: str
    folder: Path
    """The server's own, of the bucket."""

    def open(self, prefix: str, name: str) -> StoragePath:
        """The checkpoints of one run."""
        return open_location(f"s3://{BUCKET}/{prefix}") / name

    def is_saving(self, prefix: str, name: str) -> bool:
        """Whether there are files of a checkpoint that is not committed."""
        return any(
            not (files.parent / files.name.split(".files-")[0] / "manifest.json").exists()
            for files in (self.folder / prefix / name).glob("step-*.files-*")
        )


@pytest.fixture(scope="module", name="bucket")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    folder = tmp_path_factory.mktemp("versitygw")
    with versitygw(folder, access_key=ACCESS_KEY, secret=SECRET, bucket=BUCKET) as endpoint:
        yield Bucket(endpoint, folder / "data" / BUCKET)


@pytest.fixture(scope="module", name="uninterrupted")
def train_on_a_disk(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights' hash of a run without faults and without a bucket."""
    with TrainingRun(tmp_path_factory.mktemp("uninterrupted"), JOB) as run:
        assert run.wait() == 0, run.output()
    weights: str = run.done()["weights"]
    return weights


@pytest.mark.parametrize(
    "seed",
    [pytest.param(s, marks=[] if s == DRAWN else [pytest.mark.wide]) for s in range(SEEDS)],
)
@pytest.mark.sampled
def test_a_run_with_kills_in_every_phase_ends_with_the_weights_of_one_on_a_disk(
    seed: int,
    bucket: Bucket,
    uninterrupted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("KDIST_CHECKPOINTS_ENDPOINT", bucket.endpoint)
    monkeypatch.setenv("KDIST_CHECKPOINTS_REGION", "us-east-1")
    prefix = tmp_path.name
    checkpoints = {
        "url": f"s3://{BUCKET}/{prefix}",
        "endpoint": bucket.endpoint,
        "region": "us-east-1",
    }
    root = bucket.open(prefix, "kills")

    def count_generations() -> int:
        return sum(one["event"] == "generation" for one in RunLedger(root).events())

    def has_formed_again(before: int) -> Callable[[], bool]:
        return lambda: count_generations() > before

    draw = random.Random(2000 + seed)
    with TrainingRun(tmp_path, JOB | {"spec": JOB["spec"] | {"checkpoints": checkpoints}}) as run:
        for phase, victim in plan_kills(seed):
            generations = count_generations()
            run.wait_until(
                (lambda: bucket.is_saving(prefix, "kills"))
                if phase == "save"
                else is_in_phase(run, phase),
                f"phase {phase}",
                every=0.002,
            )
            assert strike(run, victim, draw), f"no kill fell into {phase}"
            if phase != "exit":
                run.wait_until(has_formed_again(generations), "the group to form again", every=0.1)
        assert run.process.wait(PATIENCE) == 0, run.output()
    assert run.done()["weights"] == uninterrupted
    assert_every_sample_once(run.steps(), total=EPOCHS * SAMPLES)
    assert_repeats_are_equal(run.steps())
    assert soon(lambda: not run.processes()), run.processes()

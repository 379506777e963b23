"""Several real trainings under one Prometheus, for the picture of the dashboard of all of them.

One of them loses ranks, one has a slow rank for a while.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.charts.monitored import Training, write_job
from tests.cli.running import Run
from tests.house.tree import ROOT
from tools.dashboards.prometheus import Prometheus

SICK = ROOT / "tests" / "cluster" / "src" / "sick.py"


class Plan(NamedTuple):
    """A training: its namespace, how it trains, and what happens to it at which part of its
    time.
    """

    namespace: str
    batch: int
    rate: float
    kills: tuple[float, ...] = ()
    slow: tuple[float, float] = (2.0, 2.0)


PLANS = {
    "digits": Plan("research", 64, 0.0001),
    "ablation-lr": Plan("research", 64, 0.00003, kills=(0.45, 0.7)),
    "pretrain-small": Plan("platform", 256, 0.00005),
    "vision-large": Plan("platform", 128, 0.00002, slow=(0.6, 2.0)),
}


def start(home: Path, name: str, plan: Plan, targets: Path) -> Training:
    """Start one of the trainings in a folder of its own."""
    folder = home / name
    (folder / "flags").mkdir(parents=True)
    shutil.copytree(SICK.parent, folder / "src")
    train: dict[str, Any] = {
        "workload": "sick:Sick",
        "steps": 3000,
        "globalBatch": plan.batch,
        "optimizer": {"learningRate": plan.rate},
        "checkpoint": {"every": {"seconds": 20}},
        "loader": {"workers": 0},
    }
    env = [{"name": "FLAGS", "value": str(folder / "flags")}]
    run = Run(
        folder,
        write_job(folder, name=name, train=train, code="./src", env=env, nodes=1, procsPerNode=2),
    )
    return Training(run, name, targets.with_name(f"targets-{name}.json"), namespace=plan.namespace)


def train_all(
    home: Path, _: Prometheus, targets: Path, seconds: int, then: Callable[[], None]
) -> None:
    """Train all of them for `seconds`, then call `then` while they continue."""
    trainings = {name: start(home, name, plan, targets) for name, plan in PLANS.items()}
    begun, killed = time.monotonic(), dict.fromkeys(PLANS, 0)
    try:
        while (share := (time.monotonic() - begun) / seconds) < 1:
            time.sleep(0.5)
            for name, plan in PLANS.items():
                with suppress(OSError):
                    trainings[name].write_targets()
                if killed[name] < len(plan.kills) and share > plan.kills[killed[name]]:
                    trainings[name].kill_rank("node-0")
                    killed[name] += 1
                flag = home / name / "flags" / "slow"
                flag.touch() if plan.slow[0] < share < plan.slow[1] else flag.unlink(
                    missing_ok=True
                )
        then()
    finally:
        for training in trainings.values():
            training.run.close()

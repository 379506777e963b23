"""Several real trainings under one Prometheus, for the picture of the dashboard of all of them:

    python -m tests.charts.fleet FOLDER SECONDS

One of them loses ranks, one has a slow rank for a while; Prometheus stays until this process ends.
"""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.charts.monitored import Training, scraping, write_job
from tests.cli.running import Run
from tests.house.tree import ROOT

SICK = ROOT / "tests" / "cluster" / "src" / "sick.py"


class Plan(NamedTuple):
    """A training: its namespace, how it trains, and what happens to it at which part of its time."""

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
    """Begin one of the trainings in a folder of its own."""
    place = home / name
    (place / "flags").mkdir(parents=True)
    shutil.copytree(SICK.parent, place / "src")
    train: dict[str, Any] = {
        "workload": "sick:Sick",
        "steps": 3000,
        "globalBatch": plan.batch,
        "optimizer": {"learningRate": plan.rate},
        "checkpoint": {"every": {"seconds": 20}},
        "loader": {"workers": 0},
    }
    env = [{"name": "FLAGS", "value": str(place / "flags")}]
    run = Run(place, write_job(place, name=name, train=train, code="./src", env=env, nodes=1, procsPerNode=2))
    return Training(run, name, targets.with_name(f"targets-{name}.json"), namespace=plan.namespace)


def main(home: Path, seconds: int) -> None:
    """Train so long, then keep Prometheus."""
    home.mkdir(parents=True, exist_ok=True)
    with scraping(home) as (prometheus, targets):
        sys.stderr.write(f"{prometheus.url}\n")
        trainings = {name: start(home, name, plan, targets) for name, plan in PLANS.items()}
        begun, killed = time.monotonic(), dict.fromkeys(PLANS, 0)
        try:
            while (share := (time.monotonic() - begun) / seconds) < 1:
                time.sleep(0.5)
                for name, plan in PLANS.items():
                    with suppress(OSError):
                        trainings[name].tell_targets()
                    if killed[name] < len(plan.kills) and share > plan.kills[killed[name]]:
                        trainings[name].kill_rank("node-0")
                        killed[name] += 1
                    flag = home / name / "flags" / "slow"
                    flag.touch() if plan.slow[0] < share < plan.slow[1] else flag.unlink(missing_ok=True)
            (home / "ended").write_text(prometheus.url)
            time.sleep(3600)
        finally:
            for training in trainings.values():
                training.run.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

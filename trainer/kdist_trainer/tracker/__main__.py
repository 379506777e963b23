"""`python -m kdist_trainer.tracker`: gives the tracker of the job each step of the run that a
checkpoint holds, until standard input is closed; then the rest, and ends.

The agent of group rank 0 starts it with the environment of a rank. It prints the address of the
run, if the tracker has one. If the tracker fails, it tries again, and sends what is missing.
"""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path
from typing import Final

from kdist_trainer import log
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.storage import StoragePath, open_location
from kdist_trainer.config import TrainConfig
from kdist_trainer.formats import SCRATCH
from kdist_trainer.formats.userinfo import hide_userinfo
from kdist_trainer.processes import liveness
from kdist_trainer.script.tracker_identity import identify
from kdist_trainer.tracker.committed import CommittedSteps
from kdist_trainer.tracker.trackers import TRACKERS

_POLL_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 120.0


def main() -> None:
    """Follow the run until the agent closes standard input."""
    os.nice(10)
    liveness.watch(Path(os.environ["KDIST_PARENT_PIPE"]))
    config = TrainConfig.read(Path(os.environ["KDIST_CONFIG"]))
    root, ended = open_location(os.environ["KDIST_CHECKPOINTS"]), False
    while True:
        try:
            follow(config, root, ended=ended)
            return
        except Exception as error:  # noqa: BLE001 - a tracker must not end what it only shows
            what = f"cannot send the run's steps to the tracker: {type(error).__name__}: {error}"
            log.warn("tracker-failed", message=hide_userinfo(what))
        if ended:
            sys.exit(1)
        ended = is_ended(_RETRY_SECONDS)


def follow(config: TrainConfig, root: StoragePath, *, ended: bool) -> None:
    """Send the steps that the tracker does not have, and further ones as they come to count."""
    train = config.to_job()["train"]
    folder = root if isinstance(root, Path) else os.environ[SCRATCH]
    os.environ.setdefault("WANDB_DIR", str(folder))
    identity = identify(os.environ["KDIST_RUN_ID"], 0)
    tracker = TRACKERS[train["tracker"]](config.name, identity, train)
    if url := hide_userinfo(tracker.url):
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        ledger = RunLedger(root)
        if url not in {each.get("url") for each in ledger.events()}:
            ledger.append("tracker", url=url)
    steps = CommittedSteps(root, tracker.last_step)
    while True:
        for points in steps.read(ended=ended):
            tracker.send(points)
        if ended:
            break
        ended = is_ended(_POLL_SECONDS)
    done = steps.done
    tracker.finish((done or {}).get("metrics") or {}, done=done is not None)


def is_ended(seconds: float) -> bool:
    """Whether the agent closes standard input within this time."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


if __name__ == "__main__":
    main()

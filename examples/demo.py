"""The demonstration: a training of two nodes on this machine loses a worker and goes on with the
next step.

    make demo

It runs `kdist run examples/digits.yaml`, sends one SIGKILL while the training runs, and checks what
kdist promises: the worker that survives keeps its process, the ledger next to the checkpoints has
every step once, and the model is as good as without the loss. Exits with 1 if any of it does not
hold.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdist_trainer.checkpoint.ledger import RunLedger, read_lines
from kdist_trainer.formats import LEDGER, STEPS_FILE
from kdist_trainer.processes.liveness import Heartbeat

HERE = Path(__file__).parent
ACCURACY = 0.97
STEPS_BEYOND = 12  # that the victim does after a checkpoint, so that there is work to lose


def find_workers(folder: Path) -> Iterator[int]:
    """Pids of the ranks, by their heartbeats."""
    for path in sorted(folder.glob("node-*/rank-*.heartbeat")):
        if pid := Heartbeat(path).read().pid:
            yield pid


class Kill(threading.Thread):
    """Waits until the training is some steps past its second checkpoint, and kills the last rank.

    Attributes:
        before: The pids of the ranks when one was killed; none before.
        after: Those in the group that followed.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.before: list[int] = []
        self.after: list[int] = []
        self.training_has_ended = threading.Event()
        self._folder = folder
        self._ledger = RunLedger(folder / "checkpoints")
        self._steps = folder / "checkpoints" / LEDGER / STEPS_FILE

    def run(self) -> None:
        while not self.training_has_ended.wait(0.05):
            if not self.before and self._has_work_to_lose():
                self.before = list(find_workers(self._folder))
                os.kill(self.before[-1], signal.SIGKILL)
            if self.before and read_lines(self._steps)[-1]["generation"] > 1:
                self.after = list(find_workers(self._folder))
                return

    def _has_work_to_lose(self) -> bool:
        commits = [event["step"] for event in self._ledger.events() if event["event"] == "commit"]
        return len(commits) >= 2 and any(
            line["step"] > commits[-1] + STEPS_BEYOND for line in read_lines(self._steps)
        )


def check(folder: Path, kill: Kill) -> list[tuple[bool, str]]:
    """Each promise, and whether it held."""
    ledger = RunLedger(folder / "checkpoints")
    generations = [event for event in ledger.events() if event["event"] == "generation"]
    if len(generations) < 2 or not kill.after:
        return [(False, "the worker was killed while the training ran")]
    steps = read_lines(folder / "checkpoints" / LEDGER / STEPS_FILE)
    first = next(line["step"] for line in steps if line["generation"] == 2)
    kept = generations[1].get("kept_step")
    done: dict[str, Any] = json.loads((folder / "checkpoints" / "DONE").read_text())
    accuracy = done["metrics"]["accuracy"]
    learned = (accuracy >= ACCURACY, f"test accuracy {accuracy:.2%}, at least {ACCURACY:.0%}")
    if kept is None:  # only on Linux do ranks continue in place
        committed = generations[1]["from_step"]
        resumed = f"resumed at step {first}, the one after the committed step {committed}"
        return [(first == committed + 1, resumed), learned]
    return [
        (
            kill.before[0] == kill.after[0] and kill.before[-1] != kill.after[-1],
            f"rank 0 has kept its process, {kill.before[0]}; rank 1 has a new one",
        ),
        (
            first - 1 == kept,
            f"the new group has begun with step {first}, with the state of step {kept} from rank 0",
        ),
        (
            [line["step"] for line in steps] == list(range(1, done["step"] + 1)),
            f"each of the {len(steps)} steps was computed once, none was lost",
        ),
        learned,
    ]


def main() -> int:
    home = Path(os.environ.get("KDIST_HOME", ".kdist"))
    folder = home / "digits"
    shutil.rmtree(folder, ignore_errors=True)  # the demonstration's own earlier run
    kill = Kill(folder)
    kill.start()
    started = time.monotonic()
    code = subprocess.call([sys.executable, "-m", "kdist", "run", str(HERE / "digits.yaml")])
    kill.training_has_ended.set()
    kill.join()
    if code:
        return code
    results = check(folder, kill)
    for held, promise in results:
        print(f"{'✓' if held else '✗'} {promise}")
    print(
        f"{time.monotonic() - started:.0f} s in all; every step is in "
        f"{folder / 'checkpoints' / 'ledger'}"
    )
    return 0 if all(held for held, _ in results) else 1


if __name__ == "__main__":
    # Ctrl-C is for the training, which saves and stops
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(main())

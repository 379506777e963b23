"""The demonstration: a training of two nodes on this machine loses a worker and resumes from its
checkpoint.

    make demo

It runs `kdist run examples/digits.yaml`, sends one SIGKILL while the training runs, and checks what
kdist promises from the ledger next to the checkpoints: the first step after the loss is the one
after the last committed step, and its loss is the one that the lost worker had computed, to the
bit. Exits with 1 if any of it does not hold.
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

from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.liveness import Heartbeat

HERE = Path(__file__).parent
ACCURACY = 0.97
STEPS_BEYOND = 12  # that the victim does after a checkpoint, so that there is work to lose


def find_workers(folder: Path) -> Iterator[int]:
    """Pids of the ranks, by their heartbeats."""
    for path in sorted(folder.glob("node-*/rank-*.heartbeat")):
        if pid := Heartbeat(path).read().pid:
            yield pid


def kill_a_worker(folder: Path, ended: threading.Event) -> None:
    """Wait until the training is some steps past its second checkpoint, then kill the last rank."""
    ledger = RunLedger(folder / "checkpoints")
    while not ended.wait(0.05):
        commits = [event["step"] for event in ledger.events() if event["event"] == "commit"]
        if len(commits) >= 2 and any(
            line["step"] > commits[-1] + STEPS_BEYOND for line in ledger.read_steps()
        ):
            os.kill(list(find_workers(folder))[-1], signal.SIGKILL)
            return


def check(folder: Path) -> list[tuple[bool, str]]:
    """Each promise, and whether it held."""
    ledger = RunLedger(folder / "checkpoints")
    steps, events = list(ledger.read_steps()), ledger.events()
    resumed = next(
        (
            event
            for event in events
            if event["event"] == "generation" and event["reason"] == "failure"
        ),
        None,
    )
    if resumed is None:
        return [(False, "the worker was killed while the training ran")]
    generation, committed = resumed["generation"], resumed["from_step"]
    first = next(line for line in steps if line["generation"] == generation)
    before = [
        line for line in steps if line["step"] == first["step"] and line["generation"] < generation
    ]
    done: dict[str, Any] = json.loads((folder / "checkpoints" / "DONE").read_text())
    accuracy = done["metrics"]["accuracy"]
    return [
        (
            first["step"] == committed + 1,
            f"resumed at step {first['step']}, the one after the committed step {committed}",
        ),
        (
            bool(before) and before[-1]["loss"] == first["loss"],
            f"its loss {float.fromhex(first['loss']):.6f} is bitwise identical to the lost one",
        ),
        (accuracy >= ACCURACY, f"test accuracy {accuracy:.2%}, at least {ACCURACY:.0%}"),
    ]


def main() -> int:
    home = Path(os.environ.get("KDIST_HOME", ".kdist"))
    folder = home / "digits"
    shutil.rmtree(folder, ignore_errors=True)  # the demonstration's own earlier run
    ended = threading.Event()
    killer = threading.Thread(target=kill_a_worker, args=(folder, ended))
    killer.start()
    started = time.monotonic()
    code = subprocess.call([sys.executable, "-m", "kdist", "run", str(HERE / "digits.yaml")])
    ended.set()
    killer.join()
    if code:
        return code
    results = check(folder)
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

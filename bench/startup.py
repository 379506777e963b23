"""How long the command line takes to answer, next to `kubectl --help`, torchrun and a Python that
does nothing.

python -m bench.startup
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from bench.table import interleave, table, title

ROUNDS = 21
BIN = Path(sys.executable).parent


def seconds(command: list[str], folder: Path) -> tuple[float, float]:
    """One run of a command: wall time from its start to its end, and the time that it kept a core
    busy.
    """
    # set, every run would compile our modules again, which an installed kdist never does
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return wall, usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure and print."""
    title(f"Start-up, {ROUNDS} runs of each, in turn")
    kdist = str(BIN / "kdist")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [kdist, "init"],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "kubectl --help": ["kubectl", "--help"],
            "kdist --help": [kdist, "--help"],
            "kdist --version": [kdist, "--version"],
            "kdist validate job.yaml": [kdist, "validate", "job.yaml"],
            "torchrun --help": [str(BIN / "torchrun"), "--help"],
        }
        for missing in [
            label for label, command in commands.items() if shutil.which(command[0]) is None
        ]:
            print(f"  ({missing.split()[0]} is not installed)")
            del commands[missing]
        taken = interleave(
            {label: partial(seconds, command, folder) for label, command in commands.items()},
            rounds=ROUNDS,
        )
    for index, what in enumerate(("by the clock", "of a core")):
        print(f"\n  {what}")
        rows = {label: [values[index] for values in pairs] for label, pairs in taken.items()}
        table(rows, unit="ms", scale=1e3, base="python -c pass")


if __name__ == "__main__":
    main()

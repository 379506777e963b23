"""Runs on this machine, from the recording of one `kdist run job.yaml` of 100 steps on two nodes:
as its folder was after 64 steps, and at its end.

In a recorded file `{root}` is the run folder and `{home}` its working directory. The weights are
empty files of their size.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cli.situations import acting

RECORDED = Path(__file__).parent / "recorded"
AT = 1795441689.5
"""When the folder of the active run was copied, in unix seconds."""


def write_run(home: Path, *, ended: bool) -> Path:
    """The run folder digits in the `.kdist` of a folder."""
    recorded = RECORDED / ("ended" if ended else "active")
    root = home / ".kdist" / "digits"
    for source in recorded.rglob("*"):
        if source.is_file():
            file = root / source.relative_to(recorded)
            file.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text().replace("{root}", str(root)).replace("{home}", str(home))
            file.write_text(text)
    for manifest in root.glob("checkpoints/step-*/manifest.json"):
        for name, kept in json.loads(manifest.read_text())["manifest"]["files"].items():
            (manifest.parent / name).touch()
            os.truncate(manifest.parent / name, kept["size"])
        os.utime(manifest.parent, (AT, AT))
        # the process that lists checkpoints has the real clock
        now = time.clock_gettime(time.CLOCK_REALTIME)
        os.utime(manifest, (now - 600, now - 600))
    (root / "checkpoints" / "tensorboard").mkdir()
    return root


@contextmanager
def activate(root: Path) -> Iterator[None]:
    """Let a process be the `kdist run` of the folder."""
    command = [sys.executable, acting.__file__, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()

"""The agents of a run on this machine, as those who can be asked for a profile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kdist.errors import KdistError
from kdist.local import agents, looking
from kdist.steer.profile import MODULE, Ask


def of_run(root: Path) -> list[Ask]:
    """The agents that are at work. Raises `KdistError` if there are none."""
    nodes = [root / node for node in agents.ports(root)]
    if not nodes:
        raise KdistError(f"no agent of {root} is at work yet", hint="try again in a second")
    return [_beside(node, looking.checkpoints_of(root)) for node in nodes]


def _beside(scratch: Path, checkpoints: Path) -> Ask:
    def ask(words: Sequence[str]) -> bytes:
        command = [sys.executable, "-m", MODULE, *words, "--scratch", str(scratch), "--root", str(checkpoints)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise KdistError(f"the profile of {scratch.parent}: {said[0]}")
        return done.stdout

    return ask

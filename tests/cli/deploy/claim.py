"""A folder of this machine in the place of a claim: helper pods of a test's server run at once, and
what is run in them runs here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.cli.cluster.api import Answer, Asked, Reply

HELPER = "-viewer-"
"""In the name of each helper pod."""


class ClaimServer:
    """Answers as another server does, but for the pods that take code.

    Attributes:
        root: what they mount as the claim.
        pods: those that were created.
        actions: what was run in them.
        status: what is said of each.
    """

    def __init__(self, answer: Answer, root: Path) -> None:
        self._answer = answer
        self.root = root
        self.pods: list[dict[str, Any]] = []
        self.actions: list[str] = []
        self.status: dict[str, Any] = {"phase": "Running"}
        root.mkdir()

    def __call__(self, asked: Asked) -> Reply:
        if asked.path.endswith("/exec"):
            return Reply(channels=partial(self._run, asked.command))
        reply, name = self._answer(asked), asked.path.rpartition("/pods/")[2]
        if asked.method == "GET" and HELPER in name and reply.status == 200:
            return Reply(document={**reply.document, "status": self.status})
        if asked.path.endswith("/pods") and asked.method == "POST" and "dryRun" not in asked.query:
            self.pods.append(asked.body)
        return reply

    def _run(self, command: Sequence[str], sent: bytes) -> Mapping[int, bytes]:
        python, *options, path = command[:5]
        assert (python, options[:2]) == ("python", ["-I", "-c"])
        self.actions.append("receive" if command[6:] else "look")
        here = str(self.root) + path.removeprefix("/checkpoints")
        words = [sys.executable, *options, here, *command[5:]]
        done = subprocess.run(words, input=sent, capture_output=True, check=False)
        ended: dict[str, Any] = {"status": "Success"}
        if done.returncode:
            code = {"reason": "ExitCode", "message": str(done.returncode)}
            ended = {"status": "Failure", "details": {"causes": [code]}}
        return {1: done.stdout, 2: done.stderr, 3: json.dumps(ended).encode()}

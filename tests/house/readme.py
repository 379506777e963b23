"""The commands that the README shows, and where each of them is run by a test."""

from __future__ import annotations

import re

from tests.house.tree import ROOT

README = ROOT / "README.md"

# Commands that the end-to-end tier does not type one after the other, and who runs them instead.
RUN_ELSEWHERE = {
    "make demo": "tests/acceptance/test_clone.py",
    "make setup": "tests/acceptance/test_clone.py",
    "make test": ".ci/run",
    "make chaos": ".ci/run",
    "make bench": "bench/__init__.py",
    "make help": "tests/house/test_make.py",
}
ON_A_CLUSTER = "export IMAGE="
"""The first line of the session that a test on a real cluster types."""


def commands(text: str) -> list[str]:
    """Lines after a `$ ` prompt in the console blocks of a Markdown text, without comments,
    continued lines joined.
    """
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [re.sub(r"\s+#.*$", "", line[2:]).strip() for line in lines if line.startswith("$ ")]


def typed() -> list[str]:
    """Commands of the README in their order, as a newcomer types them, in an empty folder."""
    elsewhere, cluster = (*RUN_ELSEWHERE, "git clone", "cd "), typed_on_a_cluster()
    return [
        line
        for line in commands(README.read_text())
        if not line.startswith(elsewhere) and line not in cluster
    ]


def typed_on_a_cluster() -> list[str]:
    """Commands of the session on a cluster, in their order."""
    blocks = re.findall(r"^```console\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    return [
        line
        for block in blocks
        if ON_A_CLUSTER in block
        for line in commands(f"```console\n{block}```")
    ]

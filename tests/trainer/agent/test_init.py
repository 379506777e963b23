"""Weights that are fetched before the agent starts: it is told where they are, or says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.agent.lab import Lab

pytestmark = pytest.mark.processes


def name_a_url(folder: Path) -> None:
    """Have the job begin with weights at a URL."""
    document = json.loads((folder / "train.json").read_text())
    document["train"]["init"] = {"url": "s3://bucket/model"}
    (folder / "train.json").write_text(json.dumps(document))


def test_an_agent_without_the_weights_says_how_to_fetch_them(tmp_path: Path) -> None:
    with Lab(tmp_path) as lab:
        name_a_url(tmp_path)
        lab.start("node-0")
        assert lab.end("node-0") == 64
        record = lab.record("node-0")
        assert record["cause"] == "config"
        assert record["message"].startswith("spec.train.init: s3://bucket/model was not fetched")
        assert "--init" in record["message"]


def test_an_agent_with_the_weights_starts_its_ranks(tmp_path: Path) -> None:
    with Lab(tmp_path) as lab:
        name_a_url(tmp_path)
        lab.arguments += ["--init", str(tmp_path / "fetched/files")]
        lab.start("node-0")
        assert lab.stepping(1, world=1)

"""What `kdist why` says of a run on this machine, from what its agents answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdist.job.local.job import LocalJob
from kdist.job.local.run_dir import RunFolder, make_private
from tests.cli.conftest import ServeAgent


def test_agents_that_meet_are_counted_as_they_tell_it_and_with_the_limit_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve_agent: ServeAgent
) -> None:
    monkeypatch.setenv("KDIST_HOME", str(tmp_path))
    folder = RunFolder.open("digits", fresh=False)
    try:
        settings = {"nodes": {"min": 2, "max": 2}, "rendezvousTimeoutSeconds": 77}
        folder.begin(json.dumps(settings))
        told = {"state": "rendezvous", "node": "node-0", "run_id": folder.run_id, "ranks": []}
        note = {"port": serve_agent(json.dumps(told).encode(), 200), "run_id": folder.run_id}
        for node in ("node-0", "node-1"):
            make_private(folder.node(node))
        (folder.node("node-0") / "agent.json").write_text(json.dumps(note))
        _, found = LocalJob(folder.root).why()
    finally:
        folder.close()
    assert found.cause == "rendezvous"
    assert "1 of 2 nodes joined" in found.sentence
    assert found.fix.endswith("after 77 s the job gives up")

"""What an agent finds and leaves in its scratch folder, besides what its ranks do."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kdist_trainer.agent.settings import Settings, prepare_scratch, read_config
from kdist_trainer.config import TrainConfig


def make_settings(folder: Path, *, node: str = "node-0") -> Settings:
    document = {"name": "job", "nodes": {"min": 1, "max": 1}, "script": {"path": "train.py"}}
    return Settings(
        config_path=folder / "train.json",
        config=TrainConfig.model_validate(document),
        run_id="run",
        node=node,
        scratch=folder / node,
        rendezvous=f"file:{folder / 'store'}",
    )


def be_an_agent(settings: Settings, *, meets: bool) -> int:
    """The pid of an agent that has begun, and perhaps met the others, before it was killed."""
    pid = os.fork()
    if pid == 0:
        prepare_scratch(settings)
        if meets:
            settings.forget_predecessors()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return pid


def test_an_agent_knows_the_last_that_met_the_others_and_all_that_were_killed_on_the_way(
    tmp_path: Path,
) -> None:
    settings = make_settings(tmp_path)
    be_an_agent(settings, meets=True)
    pids = {be_an_agent(settings, meets=meets) for meets in (True, False, False)}
    assert prepare_scratch(settings) == pids
    settings.forget_predecessors()
    assert prepare_scratch(settings) == set()


def test_ranks_are_told_where_the_weights_are_that_were_fetched(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    assert "KDIST_INIT" not in settings.environment()
    fetched = replace(settings, init=tmp_path / "files")
    assert fetched.environment()["KDIST_INIT"] == str(tmp_path / "files")


@pytest.mark.parametrize(
    ("node", "index"), [("node-12", 12), ("digits-worker-0", 0), ("laptop", 0)]
)
def test_the_index_of_a_node_ends_its_name(tmp_path: Path, node: str, index: int) -> None:
    assert make_settings(tmp_path, node=node).index == index


def test_the_job_is_kept_as_the_agent_has_read_it(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    with pytest.raises(FileNotFoundError, match="it was removed, as was what this agent had kept"):
        read_config(settings.config_path, settings.scratch)
    settings.config_path.write_text(settings.config.to_json())
    assert settings.environment()["KDIST_CONFIG"] == str(settings.config_path)
    prepare_scratch(settings)
    kept = Path(settings.environment()["KDIST_CONFIG"])
    assert kept.parent == settings.scratch
    settings.config_path.unlink()
    assert TrainConfig.read(kept) == settings.config
    assert read_config(settings.config_path, settings.scratch) == settings.config
    other = settings.config.model_copy(update={"name": "other"})
    settings.config_path.write_text(other.to_json())
    assert read_config(settings.config_path, settings.scratch).name == "other", "the file decides"

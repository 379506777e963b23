"""Weights to begin with: the model's own where the file has them, refused or kept where it has not,
the same on every rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from kdist_trainer.checkpoint import export
from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from kdist_trainer.errors import DataError
from kdist_trainer.training.pretrained import CheckpointFolder, SafetensorsFile, open_source
from kdist_trainer.workload import WorkloadContext
from tests.trainer.training.cells import document
from tests.trainer.training.group import RankFailed
from tests.trainer.training.tasks import (
    FEATURES,
    Small,
    describe,
    done,
    losses,
    train_here,
    weights,
)


def begin_with(
    path: Path, *, load: str = "each", strict: str = "on", **section: Any
) -> dict[str, Any]:
    """A training of one step, so short that its weights show what it began with."""
    still = {
        "steps": 1,
        "epochs": None,
        "optimizer": {"name": "sgd", "learningRate": 1e-9},
        "schedule": {},
    }
    every = {"every": {"steps": 1_000_000}, "mode": "blocking", "load": load}
    return describe(
        **still, checkpoint=every, init={"path": str(path), "strict": strict}, **section
    )


def other_weights(path: Path) -> dict[str, torch.Tensor]:
    """A file of weights that no seed gives."""
    torch.manual_seed(99)
    state = Small(WorkloadContext()).model().state_dict()
    save_file(state, path)
    return state


@pytest.mark.processes
def test_a_training_begins_with_the_weights_of_a_file(tmp_path: Path) -> None:
    expected = other_weights(tmp_path / "model.safetensors")
    train_here(begin_with(tmp_path / "model.safetensors", load="broadcast"), tmp_path / "run", 2)
    found = weights(tmp_path / "run")
    assert [
        name for name in expected if not torch.allclose(found[name], expected[name], atol=1e-6)
    ] == []


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("strategy", "load"),
    [
        ("fsdp", "broadcast"),
        pytest.param("fsdp", "each", marks=pytest.mark.wide),
        pytest.param("ddp", "broadcast", marks=pytest.mark.wide),
        pytest.param("ddp", "each", marks=pytest.mark.wide),
    ],
)
def test_a_run_can_begin_with_what_another_one_learned_under_another_strategy(
    tmp_path: Path, strategy: str, load: str
) -> None:
    section: dict[str, Any] = {
        "steps": 3,
        "checkpoint": {"every": {"steps": 100}, "mode": "blocking", "load": load},
    }
    first = document("gpt", precision="fp32", strategy="fsdp", **section)
    train_here(first, tmp_path / "first", 2)
    second = document("gpt", precision="fp32", strategy=strategy, **section, emaDecay=0.9)
    second["train"]["init"] = {"path": str(tmp_path / "first/checkpoints")}
    second["train"]["optimizer"]["learningRate"] = 1e-9
    train_here(second, tmp_path / "second", 2)
    for average in (False, True):
        found = export.prepare(tmp_path / "second/checkpoints", average=average)
        known = export.prepare(tmp_path / "first/checkpoints")
        for name in known.sources:
            assert torch.allclose(
                found.fetch([name])[name], known.fetch([name])[name], atol=1e-6
            ), name


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
def test_a_resumed_run_goes_on_and_does_not_begin_again(tmp_path: Path) -> None:
    other_weights(tmp_path / "model.safetensors")
    every = {"every": {"steps": 2}, "mode": "blocking", "keep": 1000}
    init = {"path": str(tmp_path / "model.safetensors")}
    train_here(describe(init=init, checkpoint=every), tmp_path / "run", 1)
    for name in ("DONE", "step-00000008-e1", "step-00000009-e1"):
        found = tmp_path / "run/checkpoints" / name
        if found.exists():
            found.rename(tmp_path / name)
    whole = losses(tmp_path / "run")
    train_here(describe(init=init, checkpoint=every), tmp_path / "run", 1, generation=2)
    again = losses(tmp_path / "run", generation=2)
    assert again
    assert {step: whole[step] for step in again} == again
    assert done(tmp_path / "run")["step"] == 9


@pytest.mark.processes
def test_weights_of_another_model_are_refused_or_only_those_that_fit_are_taken(
    tmp_path: Path,
) -> None:
    state = other_weights(tmp_path / "model.safetensors")
    last = list(state)[-1]
    state[last], state["extra"] = torch.ones(7), torch.ones(1)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        RankFailed,
        match=rf"MismatchError: train.init: .* {last} has shape \(7,\) in the source and \(3,\) in",
    ):
        train_here(begin_with(tmp_path / "model.safetensors"), tmp_path / "refused", 1)
    train_here(begin_with(tmp_path / "model.safetensors", strict="off"), tmp_path / "kept", 1)
    found = weights(tmp_path / "kept")
    assert torch.allclose(found[next(iter(state))], state[next(iter(state))], atol=1e-6)


class Tied(Small):
    """Its last layer's weight is its first one's, as language models tie their head to their
    embedding.
    """

    def model(self) -> nn.Module:
        first = nn.Linear(FEATURES, FEATURES, bias=False)
        last = nn.Linear(FEATURES, FEATURES, bias=False)
        last.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), last)


def shards(folder: Path, *files: dict[str, torch.Tensor]) -> Path:
    """A model as Hugging Face writes it: several files, and the index of them."""
    folder.mkdir(exist_ok=True)
    places: dict[str, str] = {}
    for number, weights_ in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(weights_, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(weights_, name)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.processes
def test_a_training_begins_with_tied_weights_in_several_files(tmp_path: Path) -> None:
    torch.manual_seed(99)
    tied = torch.randn(FEATURES, FEATURES)
    where = shards(tmp_path / "hub", {"0.weight": tied}, {"of.another.part": torch.zeros(3)})
    index = open_source(str(where / "model.safetensors.index.json"), {})
    assert index.shapes() == open_source(str(where), {}).shapes()
    document_ = begin_with(where)
    document_["train"]["workload"] = f"{Tied.__module__}:Tied"
    train_here(document_, tmp_path / "run", 1)
    (newest,) = CheckpointDirectory(tmp_path / "run/checkpoints").committed()
    found = export.prepare(newest.path.parent, step=newest.step).fetch(["0.weight", "2.weight"])
    assert all(torch.allclose(found[name], tied, atol=1e-6) for name in ("0.weight", "2.weight"))


def test_an_index_that_leads_elsewhere_or_to_nothing_is_refused(tmp_path: Path) -> None:
    folder = shards(tmp_path / "hub", {"a": torch.zeros(1)})
    (folder / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(DataError, match=r"model-00001-of-00001\.safetensors"):
        open_source(str(folder), {}).shapes()
    for content in ('{"weight_map": {"a": "../b.safetensors"}}', "{}", "no json"):
        (folder / "model.safetensors.index.json").write_text(content)
        with pytest.raises(DataError, match=r"model\.safetensors\.index\.json"):
            open_source(str(folder), {}).shapes()


def test_a_path_below_a_mount_is_looked_for_where_the_mount_is(tmp_path: Path) -> None:
    (tmp_path / "data/run").mkdir(parents=True)
    mounts = {"/data": tmp_path / "nowhere", "/data/models": tmp_path / "data"}
    assert isinstance(open_source("/data/models/run", mounts), CheckpointFolder)
    assert isinstance(open_source("/data/models/x.safetensors", mounts), SafetensorsFile)


@pytest.mark.parametrize("content", [None, b"", b"\x80\x02}q\x00.", b"\x08\0\0\0\0\0\0\0{}      "])
def test_what_is_no_safetensors_file_is_refused_and_not_run(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "model.safetensors"
    if content is not None:
        path.write_bytes(content)
    source = open_source(str(path), {})
    if content is not None and content.startswith(b"\x08"):
        assert source.shapes() == {}
    else:
        with pytest.raises(DataError, match=r"train.init: .*model.safetensors"):
            source.shapes()


def test_a_folder_without_a_sound_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no checkpoint in"):
        open_source(str(tmp_path), {}).shapes()

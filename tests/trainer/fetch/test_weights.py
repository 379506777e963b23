"""Weights in several files, by their index: fetched together, and loaded into a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kdist_trainer.checkpoint import export
from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from kdist_trainer.config import Init
from kdist_trainer.errors import ConfigError
from kdist_trainer.training.pretrained import SafetensorsFile, SafetensorsShards, open_init
from tests.trainer.fetch.conftest import Bucket
from tests.trainer.fetch.hub import Hub
from tests.trainer.fetch.program import fetch
from tests.trainer.fetch.web_server import WebServer
from tests.trainer.training.group import run_group
from tests.trainer.training.tasks import FEATURES, describe, train
from tests.trainer.training.test_pretrained import Tied, shards

pytestmark = pytest.mark.processes

INDEX = "model.safetensors.index.json"


@pytest.fixture(name="model")
def make_model(tmp_path: Path) -> dict[str, bytes]:
    """The files of a model whose two layers have the same weight."""
    torch.manual_seed(99)
    tied = torch.randn(FEATURES, FEATURES)
    folder = shards(tmp_path / "made", {"0.weight": tied}, {"of.another.part": torch.zeros(3)})
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def train_with(init: dict[str, Any], fetched: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Train a step too small to change the weights; returns these."""
    document = describe(
        steps=1,
        epochs=None,
        optimizer={"name": "sgd", "learningRate": 1e-9},
        schedule={},
        checkpoint={"every": {"steps": 1_000_000}, "mode": "blocking"},
        init=init,
    )
    document["train"]["workload"] = f"{Tied.__module__}:Tied"
    folder.mkdir()
    environment = {
        "KDIST_CHECKPOINTS": str(folder / "checkpoints"),
        "KDIST_GENERATION": "1",
        "KDIST_INIT": str(fetched),
    }
    run_group(train, 1, document, folder, environment=environment)
    (newest,) = CheckpointDirectory(folder / "checkpoints").committed()
    names = ["0.weight", "2.weight"]
    return dict(export.prepare(newest.path.parent, step=newest.step).fetch(names))


@pytest.mark.sampled
@pytest.mark.parametrize("place", ["web", "bucket", "hub"])
def test_tied_weights_in_several_files_are_fetched_by_their_index_and_loaded(
    web: WebServer, bucket: Bucket, tmp_path: Path, model: dict[str, bytes], place: str
) -> None:
    field = "spec.train.init"
    if place == "web":
        web.files |= {f"/m/{name}": data for name, data in model.items()}
        url = f"{web.url}/m/{INDEX}"
        ended = fetch(url, tmp_path / "to", "--weights", field=field)
    elif place == "bucket":
        url = f"s3://bucket/m/{INDEX}"
        for name, data in {**model, "another": b""}.items():
            bucket.put(f"m/{name}", data)
        ended = bucket.fetch(f"m/{INDEX}", tmp_path / "to", "--weights", field=field)
    else:
        url = "hf://team/model@main"
        Hub(web).commit({**model, "README.md": b""})
        ended = fetch(url, tmp_path / "to", "--weights", field=field, HF_ENDPOINT=web.url)
    assert ended.code == 0, ended.stdout
    assert ended.files == model
    found = train_with({"url": url}, tmp_path / "to/files", tmp_path / "run")
    torch.manual_seed(99)
    expected = torch.randn(FEATURES, FEATURES)
    assert all(torch.allclose(one, expected, atol=1e-6) for one in found.values())


@pytest.mark.parametrize(
    "places",
    [
        {"a": "../outside"},
        {"a": "below/outside"},
        {"a": "/etc/outside"},
        {"a": ".."},
        {"a": ""},
        {"a": "\ud800"},
        {"a": 1},
        {},
        None,
        [],
    ],
)
@pytest.mark.sampled
def test_an_index_that_leads_elsewhere_is_refused(
    web: WebServer, tmp_path: Path, places: object
) -> None:
    web.files[f"/m/{INDEX}"] = json.dumps({"weight_map": places}).encode()
    for path in ("/outside", "/etc/outside", "/m/below/outside"):
        web.files[path] = b"hostile"
    ended = fetch(f"{web.url}/m/{INDEX}", tmp_path / "to/sub")
    assert ended.code == 65, ended.stdout
    assert INDEX in ended.record["message"]
    assert not list(tmp_path.rglob("outside"))


def test_a_shard_that_is_missing_is_named(
    web: WebServer, tmp_path: Path, model: dict[str, bytes]
) -> None:
    web.files |= {f"/m/{name}": data for name, data in model.items()}
    del web.files["/m/model-00002-of-00002.safetensors"]
    ended = fetch(f"{web.url}/m/{INDEX}", tmp_path / "to")
    assert ended.code == 65
    assert "names model-00002-of-00002.safetensors, which is not" in ended.record["message"]


def test_what_was_fetched_is_opened_by_its_name_or_as_a_folder(
    tmp_path: Path, model: dict[str, bytes]
) -> None:
    for name, data in model.items():
        (tmp_path / name).write_bytes(data)
    one = Init(url="https://host/m/model-00001-of-00002.safetensors")
    assert isinstance(open_init(one, {}, tmp_path), SafetensorsFile)
    assert isinstance(open_init(Init(url="hf://owner/model"), {}, tmp_path), SafetensorsShards)
    assert isinstance(open_init(Init(url="s3://bucket/model"), {}, tmp_path), SafetensorsShards)
    with pytest.raises(ConfigError, match=r"was not fetched: run `python -m kdist_trainer\.fetch`"):
        open_init(one, {}, None)

"""Models and data sets of a hub, which huggingface_hub asks over HTTP."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest

from tests.patience import soon
from tests.trainer.fetch.hub import Hub
from tests.trainer.fetch.program import Ended, fetch, start
from tests.trainer.fetch.web_server import Asked, WebServer, in_turn

pytestmark = pytest.mark.processes

WEIGHTS = random.Random(1).randbytes(2_000_000)
MODEL = {
    "README.md": b"a model",
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"a pickle",
    "other/model.safetensors": b"of another format",
}
TOKEN = "hf_a-token-that-nobody-shows"  # noqa: S105 - of this server alone


@pytest.fixture
def hub(web: WebServer) -> Hub:
    """A hub with one model."""
    hub = Hub(web)
    hub.commit(MODEL)
    return hub


def get(hub: Hub, name: str, folder: Path, *options: str, **variables: str) -> Ended:
    """Fetch from the hub."""
    return fetch(f"hf://{name}", folder, *options, HF_ENDPOINT=hub.server.url, **variables)


@pytest.mark.sampled
def test_a_repository_is_a_folder_of_its_files(hub: Hub, tmp_path: Path) -> None:
    ended = get(hub, "team/model", tmp_path / "to")
    assert ended.code == 0, ended.stdout
    assert ended.files == MODEL


@pytest.mark.sampled
def test_of_weights_only_those_that_a_model_starts_from_are_fetched(
    hub: Hub, tmp_path: Path
) -> None:
    ended = get(hub, "team/model", tmp_path / "to", "--weights")
    assert set(ended.files) == {"config.json", "model.safetensors"}
    hub.commit({"pytorch_model.bin": b"a pickle"})
    ended = get(hub, "team/model", tmp_path / "to", "--weights")
    assert ended.code == 65
    assert "has no safetensors file at commit" in ended.record["message"]


@pytest.mark.sampled
def test_a_path_names_a_folder_or_a_file(hub: Hub, tmp_path: Path) -> None:
    assert get(hub, "team/model/other", tmp_path / "a").files == {
        "model.safetensors": b"of another format"
    }
    assert get(hub, "team/model/other/model.safetensors", tmp_path / "b").files == {
        "model.safetensors": b"of another format"
    }
    ended = get(hub, "team/model/none", tmp_path / "c")
    assert ended.code == 65
    assert "has nothing at commit" in ended.record["message"]


@pytest.mark.parametrize("branch", ["v1.0", "refs/pr/7"])
@pytest.mark.sampled
def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, tmp_path: Path, branch: str) -> None:
    commit = hub.commit({"a": b"of the revision"}, branch)
    for revision in (branch, commit):
        ended = get(hub, f"team/model@{revision}", tmp_path / revision.replace("/", "-"))
        assert ended.files == {"a": b"of the revision"}, ended.stdout
    ended = get(hub, "team/model@none", tmp_path / "none")
    assert ended.code == 65
    assert "has no revision none of" in ended.record["message"]


def test_a_data_set_is_named_by_its_kind(web: WebServer, tmp_path: Path) -> None:
    hub = Hub(web, kind="datasets", repo="team/speech")
    hub.commit({"train/a.parquet": b"a"})
    assert get(hub, "datasets/team/speech", tmp_path / "to").files == {"train/a.parquet": b"a"}


def test_the_endpoint_of_the_job_comes_before_that_of_the_environment(
    hub: Hub, tmp_path: Path
) -> None:
    ended = fetch(
        "hf://team/model/config.json",
        tmp_path / "to",
        "--endpoint",
        hub.server.url,
        HF_ENDPOINT="http://127.0.0.1:1",
    )
    assert ended.files == {"config.json": b"{}"}


@pytest.mark.sampled
def test_a_new_commit_fetches_only_what_it_changes(hub: Hub, tmp_path: Path) -> None:
    get(hub, "team/model", tmp_path / "to")
    hub.commit({**MODEL, "config.json": b"{ }"})
    hub.server.requests.clear()
    assert get(hub, "team/model", tmp_path / "to").files == {**MODEL, "config.json": b"{ }"}
    fetched = [path for path in hub.server.paths() if not path.startswith("/api/")]
    assert [path.rpartition("/")[2] for path in fetched] == ["config.json"]


@pytest.mark.sampled
def test_a_fetch_that_was_killed_goes_on_within_the_file(hub: Hub, tmp_path: Path) -> None:
    hub.server.gate.clear()
    url = "hf://team/model/model.safetensors"
    program = start(url, tmp_path / "to", HF_ENDPOINT=hub.server.url)
    assert soon(
        lambda: any(
            one.stat().st_size == len(WEIGHTS) // 2 for one in tmp_path.glob("to/partial/*")
        ),
        20,
    )
    program.kill()
    hub.server.gate.set()
    hub.server.requests.clear()
    assert get(hub, "team/model/model.safetensors", tmp_path / "to").files == {
        "model.safetensors": WEIGHTS
    }
    (body,) = [one for one in hub.server.requests if one.path.startswith("/cdn/")]
    assert body.headers["range"] == f"bytes={len(WEIGHTS) // 2}-"


def test_a_hub_that_fails_is_asked_again(hub: Hub, tmp_path: Path) -> None:
    hub.server.faults = in_turn("503", "", "truncated", "429", "close", "truncated")
    assert get(hub, "team/model", tmp_path / "to").files == MODEL


def test_weights_that_were_damaged_on_their_way_are_refused(hub: Hub, tmp_path: Path) -> None:
    path = f"/cdn/{hashlib.sha256(WEIGHTS).hexdigest()}"

    def damage(asked: Asked) -> str:
        if asked.path == path:
            hub.server.files[path] = WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 1])
        return ""

    hub.server.faults = damage
    ended = get(hub, "team/model", tmp_path / "to", "--weights")
    assert ended.code == 65
    assert "the SHA-256 of model.safetensors is" in ended.record["message"]


@pytest.mark.sampled
def test_a_token_is_sent_to_the_hub_and_shown_nowhere(hub: Hub, tmp_path: Path) -> None:
    hub.server.authorization = f"Bearer {TOKEN}"
    ended = get(hub, "team/model", tmp_path / "to", HF_TOKEN=f"{TOKEN}\n")
    assert ended.files == MODEL, ended.stdout
    assert TOKEN not in ended.shown


@pytest.mark.parametrize(
    ("token", "code", "words"),
    [
        ("", 64, "without a token, or it does not exist: put a token that may read it into the"),
        ("hf_of-somebody-else", 65, "check that the token in the key HF_TOKEN of the Secret that"),
    ],
)
@pytest.mark.sampled
def test_a_missing_or_refused_token_is_an_error_that_names_the_key(
    hub: Hub, tmp_path: Path, token: str, code: int, words: str
) -> None:
    hub.server.authorization = f"Bearer {TOKEN}"
    ended = get(hub, "team/model", tmp_path / "to", HF_TOKEN=token)
    assert ended.code == code, ended.stdout
    assert words in ended.record["message"]
    assert not token or token not in ended.shown


def test_a_repository_that_is_not_there_is_an_error_of_the_data(hub: Hub, tmp_path: Path) -> None:
    ended = get(hub, "team/none", tmp_path / "to")
    assert ended.code == 65, ended.stdout
    assert "has no hf://team/none (status 404): correct the URL" in ended.record["message"]


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside"])
@pytest.mark.sampled
def test_a_name_that_leads_elsewhere_is_refused(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.commit({name: b"hostile", "config.json": b"{}"})
    ended = get(hub, "team/model", tmp_path / "to/sub")
    assert ended.code == 65, ended.stdout
    assert "cannot be the name of a file" in ended.record["message"]
    assert not list(tmp_path.rglob("outside"))


def test_without_the_package_the_command_that_installs_it_is_named(
    hub: Hub, tmp_path: Path
) -> None:
    block = (
        "import runpy, sys; sys.modules['huggingface_hub'] = None; "
        "runpy.run_module('kdist_trainer.fetch', run_name='__main__', alter_sys=True)"
    )
    ended = start("hf://team/model", tmp_path / "to", prefix=("-c", block)).wait()
    assert (ended.code, ended.record["cause"]) == (64, "config")
    assert "pip install 'huggingface-hub>=1.0'" in ended.record["message"]
    assert ended.stderr == ""


def test_neither_torch_nor_the_client_of_another_source_is_imported(
    web: WebServer, tmp_path: Path
) -> None:
    web.files["/a"] = b"a"
    look = (
        "import json, os, sys; from kdist_trainer.fetch.__main__ import main; code = main(); "
        "print(json.dumps({'event': 'modules', 'names': sorted(sys.modules)}), flush=True)"
    )
    ended = start(f"{web.url}/a", tmp_path / "to", prefix=("-c", look)).wait()
    names = json.loads(ended.stdout.splitlines()[-1])["names"]
    assert "kdist_trainer.fetch.fetcher" in names
    assert {"torch", "numpy", "obstore", "huggingface_hub"}.isdisjoint(names)

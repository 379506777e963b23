"""Digests of files: those of an earlier version are verified too, unknown ones are not guessed
at.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.checkpoint.__main__ import main
from kdist_trainer.checkpoint.manifest import read_manifest
from kdist_trainer.errors import CheckpointMismatchError
from kdist_trainer.formats.digest import Digest, UnknownAlgorithmError, new_hasher
from tests.trainer.checkpoint.ranks import Rank, run_ranks
from tests.trainer.checkpoint.states import load, open_store, save
from tests.trainer.checkpoint.versions import make_format_1, name_unknown_digests, rewrite

NEWEST, OLDER = "step-00000002-e1", "step-00000001-e1"


def ask(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any], str]:
    """Exit code, document and messages of the checkpoint tool."""
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, json.loads(printed.out or "{}"), printed.err


def states(document: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["state"] for one in document["checkpoints"]}


@pytest.mark.parametrize(
    ("algorithm", "value"),
    [
        ("xxh3_128", "06b05ab6733a618578af5f94892f3950"),
        ("sha256", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
    ],
)
def test_digests_are_those_that_other_programs_compute(algorithm: str, value: str) -> None:
    hasher = new_hasher(algorithm)
    hasher.update(b"a")
    hasher.update(memoryview(b"bc"))
    assert hasher.hexdigest() == value
    digest = Digest(3, value, algorithm)
    assert digest.matches(b"abc")
    assert not digest.matches(b"abd")
    assert Digest.from_json(digest.to_json()) == digest


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"size": 1},
        {"xxh3_128": "00"},
        {"size": 1, "sha256": 0},
        {"size": "1", "sha256": "00"},
        {"size": True, "sha256": "00"},
        {"size": 1, "sha256": "00", "xxh3_128": "00"},
    ],
)
def test_what_is_no_digest_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"a digest is text|one size and one digest"):
        Digest.from_json(document)


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(UnknownAlgorithmError, match=r"^blake9$"):
        Digest.from_json({"size": 1, "blake9": "00"})


def test_checkpoints_of_the_first_format_are_listed_verified_exported_and_resumed(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_format_1(root / NEWEST)
    assert read_manifest(root / NEWEST).files["state.json"].algorithm == "sha256"
    assert states(ask(capsys, "list", root)[1]) == {NEWEST: "complete", OLDER: "complete"}
    code, document, _ = ask(capsys, "verify", root)
    assert (code, states(document)) == (0, {NEWEST: "verified", OLDER: "verified"})
    code, document, _ = ask(capsys, "export", root, "--out", tmp_path / "model.safetensors")
    assert (code, document["step"]) == (0, 2)
    store = open_store(root, generation=2)
    assert load(store) == 2
    assert store.fallbacks == []
    assert save(store, 3).ok
    newer = read_manifest(root / "step-00000003-e2")
    assert {one.algorithm for one in newer.files.values()} == {"xxh3_128"}
    assert newer.parent == NEWEST
    code, document, _ = ask(capsys, "verify", root)
    assert (code, set(states(document).values())) == (0, {"verified"})


def test_a_flipped_bit_of_the_first_format_is_found(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_format_1(root / NEWEST)
    (file,) = (root / NEWEST).glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    code, document, _ = ask(capsys, "verify", root)
    assert (code, states(document)) == (1, {NEWEST: "damaged", OLDER: "verified"})
    assert load(open_store(root, generation=2)) == 1


UNSUPPORTED = {
    "has digests of 'blake9'": name_unknown_digests,
    "is of format 3": lambda folder: rewrite(folder, lambda body: body.update(format=3)),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_a_checkpoint_of_a_newer_version_is_refused_by_name_and_stays_untouched(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    make: Callable[[Path], None] = UNSUPPORTED[what]
    make(root / NEWEST)
    before = {path: path.read_bytes() for path in root.glob("step-*/*")}
    named = rf"checkpoint .*{NEWEST}: manifest.json {what}, which kdist-trainer .* does not know"
    with pytest.raises(CheckpointMismatchError, match=named):
        load(open_store(root, generation=2))
    assert {path: path.read_bytes() for path in root.glob("step-*/*")} == before
    for question in ("list", "verify"):
        code, document, _ = ask(capsys, question, root)
        assert code == (question == "verify")
        assert states(document)[NEWEST] == "unsupported"
        assert what in document["checkpoints"][0]["problem"]
        assert document["resumesFrom"] is None, "the training would be refused"
    code, _, message = ask(capsys, "export", root, "--out", tmp_path / "model.safetensors")
    assert code == 1
    assert f"{what}, which" in message
    assert "--step takes another one" in message
    assert ask(capsys, "export", root, "--step", 1, "--out", tmp_path / "one.safetensors")[0] == 0


def test_an_older_checkpoint_of_an_unknown_version_hinders_nobody(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name_unknown_digests(root / OLDER)
    assert ask(capsys, "list", root)[1]["resumesFrom"] == NEWEST
    assert load(open_store(root, generation=2)) == 2


def save_on_rank_0(rank: Rank, roots: list[Path]) -> None:
    store = open_store(roots[rank.rank], rank)
    load(store)
    assert save(store, 1).ok
    store.close()


def refusal(rank: Rank, roots: list[Path]) -> str:
    with pytest.raises(CheckpointMismatchError) as raised:
        load(open_store(roots[rank.rank], rank))
    return str(raised.value)


def test_all_ranks_refuse_what_only_one_of_them_sees_in_its_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    run_ranks(2, save_on_rank_0, tmp_path, [here, there])
    name_unknown_digests(here / OLDER)
    messages = run_ranks(2, refusal, tmp_path, [there, here], generation=2)
    assert all(f"{OLDER}: manifest.json has digests of 'blake9'" in each for each in messages)

"""The command: a page after every part, done parts skipped, failed ones tried again, no end without
a word.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu.__main__ import main
from bench.gpu.parts import PARTS, Part

GOOD = next(part for part in PARTS if part.name == "precision-bf16")
BAD = Part("broken", "no_such_module", 120)


@pytest.mark.sampled
@pytest.mark.processes
def test_a_failed_part_is_a_row_and_only_it_is_tried_again(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--out", str(tmp_path)]
    assert main(arguments, (BAD, GOOD)) == 1
    results = tmp_path / "results.jsonl"
    assert [json.loads(line)["part"] for line in results.read_text().splitlines()] == [
        BAD.name,
        GOOD.name,
    ]
    page = (tmp_path / "page.md").read_text()
    assert "| broken | failed: ModuleNotFoundError: " in page
    assert "| precision-bf16 | done |" in page
    assert "| bf16 | " in page

    assert main(arguments, (BAD, GOOD)) == 1
    names = [json.loads(line)["part"] for line in results.read_text().splitlines()]
    assert names == [BAD.name, GOOD.name, BAD.name]
    assert main([*arguments, "--parts", GOOD.name], (BAD, GOOD)) == 0


@pytest.mark.sampled
@pytest.mark.processes
def test_without_time_no_part_is_started_and_the_page_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--device", "cpu", "--minutes", "0", "--out", str(tmp_path)], (GOOD,)) == 1
    assert "precision-bf16: not run, the 0 minutes are over" in capsys.readouterr().out
    assert not (tmp_path / "results.jsonl").exists()
    assert (
        "| precision-bf16 | not run: the same command runs it |"
        in (tmp_path / "page.md").read_text()
    )


@pytest.mark.processes
@pytest.mark.sampled
def test_without_a_gpu_nothing_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["--out", str(tmp_path)]) == 1
    assert "torch finds no GPU" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_an_unknown_part_is_refused_with_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--parts", "precision-fp64", "--out", str(tmp_path)])
    assert "no part precision-fp64; there are precision-fp32, " in capsys.readouterr().err


def test_the_parts_end_within_half_an_hour() -> None:
    assert sum(part.seconds for part in PARTS) <= 30 * 60
    assert len({part.name for part in PARTS}) == len(PARTS)

"""Results survive an interrupted write, and only those of the same machine count."""

from __future__ import annotations

from pathlib import Path

from bench.gpu.records import append, is_done, newest

H200, A100 = {"device": "H200"}, {"device": "A100"}


def test_the_newest_attempt_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert newest(path, H200) == {}
    append(path, {"part": "timers", "machine": H200, "error": "no kernels"})
    assert not is_done(path, "timers", H200)
    append(path, {"part": "timers", "machine": H200, "figures": {"rows": []}})
    assert is_done(path, "timers", H200)
    assert len(path.read_text().splitlines()) == 2


def test_figures_of_another_machine_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append(path, {"part": "timers", "machine": A100, "figures": {}})
    assert not is_done(path, "timers", H200)
    assert is_done(path, "timers", A100)


def test_a_line_that_was_cut_off_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append(path, {"part": "timers", "machine": H200, "figures": {}})
    with path.open("a") as file:
        file.write('{"part": "panels", "mach')
    append(path, {"part": "restart", "machine": H200, "figures": {}})
    assert set(newest(path, H200)) == {"timers", "restart"}

"""The notebook of the tutorials: its cells run one after the other, and say what they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.notebook import CELLS, NOTEBOOK, check_texts, run_cells


@pytest.mark.processes
@pytest.mark.sampled
@pytest.mark.timeout(600)
def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    texts = run_cells(CELLS, tmp_path)
    check_texts(texts)
    assert "Succeeded</td>" in texts[3]
    assert texts[4].startswith("`points`, which `summarize` uses, is in the memory")
    assert "Phase." in texts[5]
    assert "'Job'" in texts[9]


def test_the_notebook_holds_no_output_and_no_state_of_a_run() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    code = [each for each in NOTEBOOK["cells"] if each["cell_type"] == "code"]
    assert [each["outputs"] for each in code] == [[]] * len(code)
    assert {each["execution_count"] for each in code} == {None}
    names = [each["id"] for each in NOTEBOOK["cells"]]
    assert len(names) == len(set(names))

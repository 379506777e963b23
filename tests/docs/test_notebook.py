"""The notebook of the tutorials: its cells run one after the other, and say what they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.notebook import CELLS, NOTEBOOK, run_cells


@pytest.mark.processes
@pytest.mark.sampled
@pytest.mark.timeout(600)
def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    texts = run_cells(CELLS, tmp_path)
    assert "rank 0 of 2: loss 0." in texts[2]
    assert "rank 1 of 2: loss 0." in texts[2]
    assert "<td style='text-align:left'>Succeeded</td>" in texts[3]
    assert texts[4].startswith("`points`, which `summarize` uses, is in the memory")
    assert "make it inside the function" in texts[4]
    assert "Phase." in texts[5]
    assert "at step 200" in texts[6]
    assert "of new points are recognized" in texts[7]
    assert "productive" in texts[8]
    assert "'Job'" in texts[9]


def test_the_notebook_holds_no_output_and_no_state_of_a_run() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    code = [each for each in NOTEBOOK["cells"] if each["cell_type"] == "code"]
    assert [each["outputs"] for each in code] == [[]] * len(code)
    assert {each["execution_count"] for each in code} == {None}
    names = [each["id"] for each in NOTEBOOK["cells"]]
    assert len(names) == len(set(names))

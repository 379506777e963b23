"""The notebook of the tutorials: its cells run one after the other, and say what they should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import DOCS

NOTEBOOK = json.loads((DOCS / "tutorials" / "notebook.ipynb").read_text())
# As IPython runs cells: in the main module, with their lines in Python's cache, and the value of a
# last line shown.
PROGRAM = """
import ast, json, linecache, sys

def run_cell(source, file):
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, file, "exec"), globals())
    if last is not None:
        shown = eval(compile(ast.Expression(last.value), file, "eval"), globals())
        print(shown._repr_html_() if hasattr(shown, "_repr_html_") else repr(shown))

for number, source in enumerate(json.loads(sys.stdin.read())):
    print(f"# {number}", flush=True)
    run_cell(source, f"<cell {number}>")
"""


@pytest.mark.processes
@pytest.mark.sampled
@pytest.mark.timeout(600)
def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    cells = ["".join(each["source"]) for each in NOTEBOOK["cells"] if each["cell_type"] == "code"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = dict(part.split("\n", 1) for part in done.stdout.split("# ")[1:])
    texts = [shown[str(number)] for number in range(len(cells))]
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
    assert done.stderr == ""


def test_the_notebook_holds_no_output_and_no_state_of_a_run() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    code = [each for each in NOTEBOOK["cells"] if each["cell_type"] == "code"]
    assert [each["outputs"] for each in code] == [[]] * len(code)
    assert {each["execution_count"] for each in code} == {None}
    names = [each["id"] for each in NOTEBOOK["cells"]]
    assert len(names) == len(set(names))

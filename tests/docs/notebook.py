"""The notebook of the tutorials, run as IPython runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.docs.blocks import DOCS

NOTEBOOK = json.loads((DOCS / "tutorials" / "notebook.ipynb").read_text())
CELLS = ["".join(each["source"]) for each in NOTEBOOK["cells"] if each["cell_type"] == "code"]
# In the main module, with their lines in Python's cache, and the value of a last line shown.
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


def run_cells(
    cells: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> list[str]:
    """What each cell shows. They must run to the end and write nothing to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env=environment,
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    shown = dict(part.split("\n", 1) for part in done.stdout.split("# ")[1:])
    return [shown[str(number)] for number in range(len(cells))]


def check_texts(texts: Sequence[str]) -> None:
    """The cells show a training of two ranks that has succeeded, here or in a cluster."""
    parts = {
        2: ["rank 0 of 2: loss 0.", "rank 1 of 2: loss 0."],
        3: ["<td style='text-align:left'>Succeeded"],
        4: ["make it inside the function"],
        6: ["at step 200"],
        7: ["of new points are recognized"],
        8: ["productive"],
    }
    missing = [part for cell in parts for part in parts[cell] if part not in texts[cell]]
    assert missing == [], texts

"""The list of all pages of the documentation for programs, `llms.txt`, from their own titles."""

from __future__ import annotations

import json
import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_SECTIONS = {
    "Tutorials": "tutorials",
    "How-to guides": "how-to",
    "Reference": "reference",
    "Explanation": "explanation",
}
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_MACHINE_READABLE = """## For programs

- [job.schema.json](docs/job.schema.json): JSON Schema of job.yaml
- [output.schema.json](docs/reference/output.schema.json): JSON Schema of what commands print \
with `-o json`
- [AGENTS.md](AGENTS.md): how to build, test and change kdist
"""


def render() -> str:
    """Text of the file."""
    start = (_ROOT / "docs" / "index.md").read_text(encoding="utf-8").split("\n\n")
    parts = [f"{start[0]}\n\n> {start[1]}\n"]
    for title, folder in _SECTIONS.items():
        files = (_ROOT / "docs" / folder).iterdir()
        pages = sorted(path for path in files if path.suffix in {".md", ".ipynb"})
        lines = [_line(page) for page in pages if page.name != "index.md"]
        parts.append("\n".join([f"## {title}\n", *lines, ""]))
    others = [_line(_ROOT / "docs" / name) for name in ("faq.md", "glossary.md")]
    return "\n".join([*parts, "\n".join(["## More\n", *others, ""]), _MACHINE_READABLE])


def _line(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        texts = ("".join(each["source"]) for each in cells if each["cell_type"] == "markdown")
        text = "\n\n".join(texts)
    text = _FENCE.sub("", text)
    first, *others = re.findall(r"^##? (.+)$", text, re.MULTILINE)
    parts = f": {'; '.join(others)}" if others else ""
    return f"- [{first}]({page.relative_to(_ROOT)}){parts}"

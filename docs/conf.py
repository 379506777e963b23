"""How Sphinx makes the site from the Markdown in this folder: `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

from kdist import __version__

project = "kdist"
author = project_copyright = "the authors of kdist"
release = version = __version__

extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist"]
# Anchors as in GitHub's view of the same files.
myst_heading_anchors = 4
exclude_patterns = ["README.md"]
nitpicky = True
# Sessions of a shell and JSON with a comment or dots are no errors.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = "kdist"
html_favicon = "icon.svg"
html_static_path = ["_static"]
# Named by HTML in the pages, which Sphinx does not follow.
html_extra_path = sorted(path.name for path in Path(__file__).parent.glob("*.[ps][nv]g"))
html_css_files = ["kdist.css"]
html_show_sphinx = False
html_copy_source = False
# Both pass WCAG's contrast of 4.5 in code blocks.
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
# Commands alone go to the clipboard, without prompt and output.
copybutton_prompt_text = "$ "

_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def name_sources(app: Sphinx, name: str, source: list[str]) -> None:
    """Show a link to a file of the repository outside of docs/ as the path of that file."""
    folder = (Path(app.srcdir) / name).parent

    def mend(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(app.srcdir) or not target.exists():
            return link[0]
        path = target.relative_to(Path(app.srcdir).parent)
        return link[1] if link[1].strip("`") == str(path) else f"{link[1]} (`{path}`)"

    parts = _FENCE.split(source[0])
    source[0] = "".join(
        part if number % 2 else _LINK.sub(mend, part) for number, part in enumerate(parts)
    )


def setup(app: Sphinx) -> None:
    """Register what this file defines."""
    app.connect("source-read", name_sources)

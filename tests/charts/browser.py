"""Headless Chromium looks at a page: what it draws as a picture, how high its rows are, and whether
any text is cut.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

WIDTH = 1600
MOST_BYTES = 300_000
_MOST_HEIGHT = 6000
_MEASURE = """
<pre id=measured hidden></pre><script>
const box = one => one.getBoundingClientRect();
const bottoms = [...document.querySelectorAll("section")].map(one => \
[one.querySelector("h2").textContent, box(one).bottom]);
const narrow = [...document.querySelectorAll("h1,h2,h3,p,td,th,.value,.legend,\
.bars,.bars *,.table")].filter(one =>
  one.scrollWidth > one.clientWidth + 1 || one.scrollHeight > one.clientHeight + 2)\
.filter(one => one.clientWidth);
const outside = [...document.querySelectorAll("svg text")].filter(one => { \
const own = box(one), all = box(one.closest("svg"));
  return own.left < all.left - 1 || own.right > all.right + 1 || own.top < all.top - 1 || \
own.bottom > all.bottom + 1 });
const under = [...document.querySelectorAll("article > *")].filter(one => \
box(one).bottom > box(one.parentElement).bottom + 1);
const said = one => one.closest("article")?.querySelector("h3")?.textContent + ": " + \
one.textContent.slice(0, 80);
document.getElementById("measured").textContent = JSON.stringify({bottoms, \
height: box(document.body).bottom,
  cut: [...narrow, ...outside, ...under].map(said)});
</script>
"""


class Layout(NamedTuple):
    """Where a page's rows end, in pixels from its top, how high it is, and the texts that do not
    fit their places.
    """

    bottoms: dict[str, float]
    height: int
    cut: list[str]


def is_here() -> bool:
    """Whether there is a Chromium."""
    return shutil.which("chromium") is not None


def measure(page: str) -> Layout:
    """How Chromium lays out a page."""
    shown = _chromium(page.replace("</body>", f"{_MEASURE}</body>"), "--dump-dom")
    found = re.search(r'<pre id="measured"[^>]*>(.*?)</pre>', shown, re.DOTALL)
    assert found, shown[-2000:]
    document: dict[str, Any] = json.loads(unescape(found[1]))
    return Layout(dict(document["bottoms"]), int(document["height"]), document["cut"])


def shoot(page: str, picture: Path, *, top: float = 0, bottom: float | None = None) -> None:
    """Write what Chromium draws between two heights as PNG, with fewer colours where it would be
    large.
    """
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        _chromium(page, f"--screenshot={shot}")
        with Image.open(shot) as whole:
            piece = whole.convert("RGB").crop(
                (0, int(top), WIDTH, int(bottom or measure(page).height))
            )
    piece.save(picture, optimize=True)
    for colors in (256, 128):
        if picture.stat().st_size > MOST_BYTES:
            fewer = piece.quantize(
                colors, method=Image.Quantize.MAXCOVERAGE, kmeans=4, dither=Image.Dither.NONE
            )
            fewer.save(picture, optimize=True)


def _chromium(page: str, *args: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "page.html").write_text(page, encoding="utf-8")
        command = [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
        ]
        own = [f"--window-size={WIDTH},{_MOST_HEIGHT}", f"--user-data-dir={folder}/user"]
        done = subprocess.run(
            [*command, *own, *args, (Path(folder) / "page.html").as_uri()],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
    return done.stdout

"""The site builds without a warning, and every page of it is shown by a real browser: without an
error, without the network, in narrow and wide windows, legible in light and dark.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.docs.blocks import DOCS, PAGES
from tests.docs.chromium import Chromium

pytestmark = pytest.mark.processes

CONTRAST = 4.5
WIDTHS = (390, 1280)
# Colours are read back from a canvas, which understands each of CSS' ways to write them.
MEASURE = """
(theme => {
  document.body.dataset.theme = theme;
  const pen = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
    .getContext("2d", {willReadFrequently: true});
  const known = new Map();
  const rgba = color => {
    if (!known.has(color)) {
      pen.clearRect(0, 0, 1, 1); pen.fillStyle = color; pen.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data; known.set(color, [r, g, b, a / 255]);
    }
    return known.get(color);
  };
  const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3]));
  const behind = one => {
    const layers = [];
    for (let each = one; each; each = each.parentElement) {
      const color = rgba(getComputedStyle(each).backgroundColor);
      if (color[3]) layers.push(color);
      if (color[3] === 1) break;
    }
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const light = color => color.map(part => part / 255)
    .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const pale = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let read = 0;
  while (walker.nextNode()) {
    const one = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !one.checkVisibility({visibilityProperty: true,
        opacityProperty: true}) || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(one.tagName)) continue;
    read += 1;
    const under = behind(one);
    const text = over(rgba(getComputedStyle(one).color), under);
    const [low, high] = [light(text), light(under)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < LEAST) pale.add(`${one.className || one.tagName}: ` +
      `${walker.currentNode.data.trim().slice(0, 40)} ${ratio.toFixed(2)}`);
  }
  return {read, pale: [...pale].slice(0, 8)};
})
""".replace("LEAST", str(CONTRAST))
OVERFLOW = """
document.documentElement.scrollWidth > innerWidth ? [...document.querySelectorAll("article *")]
  .filter(one => one.getBoundingClientRect().right > innerWidth + 1 &&
    !one.closest(".table-wrapper,pre")).slice(0, 4)
  .map(one => one.tagName + " " + one.textContent.slice(0, 60)).concat(
    `${document.documentElement.scrollWidth} px`) : []
"""
FOUND = """
new Promise(found => {
  const look = () => /found \\d+ page/.test(document.querySelector(".search-summary")?.innerText)
    ? found([...document.querySelectorAll("#search-results li a")].map(one => one.textContent)) :
    setTimeout(look, 20);
  look();
})
"""


class Site(NamedTuple):
    """The built site: its folder, its address, and what the build has said."""

    folder: Path
    url: str
    said: str


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Keep the test's output clean."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The site as `make docs` builds it, served on this machine."""
    folder = tmp_path_factory.mktemp("site")
    command = ["-b", "html", "-W", "--keep-going", "-n", "-q", "-d"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *command, str(folder / "trees"), DOCS, folder / "html"],
        capture_output=True,
        text=True,
        check=False,
    )
    handler = partial(_Silent, directory=str(folder / "html"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Site(folder / "html", f"http://127.0.0.1:{server.server_address[1]}", done.stderr)
        server.shutdown()


@pytest.fixture(scope="module")
def browser(program: Callable[[str], str]) -> Iterator[Chromium]:
    """A Chromium."""
    with Chromium(program("chromium")) as chromium:
        yield chromium


def test_the_site_builds_without_a_warning_and_holds_every_page(site: Site) -> None:
    assert site.said == ""
    sources = {page.relative_to(DOCS).with_suffix(".html") for page in PAGES} - {
        Path("README.html")
    }
    built = {page.relative_to(site.folder) for page in site.folder.rglob("*.html")}
    assert sources == built - {Path("search.html"), Path("genindex.html")}


@pytest.mark.sampled
def test_every_page_is_legible_and_fits_narrow_and_wide_windows(
    site: Site, browser: Chromium
) -> None:
    wrong: dict[str, Any] = {}
    read = 0
    for page in sorted(site.folder.rglob("*.html")):
        name = str(page.relative_to(site.folder))
        browser.problems.clear()
        browser.resize(WIDTHS[-1], 900)
        browser.open(f"{site.url}/{name}")
        for theme in ("light", "dark"):
            measured = browser.evaluate(f"({MEASURE})('{theme}')")
            read += measured["read"]
            wrong[f"{name} {theme}"] = measured["pale"]
        for width in WIDTHS:
            browser.resize(width, 900)
            wrong[f"{name} {width} px"] = browser.evaluate(OVERFLOW)
        wrong[f"{name} console"] = list(browser.problems)
    assert read > 1000
    assert {what: found for what, found in wrong.items() if found} == {}


def test_a_search_finds_the_pages_that_hold_a_word(site: Site, browser: Chromium) -> None:
    browser.problems.clear()
    browser.open(f"{site.url}/search.html?q=rendezvous")
    assert "Glossary" in browser.evaluate(FOUND)
    assert browser.problems == []

"""Names that pages take from the code exist there: variables, metrics, and words with hyphens such
as events, causes and containers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kdist_controller.metrics import Metrics
from kdist_trainer.metrics.exporter import CATALOGUE
from tests.docs.blocks import PAGES
from tests.house.tree import ROOT, python_files

VARIABLE: Final = r"\bKDIST_[A-Z0-9_]+"
OTHERS: Final = {
    "argocd-cm",  # of Argo CD
    "fetch-init",  # of the source
    "how-to",
    "kdist-system",  # a namespace of one's own
    "kdist_controller",
    "kdist_job",  # a label
    "kdist_trainer",
}


def read_words(*folders: str) -> set[str]:
    """The texts of one word in the modules below these folders."""
    sources = (path.read_text() for path in python_files(*folders))
    return {word for text in sources for word in re.findall(r'"([\w-]+)"', text)}


def find_unknown(pattern: str, pages: Iterable[Path], known: set[str]) -> list[str]:
    """What a pattern finds on pages and is not known, with its page."""
    found = {(page, name) for page in pages for name in re.findall(pattern, page.read_text())}
    assert len({name for _, name in found}) >= 4
    return [
        f"{page.relative_to(ROOT)}: {name}"
        for page, name in found
        if name not in known and name not in OTHERS
    ]


def test_every_variable_on_a_page_is_one_of_the_code() -> None:
    assert find_unknown(VARIABLE, PAGES, read_words("cli", "trainer", "controller")) == []
    assert find_unknown(VARIABLE, [ROOT / "CONTRIBUTING.md"], read_words("tests")) == []


def test_every_metric_on_a_page_is_exposed_by_an_agent_or_the_controller() -> None:
    metrics = Metrics(lambda: (), lambda: 0, lambda: 0, list)
    metrics.show_refused(dict)
    kept = {family.name for family in metrics.registry.collect()}
    kept |= {f"{name}_total" for name in kept} | {metric.name for metric in CATALOGUE}
    kept |= {f"{name}_{part}" for name in kept for part in ("sum", "count", "bucket")}
    pages = [*PAGES, ROOT / "README.md", ROOT / "charts/kdist/README.md"]
    assert find_unknown(r"\bkdist_[a-z0-9_]*[a-z0-9]", pages, kept) == []


def test_every_word_with_hyphens_on_a_page_is_one_of_the_code() -> None:
    words = read_words("cli", "trainer", "controller")
    known = words | {word.replace("_", "-") for word in words}
    assert find_unknown(r"`([a-z]+(?:-[a-z]+)+)`", PAGES, known) == []

"""The limit of a slow rank in the alerts of the chart: that of the command line."""

from __future__ import annotations

import re
from pathlib import Path

from kdist.agents.metrics import STRAGGLER_RATIO

RULES = Path(__file__).parents[2] / "charts" / "kdist" / "rules" / "alerts.yaml"


def render() -> str:
    """The rules as they are, with the command line's limit of a slow rank."""
    limit = rf"\g<1>{STRAGGLER_RATIO}"
    return re.sub(r"(kdist_straggler_skew:ratio > )[\d.]+", limit, RULES.read_text("utf-8"))

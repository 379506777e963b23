"""The page of the Helm chart's values, which the chart's own page lists."""

from __future__ import annotations

from pathlib import Path

_CHART = Path(__file__).parents[2] / "charts" / "kdist" / "README.md"


def render() -> str:
    """Text of the page."""
    table = _CHART.read_text(encoding="utf-8").partition("| value |")[2]
    return f"""# Values of the Helm chart

What the chart installs, and how, is described in [charts/kdist](../../charts/kdist/README.md). \
Values are set with `--set NAME=VALUE` or in a file given by `--values`.

| value |{table}"""

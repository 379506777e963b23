"""The icon of the site, which is the chart's."""

from __future__ import annotations

import base64
from pathlib import Path

import yaml

_CHART = Path(__file__).parents[2] / "charts" / "kdist" / "Chart.yaml"


def render() -> str:
    """Text of the SVG file."""
    icon: str = yaml.safe_load(_CHART.read_text(encoding="utf-8"))["icon"]
    return base64.b64decode(icon.partition("base64,")[2]).decode().rstrip("\n") + "\n"

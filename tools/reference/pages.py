"""Which pages of docs/reference, and which other files, are generated, and from what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.reference import (
    chart,
    commands,
    events,
    exit_codes,
    icon,
    index,
    json_output,
    metrics,
    script_api,
    security,
    straggler_limit,
)

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands.render,
    "events.md": events.render,
    "exit-codes.md": exit_codes.render,
    "metrics.md": metrics.render,
    "python-api.md": script_api.render_program_api,
    "script-api.md": script_api.render,
    "chart.md": chart.render,
    "../../charts/kdist/rules/alerts.yaml": straggler_limit.render,
    "output.schema.json": json_output.render,
    "../../llms.txt": index.render,
    "../icon.svg": icon.render,
    "../explanation/security.md": security.render,
}


def write() -> None:
    """Write every generated page."""
    for name, render in PAGES.items():
        (FOLDER / name).write_text(render(), encoding="utf-8")

"""`kdist dashboards`: the dashboards as files for Grafana."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click

from kdist import console
from kdist.commands import options
from kdist.errors import UsageError
from kdist_trainer.formats.untrusted_text import parse_object

_NAMES = ("training-job", "fleet")


@click.group
def command() -> None:
    r"""Write the Grafana dashboards as JSON.

    \b
    Examples:
      kdist dashboards export training-job
      kdist dashboards export fleet > fleet.json
      kdist dashboards export --out dashboards/
    """


@command.command
@click.argument("name", required=False, metavar="[NAME]")
@options.out_option("Folder to write all of them to.", folder=True)
@options.output_option("grafana", "json")
def export(name: str | None, out: Path | None, *, output: str) -> None:
    r"""Print one dashboard as JSON, or write all of them to a folder.

    \b
    Examples:
      kdist dashboards export training-job
      kdist dashboards export --out dashboards/
    """
    if out is None:
        if name not in _NAMES:
            raise UsageError(f"name one of {', '.join(_NAMES)}, or a folder with --out")
        if output == "json":
            found = {"name": name, "dashboard": parse_object(_read(name))}
            console.emit(found, kind="Dashboard", output=output)
        else:
            console.document(_read(name).rstrip("\n"))
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file_name in _NAMES:
            (out / f"{file_name}.json").write_text(_read(file_name), encoding="utf-8")
        console.list_files(*(out / f"{each}.json" for each in _NAMES), output=output)
    except OSError as error:
        raise UsageError(f"cannot write to `{out}`: {error.strerror}") from None


def _read(name: str) -> str:
    return files("kdist.dashboards").joinpath("json", f"{name}.json").read_text(encoding="utf-8")

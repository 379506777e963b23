"""`kdist version`: which kdist, trainer and Python this is."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click

import kdist
from kdist import console
from kdist.commands.options import output_option


@click.command
@output_option("text", "json", "yaml")
def command(*, output: str) -> None:
    r"""Show the versions of kdist and of what it runs on.

    To see the version of the cluster, run `kdist doctor`.

    \b
    Examples:
      kdist version
      kdist version -o json
      kdist --version                  the version alone
    """
    versions = {"kdist": kdist.__version__, "python": platform.python_version()}
    for name in ("kdist-trainer", "torch"):
        versions[name] = _installed(name)
    if output == "text":
        for name, version in versions.items():
            console.result(f"{name} {version}")
    else:
        console.emit(versions, kind="Version", output=output)


def _installed(distribution: str) -> str:
    """Version of an installed distribution, without importing it."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"

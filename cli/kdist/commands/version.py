"""`kdist version`: which kdist, trainer and Python this is."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import click

import kdist
from kdist import console
from kdist.commands import options, targets
from kdist.errors import KdistError

_SECONDS = 3.0  # for which a server may be silent, without --timeout


@click.command
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json", "yaml"]),
    default="text",
    help="Output format.",
)
@click.option("--client", is_flag=True, help="Do not ask the server.")
@options.cluster_options
def command(
    *, output: str, client: bool, namespace: str | None, context: str | None, timeout: float | None
) -> None:
    r"""Show the versions of kdist and of what it runs on.

    \b
    Examples:
      kdist version
      kdist version -o json
      kdist version --client           without the server's
      kdist --version                  the version alone
    """
    versions = {"kdist": kdist.__version__, "python": platform.python_version()}
    for name in ("kdist-trainer", "torch"):
        versions[name] = _installed(name)
    if not client and (server := _ask_server(namespace, context, timeout)):
        versions["server"] = server
    if output == "text":
        for name, version in versions.items():
            console.result(f"{name} {version}")
    else:
        console.emit(versions, kind="Version", output=output)


def _ask_server(namespace: str | None, context: str | None, timeout: float | None) -> str:
    """The version of the configured cluster; empty without one, or if it does not answer."""
    place = options.find_place(click.get_current_context(), namespace, context)
    if not place.has_cluster():
        return ""
    try:
        found: Mapping[str, object] = place.connect(
            timeout=timeout, patience=_SECONDS, dialog=targets.DIALOG
        ).version()
    except KdistError as error:
        console.warning(f"the server's version is not known: {error.message}")
        return ""
    return str(found.get("gitVersion") or "")


def _installed(distribution: str) -> str:
    """Version of an installed distribution, without importing it."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"

"""Helm as the tests of the chart type it in their namespace."""

from __future__ import annotations

import shutil
import subprocess

from tests.charts.rules import CHART
from tests.cluster.namespace import Namespace

PATIENCE_SECONDS = 900


def call_helm(namespace: Namespace, command: str, *args: str) -> str:
    """What `helm COMMAND RELEASE …` prints; the release is named as the namespace. It must
    succeed.
    """
    line = [_program(namespace), command, namespace.name, *args, "--namespace", namespace.name]
    done = subprocess.run(
        line,
        env=namespace.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, f"{' '.join(line)}\n{done.stdout}{done.stderr}\n{namespace.look()}"
    return done.stdout


def render_chart(namespace: Namespace, *args: str) -> str:
    """What `helm template kdist CHART …` prints."""
    line = [
        _program(namespace),
        "template",
        namespace.name,
        str(CHART),
        "--namespace",
        namespace.name,
        *args,
    ]
    done = subprocess.run(
        line, env=namespace.environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _program(namespace: Namespace) -> str:
    helm = shutil.which("helm", path=namespace.environment["PATH"])
    assert helm is not None, "tests/cluster/cluster all builds it"
    return helm

"""The README's session on a cluster, typed line by line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.namespace import Namespace
from tests.house.readme import ON_A_CLUSTER, typed_on_a_cluster
from tests.house.tree import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.needs("shared-volumes")
def test_every_command_of_the_session_succeeds(namespace: Namespace, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    config = tmp_path / "kubeconfig"
    config.write_text(namespace.kubectl("config", "view", "--raw", "--minify"))
    environment = {
        **namespace.environment,
        "KUBECONFIG": str(config),
        "IMAGE": namespace.environment["KDIST_IMAGE"],
    }
    # where `kdist` is
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    subprocess.run(
        ["kubectl", "config", "set-context", "--current", f"--namespace={namespace.name}"],
        env=environment,
        check=True,
    )
    first, *session = typed_on_a_cluster()
    assert first.startswith(ON_A_CLUSTER)
    for line in session:
        done = subprocess.run(
            ["bash", "-euc", line],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=700,
            check=False,
        )
        assert done.returncode == 0, f"$ {line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert namespace.pods("digits") == []
    assert namespace.get("pvc", "digits-checkpoints")

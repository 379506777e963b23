"""The sessions on a cluster of the README and of the documentation's pages, typed into a real shell
by someone who has the wheels, a kubeconfig and an image.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.acceptance.conftest import clean_env as clean_env
from tests.acceptance.conftest import clone as clone
from tests.acceptance.conftest import find_failure
from tests.acceptance.conftest import installed as installed
from tests.cluster.abilities import Abilities
from tests.cluster.namespace import Namespace
from tests.docs.blocks import DOCS, PAGES, typed
from tests.house.readme import ON_A_CLUSTER, typed_on_a_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SESSIONS = {
    str(page.relative_to(DOCS)): session
    for page in PAGES
    if (session := typed(page, on_a_cluster=True))
}
"""The commands that a page tells the reader to type on a cluster, by page."""


@pytest.fixture
def newcomer(namespace: Namespace, clean_env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Environment variables of someone who has the wheels, and a kubeconfig at home whose context
    is of the namespace.
    """
    environment = {
        **clean_env,
        "PATH": f"{clean_env['PATH']}:{namespace.environment['PATH']}",
        "IMAGE": namespace.environment["KDIST_IMAGE"],
    }
    environment.pop("KUBECONFIG", None)
    config = tmp_path / ".kube" / "config"
    config.parent.mkdir()
    config.write_text(namespace.kubectl("config", "view", "--raw", "--minify"))
    subprocess.run(
        ["kubectl", "config", "set-context", "--current", f"--namespace={namespace.name}"],
        env=environment,
        check=True,
    )
    return environment


@pytest.mark.needs("shared-volumes")
def test_every_command_of_the_readme_succeeds(
    namespace: Namespace, newcomer: dict[str, str], tmp_path: Path
) -> None:
    first, *session = typed_on_a_cluster()
    assert first.startswith(ON_A_CLUSTER)
    assert find_failure(session, tmp_path, newcomer) == ""
    assert namespace.pods("digits") == []
    assert namespace.get("pvc", "digits-checkpoints")


@pytest.mark.parametrize("page", SESSIONS)
@pytest.mark.sampled
def test_every_command_of_a_page_succeeds_in_its_turn(
    page: str,
    abilities: Abilities,
    namespace: Namespace,
    newcomer: dict[str, str],
    tmp_path: Path,
) -> None:
    if not abilities.ours:
        pytest.skip("the pages describe a kind cluster, and this may be any other")
    assert find_failure(SESSIONS[page], tmp_path, newcomer) == ""
    assert namespace.pods("digits") == []

"""The notebook of the tutorials against a cluster: its cells as they are, with `kdist.train`
applying what it otherwise runs on this machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.conftest import BURST, Job
from tests.cluster.namespace import Namespace
from tests.docs.notebook import CELLS, check_texts, run_cells

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.sampled]

TRAIN = """
import kdist, warnings

warnings.simplefilter("ignore", kdist.KdistWarning)  # of what a small cluster lacks
kdist.train = lambda work, **fields: kdist.from_code(work, **{{**fields, **{fields!r}}}).apply(
    namespace={namespace!r}
)
"""


def test_the_cells_of_the_notebook_run_in_a_cluster(
    namespace: Namespace, job: Job, tmp_path: Path
) -> None:
    spec = job()["spec"]
    fields = {name: spec[name] for name in ("backend", "image", "resources", "checkpoints")}
    fields["podTemplate"] = {"spec": {"containers": [BURST]}}
    train = TRAIN.format(fields=fields, namespace=namespace.name)
    _, *texts = run_cells([train, *CELLS], tmp_path, namespace.environment)
    check_texts(texts)
    assert "Succeeded " in texts[3]

"""What `kdist validate` says of the code that a job names, without importing it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kdist.job_file.code import REQUIRED
from tests.cli.conftest import Kdist

MODEL = """\
from kdist_trainer.workload import Workload

class Complete(Workload):
    def model(self): ...
    def dataset(self, split): ...
    def loss(self, model, batch): ...

class Partial(Workload):
    def model(self): ...
"""
MISTAKES = {
    "code: ./none\n  train: {workload: m:A, steps: 1}": "spec.code: there is no ",
    f"code: {'a' * 300}\n  script: {{path: a.py}}": ": File name too long\n",
    "code: ~nobody-of-this-name/src\n  script: {path: a.py}": "spec.code: there is no ",
    "code: .\n  script: {path: trian.py}": "did you mean `train.py`?",
    "code: .\n  script: {path: broken.py}": "broken.py:1:7: not valid Python: '(' was never closed",
    "code: .\n  train: {workload: modle:Complete, steps: 1}": "did you mean `model:Complete`?",
    "code: .\n  train: {workload: model:Compleet, steps: 1}": "did you mean `model:Complete`?",
    "code: .\n  train: {workload: model:Partial, steps: 1}": "lacks dataset(), loss()",
}


def write(folder: Path, spec: str) -> None:
    head = "apiVersion: kdist.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: mine}\nspec:\n  "
    (folder / "job.yaml").write_text(f"{head}{spec}\n")
    (folder / "model.py").write_text(MODEL)
    (folder / "train.py").write_text("print('trains')\n")
    (folder / "broken.py").write_text("print (\n")


@pytest.mark.parametrize("spec", MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_in_the_code_is_named_before_anything_runs(
    spec: str, kdist: Kdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, spec)
    result = kdist("validate", "job.yaml")
    assert result.exit_code == 2
    assert MISTAKES[spec] in result.stderr
    assert kdist("run", "job.yaml").stderr.startswith(result.stderr.splitlines()[0])


@pytest.mark.parametrize(("kind", "said"), [("configMap", "ConfigMap"), ("claim", "claim")])
def test_code_on_a_cluster_is_valid_there_and_not_for_a_run_here(
    kind: str, said: str, kdist: Kdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, f"code: {{{kind}: mine}}\n  train: {{workload: model:Complete, steps: 1}}")
    assert kdist("validate", "job.yaml").exit_code == 0
    refused = kdist("run", "job.yaml")
    assert refused.exit_code == 2
    assert f"is the {said} mine of a cluster, which `kdist run` does not read" in refused.stderr


@pytest.mark.parametrize(
    "spec",
    [
        "code: .\n  train: {workload: model:Complete, steps: 1}",
        "code: .\n  script: {path: train.py}",
        "script: {path: /workspace/only-in-the-image.py}",
        "train: {workload: only_in_the_image:Mine, steps: 1}",
    ],
)
def test_sound_code_and_code_of_the_image_are_valid(
    spec: str, kdist: Kdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, spec)
    result = kdist("validate", "job.yaml")
    assert (result.exit_code, result.stderr) == (0, "")


def test_the_required_methods_are_those_that_are_abstract_in_the_trainer() -> None:
    source = (Path(__file__).parents[3] / "trainer/kdist_trainer/workload.py").read_text()
    (workload,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "Workload"
    )
    abstract = [
        node.name
        for node in workload.body
        if isinstance(node, ast.FunctionDef)
        and any(
            isinstance(each, ast.Name) and each.id == "abstractmethod"
            for each in node.decorator_list
        )
    ]
    assert tuple(abstract) == REQUIRED

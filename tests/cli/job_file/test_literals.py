"""`$(NAME)` and a comma that splits an argument are named with their place: neither is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdist.errors import InvalidJobError, Problem
from kdist.job_file import load_files, load_text
from tests.cli.conftest import Kdist

HEAD = """\
apiVersion: kdist.dev/v1alpha1
kind: TrainingJob
metadata: {name: digits}
spec:
"""
SCRIPT = HEAD + "  script:\n    path: train.py\n    args: "


def find_advice(folder: Path, text: str, *overrides: str) -> list[str]:
    (folder / "job.yaml").write_text(text)
    found: list[Problem] = []
    load_files(folder / "job.yaml", overrides=overrides, warnings=found)
    return [each.advice.removeprefix(f"{folder}/") for each in found]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (f"{SCRIPT}[--node=$(NODE_NAME)]\n", "job.yaml:7:12: spec.script.args[0]: "),
        (
            f"{SCRIPT}[]\n  env:\n    - {{name: A, value: b}}\n    - name: C\n"
            "      value: pre-$(NODE_NAME)\n",
            "job.yaml:11:14: spec.env[1].value: ",
        ),
        (
            f"{SCRIPT}[]\n  preflight: {{command: [echo, $(NODE_NAME)]}}\n",
            "job.yaml:8:31: spec.preflight.command[1]: ",
        ),
    ],
)
def test_a_reference_that_kubernetes_would_replace_is_named(
    text: str, place: str, tmp_path: Path
) -> None:
    (advice,) = find_advice(tmp_path, text)
    assert advice.startswith(f"{place}`$(NODE_NAME)` reaches the training as it is written")
    assert "read `NODE_NAME` from the environment" in advice


@pytest.mark.parametrize("text", ["$HOME", "$$(NAME)", "$()", "$(a b)", "cost: $5", "(NAME)"])
def test_what_kubernetes_would_not_replace_either_is_left_alone(text: str, tmp_path: Path) -> None:
    assert find_advice(tmp_path, f"{SCRIPT}['{text}']\n") == []


def test_kdist_run_names_it_too(
    kdist: Kdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ABSENT", raising=False)
    Path("train.py").touch()
    env = "[{name: API_KEY, value: x}, {name: ABSENT, secret: {name: s, key: k}}]"
    Path("job.yaml").write_text(f"{SCRIPT}[$(API_KEY)]\n  env: {env}\n")
    refused = kdist("run", "job.yaml")
    assert "ABSENT is a secret" in refused.stderr
    warned = [line for line in refused.stderr.splitlines() if line.startswith("Warning: ")]
    assert len(warned) == 1, "what it says of credentials is about a cluster"
    assert "`$(API_KEY)` reaches the training as it is written" in warned[0]


@pytest.mark.parametrize(
    ("items", "index"),
    [("[--names=a,b]", 1), ("[--lr=1, --betas=0.9,x]", 2), ("[model.layers=a,b]", 1)],
)
def test_an_argument_that_a_comma_has_split_is_named(
    items: str, index: int, tmp_path: Path
) -> None:
    (advice,) = find_advice(tmp_path, f"{SCRIPT}{items}\n")
    assert f"spec.script.args[{index}]: `" in advice
    assert "is an argument of its own; in `[…]` a comma ends an item: quote" in advice
    (advice,) = find_advice(tmp_path, f"{SCRIPT}[]\n", f"spec.script.args={items}")
    assert advice.startswith(f"--set spec.script.args={items}: spec.script.args[{index}]: ")


@pytest.mark.parametrize(
    "items", ["[--names, a,b]", "[--names=a, b]", '["--names=a,b"]', "[a,b]", "[--a=1,--b=c]"]
)
def test_arguments_that_are_meant_so_are_left_alone(items: str, tmp_path: Path) -> None:
    assert find_advice(tmp_path, f"{SCRIPT}{items}\n") == []


def test_a_number_after_a_comma_is_an_error_with_the_same_fix() -> None:
    with pytest.raises(InvalidJobError) as error:
        load_text(f"{SCRIPT}[--betas=0.9,0.95]\n", source="job.yaml")
    (problem,) = error.value.problems
    assert (problem.line, problem.path) == (7, "spec.script.args[1]")
    assert 'quote the whole one, as in ["--betas=0.9,0.95"]' in problem.hint


@pytest.mark.parametrize(
    ("value", "args"),
    [
        ('[a,"b,c"]', ["a", "b,c"]),
        ("[a,'b,c', \"d=1,2\"]", ["a", "b,c", "d=1,2"]),
        ('["--x=[1,2]", "a]b"]', ["--x=[1,2]", "a]b"]),
        ('["spec=1","{}"]', ["spec=1", "{}"]),
    ],
)
def test_a_list_of_set_may_have_commas_in_quotes(value: str, args: list[str]) -> None:
    job = load_text(f"{SCRIPT}[]\n", source="job.yaml", overrides=[f"spec.script.args={value}"])
    assert job.spec.script is not None
    assert job.spec.script.args == args

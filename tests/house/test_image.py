"""The Dockerfile: what restricted clusters ask of an image, and the linters' rules that need no
linter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from kdist.render.context import _DEFAULT_VARIABLES, _INSTALL_VARIABLES
from tests.house.tree import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
FINAL = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
"""The stage of the trainer's image, which is built unless another one is asked for."""


def instructions(text: str) -> list[tuple[str, str]]:
    """Each instruction of a Dockerfile with its argument, comments away and continued lines
    joined.
    """
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [
        (line.split(None, 1)[0], line.split(None, 1)[1])
        for line in joined.splitlines()
        if line.strip()
    ]


def unsound(text: str) -> Iterator[str]:
    """What is wrong with a Dockerfile, in the words of its instructions."""
    found = instructions(text)
    stages = re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE)
    last = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    defaults = dict(value.partition("=")[::2] for name, value in found if name == "ARG")
    for name, value in found:
        image = (
            re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], value.split()[0])
            if name == "FROM"
            else ""
        )
        if (
            name == "FROM"
            and image not in stages
            and not re.search(r":\d+\.\d+\.\d+[\w.-]*$|@sha256:[0-9a-f]{64}$", image)
        ):
            yield f"FROM {value}: neither a whole version nor a digest"
        if name in {"ADD", "MAINTAINER"} or (
            name in {"ENTRYPOINT", "CMD"} and not value.startswith("[")
        ):
            yield f"{name} {value}"
        if name == "RUN":
            yield from unsound_command(value)
    users = [value for name, value in found[last:] if name == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*(:\d+)?", users[-1]):
        yield f"USER {users}: not a number other than 0, which is all that runAsNonRoot can check"


def unsound_command(command: str) -> Iterator[str]:
    """What is wrong with a command that builds a layer."""
    if "apt-get install" in command and not (
        "--no-install-recommends" in command and "rm -rf /var/lib/apt/lists" in command
    ):
        yield f"apt-get leaves more than is needed: {command}"
    for install in re.findall(r"apt-get install ([^;&]*)", command):
        packages = [word for word in install.split() if not word.startswith("-")]
        if any("=" not in package for package in packages):
            yield f"a package has no version: {install}"
    for install in re.findall(r"pip install[^;&]*", command):
        if "--no-cache-dir" not in install or not (
            "--require-hashes" in install or "--index-url" in install
        ):
            yield f"pip leaves its cache or trusts the index: {install}"
    if re.search(r"\bsudo\b|curl[^|]*\|", command):
        yield command


def test_the_dockerfile_is_sound() -> None:
    assert list(unsound(DOCKERFILE)) == []


@pytest.mark.parametrize(
    "wrong",
    [
        "FROM python\nUSER 65532",
        "FROM python:latest\nUSER 65532",
        "FROM python:3.12-slim\nUSER 65532",
        "FROM python:3.12.12\nRUN apt-get install -y --no-install-recommends tini "
        "&& rm -rf /var/lib/apt/lists/*\nUSER 65532",
        "FROM python:3.12.12\nUSER kdist",
        "FROM python:3.12.12\nUSER 0",
        "FROM python:3.12.12",
        "FROM python:3.12.12\nUSER 65532\nENTRYPOINT python -m kdist_trainer",
        "FROM python:3.12.12\nADD x /\nUSER 65532",
        "FROM python:3.12.12\nRUN apt-get install -y tini\nUSER 65532",
        "FROM python:3.12.12\nRUN pip install torch\nUSER 65532",
        "FROM python:3.12.12 AS build\nUSER 1\nFROM python:3.12.12\nCOPY --from=build /x /x",
    ],
)
def test_an_unsound_dockerfile_is_noticed(wrong: str) -> None:
    assert list(unsound(wrong)) != []


def test_what_ends_the_pod_reaches_the_agent_and_no_shell_stands_between() -> None:
    entrypoint = json.loads(dict(instructions(FINAL))["ENTRYPOINT"])
    assert entrypoint[:2] == ["/usr/bin/tini", "--"]
    assert entrypoint[2:] == ["/opt/kdist/bin/python", "-m", "kdist_trainer"]


def test_a_change_of_the_trainer_leaves_the_layer_of_torch_alone() -> None:
    assert FINAL.index("torch.txt") < FINAL.index("rest.txt") < FINAL.index("COPY --from=trainer")


def test_the_controllers_image_is_one_of_its_own_without_torch() -> None:
    (stage,) = re.findall(
        r"^FROM \S+ AS controller\n(.*?)^FROM ", DOCKERFILE, re.MULTILINE | re.DOTALL
    )
    assert (
        list(unsound(f"FROM python:3.12.12 AS controller-files\nFROM python:3.12.12\n{stage}"))
        == []
    )
    entrypoint = json.loads(dict(instructions(stage))["ENTRYPOINT"])
    assert entrypoint == ["/opt/kdist/bin/python", "-m", "kdist_controller"]
    lock = (ROOT / "controller" / "requirements.txt").read_text()
    assert not re.search(r"^(torch|numpy|nvidia-.*|triton)==", lock, re.MULTILINE)


def test_a_pod_of_another_image_has_the_variables_of_these_images() -> None:
    found = [
        dict(each.split("=", 1) for each in value.split())
        for name, value in instructions(DOCKERFILE)
        if name == "ENV"
    ]
    of_controller, of_trainer = found
    assert of_controller == of_trainer
    path = of_trainer.pop("PATH")
    assert path.endswith(":$PATH")
    given = {**_DEFAULT_VARIABLES, **_INSTALL_VARIABLES}
    assert given.pop("PYTHONPATH")
    assert given == of_trainer
    helper = (ROOT / "cli/kdist/deploy/helper_pod.py").read_text()
    pairs = re.findall(r'\{"name": "(\w+)", "value": "([^"]+)"\}', helper)
    assert dict(pairs).items() <= of_trainer.items()
    assert pairs


def test_only_the_packages_and_their_locks_are_sent_to_the_engine() -> None:
    ignored = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert ignored == [
        "*",
        "!trainer/requirements.txt",
        "!trainer/kdist_trainer",
        "!controller/requirements.txt",
        "!controller/kdist_controller",
        "!cli/kdist",
        "!manifests",
        "**/__pycache__",
    ]
    for copied in (
        value
        for name, value in instructions(DOCKERFILE)
        if name == "COPY" and "--from" not in value
    ):
        assert f"!{copied.split()[0]}" in ignored

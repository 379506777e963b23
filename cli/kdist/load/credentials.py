"""Finds what looks like a credential in what a job would send to a cluster: files of its code
folder, and values of its environment. It warns and refuses nothing: only the user knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Final

from kdist.errors import KdistError, Problem
from kdist.load.folder import CodeFolder, SentFile, find_code
from kdist.load.yaml_parser import YamlNode
from kdist.spec import TrainingJob

# Hidden ones, such as .env and .aws/, are never sent.
_FILES: Final = (
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx", "*.keytab", "*.token", "*.env", "env"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "credentials", "credentials*.json"),
    *("client_secret*.json", "*service*account*.json", "*kubeconfig*", "secrets.*", "_netrc"),
)
_CONTENTS: Final = (
    (rb"-----BEGIN [A-Z ]*PRIVATE KEY", "a private key"),
    (rb'"type"\s*:\s*"service_account"', "the key of a service account"),
    (rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", "an access key of AWS"),
    (rb"\baws_secret_access_key\s*=\s*['\"]?[A-Za-z0-9/+]{40}", "an access key of AWS"),
    (rb"\b(?:client-key-data|id-token)\s*:\s*\S", "a kubeconfig"),
    (rb"\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{36}|glpat-[\w-]{20})\b", "a token"),
)
_READ_BYTES: Final = 1024 * 1024  # what a ConfigMap holds at most
_VARIABLE: Final = re.compile(r"(?i)(?:^|_)(?:KEY|TOKEN)$|SECRET|PASSWORD|PASSWD|CREDENTIAL")


def find_warnings(tree: YamlNode, job: TrainingJob, *, base: Path) -> Iterator[Problem]:
    """What looks like a credential and is not in a Secret, each with its place in the job file.

    Args:
        tree: the job file, for positions.
        job: the job.
        base: folder that the job's relative paths start from.
    """
    yield from _in_environment(tree, ())
    try:
        folder = find_code(job, base)
    except KdistError:
        return  # whoever reads the folder says why it cannot
    if folder is not None:
        from kdist.load.problems import locate  # only files with problems need the rest of it

        mark = locate(tree, ("spec", "code")).value
        for sent, reason in _in_files(folder):
            yield Problem(
                mark.source,
                mark.line,
                mark.column,
                "spec.code",
                f"{folder.shown}/{sent.name} looks like a credential ({reason}), and would be sent "
                "in a ConfigMap, which also the role `view` may read",
                hint=f"list it in {folder.shown}/.kdistignore; a Secret, named in spec.env[].secret"
                " or podTemplate, brings it to the pods",
            )


def _in_files(folder: CodeFolder) -> Iterator[tuple[SentFile, str]]:
    for sent in folder.files:
        # a link may hide what it is by its own name, and what it leads to by that of the link
        if any(map(_is_named_like_one, (PurePosixPath(sent.name).name, sent.path.name))):
            yield sent, "by its name"
        elif found := _look_into(sent.path):
            yield sent, f"it holds {found}"


def _is_named_like_one(name: str) -> bool:
    plain = name.lower()
    if plain.endswith((".pub", ".py")):
        return False
    return any(fnmatch(plain, each) for each in _FILES)


def _look_into(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_READ_BYTES)
    except OSError:
        return ""  # whoever sends it says that it cannot be read
    return next((what for pattern, what in _CONTENTS if re.search(pattern, content)), "")


def _in_environment(node: YamlNode, path: tuple[str | int, ...]) -> Iterator[Problem]:
    """Variables with a value, in `spec.env` and in containers of `podTemplate`."""
    for key, (_, child) in node.entries.items():
        if key == "env" and child.kind == "list":
            for index, item in enumerate(child.items):
                yield from _in_variable(item, (*path, key, index))
        yield from _in_environment(child, (*path, key))
    for index, child in enumerate(node.items):
        yield from _in_environment(child, (*path, index))


def _in_variable(item: YamlNode, path: tuple[str | int, ...]) -> Iterator[Problem]:
    name = item.entries["name"][1].text if "name" in item.entries else ""
    if not _VARIABLE.search(name) or "value" not in item.entries:
        return
    value = item.entries["value"][1]
    if not value.text or value.text.startswith("$("):
        return
    from kdist.spec.paths import show  # only files with warnings need it

    reference = "secret: {name: SECRET, key: KEY}"
    if path[1] == "podTemplate":
        reference = "valueFrom: {secretKeyRef: {name: SECRET, key: KEY}}"
    yield Problem(
        value.mark.source,
        value.mark.line,
        value.mark.column,
        show(path),
        f"the value of {name} would be readable for everyone who may read ConfigMaps, pods or this "
        "file",
        hint=f"`{reference}` instead of `value` takes it from a Secret",
    )

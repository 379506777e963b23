"""The rules that tie several fields of a job together.

Every rule names the fields it looked at, so that a problem points at a line, and is not told at all when one of these
fields is itself wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from kdist.spec.job import Spec

RULE = "job_rule"  # the type of the pydantic error that carries violations
SHIPPED_WORKLOADS = ("digits", "gpt")


class Violation(NamedTuple):
    """One broken rule: the sentence, and the fields it looked at (dotted, relative to the model), the guilty one first."""

    message: str
    fields: tuple[str, ...]
    suggestion: str = ""


def refuse_all(violations: Iterable[Violation]) -> None:
    """Raise one error that carries every violation, if there is any. Raises `PydanticCustomError`."""
    found = [tuple(violation) for violation in violations]
    if found:
        raise PydanticCustomError(RULE, "{text}", {"text": "; ".join(str(each[0]) for each in found), "violations": found})


def refuse(message: str, *fields: str) -> NoReturn:
    """Raise an error for one broken rule. Raises `PydanticCustomError`."""
    refuse_all([Violation(message, fields)])
    raise AssertionError("unreachable")


def check(spec: Spec) -> Iterator[Violation]:
    """Every broken rule of a job's spec."""
    yield from _one_kind(spec)
    yield from _shards(spec)
    yield from _devices(spec)
    yield from _environment(spec)
    yield from _mounts(spec)
    yield from _workload(spec)


def _one_kind(spec: Spec) -> Iterator[Violation]:
    if spec.train is not None and spec.script is not None:
        yield Violation("train and script exclude each other; keep one", ("script", "train"))
    if spec.train is None and spec.script is None:
        yield Violation("needs train (the managed loop) or script (a torchrun script)", ("train", "script"))


def _shards(spec: Spec) -> Iterator[Violation]:
    """A batch is dealt to shards and the shards to ranks, so none may be left empty at the largest world size."""
    train = spec.train
    if train is None:
        return
    per_node = 1 if spec.procs_per_node == "auto" else spec.procs_per_node
    world = spec.nodes.max * per_node
    looked_at = ("nodes", "procsPerNode", "train.virtualShards")
    if train.virtual_shards is not None and train.virtual_shards < world:
        yield Violation(
            f"must be at least {world}: {spec.nodes.max} nodes with {per_node} ranks each need a shard per rank",
            ("train.virtualShards", *looked_at),
        )
    shards = train.virtual_shards or world
    if train.global_batch < shards:
        reason = "virtual shards" if train.virtual_shards else "ranks of the largest group"
        yield Violation(f"must be at least {shards}, the number of {reason}", ("train.globalBatch", *looked_at))


def _devices(spec: Spec) -> Iterator[Violation]:
    gpus, procs = spec.resources.gpu, spec.procs_per_node
    if gpus and procs != "auto" and procs > gpus:
        yield Violation(
            f"must be at most {gpus}, the GPUs of a node: NCCL takes one rank per GPU", ("procsPerNode", "resources.gpu")
        )


# What torch's elastic agent and kdist tell the ranks; a job that sets them would break its own rendezvous.
_RESERVED_NAMES = frozenset(
    ["RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"]
    + ["MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"]
)
_RESERVED_PREFIXES = ("KDIST_", "TORCHELASTIC_")


def _environment(spec: Spec) -> Iterator[Violation]:
    seen: dict[str, int] = {}
    for index, variable in enumerate(spec.env):
        field = f"env.{index}.name"
        if variable.name in _RESERVED_NAMES or variable.name.startswith(_RESERVED_PREFIXES):
            yield Violation(f"`{variable.name}` is set by kdist itself and cannot be changed", (field,))
        if variable.name in seen:
            yield Violation(f"`{variable.name}` is already given at spec.env[{seen[variable.name]}]", (field,))
        seen.setdefault(variable.name, index)


# The image's own folders, and those that kdist mounts.
_SYSTEM_FOLDERS = ("/bin", "/boot", "/dev", "/etc", "/lib", "/proc", "/run", "/sbin", "/sys", "/usr", "/kdist", "/tmp")  # noqa: S108


def _mounts(spec: Spec) -> Iterator[Violation]:
    seen: dict[str, int] = {}
    for index, data in enumerate(spec.data):
        field, path = f"data.{index}.mountPath", data.mount_path
        if {"..", ".", ""} & set(path.split("/")[1:]):
            yield Violation("must not hold `.`, `..` or `//`", (field,))
        elif any(path == folder or path.startswith(f"{folder}/") for folder in _SYSTEM_FOLDERS):
            yield Violation(f"must not lie in `{'/'.join(path.split('/')[:2])}`, which belongs to the system", (field,))
        for other, first in seen.items():
            if path == other or path.startswith(f"{other}/") or other.startswith(f"{path}/"):
                yield Violation(f"overlaps `{other}` of spec.data[{first}]", (field,))
        seen.setdefault(path, index)


def _workload(spec: Spec) -> Iterator[Violation]:
    if spec.train is None or spec.train.workload in SHIPPED_WORKLOADS:
        return
    module, colon, name = spec.train.workload.partition(":")
    if colon and all(part.isidentifier() for part in module.split(".")) and name.isidentifier():
        return
    from difflib import get_close_matches

    near = get_close_matches(spec.train.workload.lower(), SHIPPED_WORKLOADS, n=1)
    yield Violation(
        f"must be {', '.join(SHIPPED_WORKLOADS)} or module:Class, found `{spec.train.workload[:80]}`",
        ("train.workload",),
        near[0] if near else "",
    )

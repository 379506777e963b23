"""Private names of torch are used only in modules called `torch_internals`, where tests guard them:
a release of torch may change them without a word.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.tree import ROOT, broken, python_files

ATTRIBUTES = {"_buffers", "_cdata", "_destroy", "_flatten", "_parameters", "_schema", "_version"}
"""Private attributes of torch's objects that no import shows."""


def private_names(source: str) -> Iterator[str]:
    """Imports and uses of names of torch that begin with one underscore."""
    tree = ast.parse(source)
    modules = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if is_torch(alias.name)]
            modules |= {alias.asname or "torch" for alias in node.names if is_torch(alias.name)}
        elif isinstance(node, ast.ImportFrom) and is_torch(node.module or ""):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules |= {alias.asname or alias.name for alias in node.names}
        else:
            continue
        yield from (f"{node.lineno}: imports {name}" for name in names if is_private(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            name = ast.unparse(node)
            if name.split(".")[0] in modules or (node.attr in ATTRIBUTES and "self." not in name):
                yield f"{node.lineno}: uses {name}"


def is_torch(module: str) -> bool:
    """Whether a dotted name is torch's."""
    return module.split(".")[0] == "torch"


def is_private(name: str) -> bool:
    """Whether any part of a dotted name begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_private_names_of_torch_stay_in_the_modules_for_them() -> None:
    paths = [
        path
        for path in python_files("trainer")
        if path.is_relative_to(ROOT / "trainer/kdist_trainer") and path.stem != "torch_internals"
    ]
    assert broken(private_names, paths) == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._C import DispatchKey",
        "from torch.distributed.checkpoint.filesystem import _StorageInfo",
        "x = torch._foreach_norm(y)",
        "import torch.distributed as dist\nx = dist._Work",
        "from torch.utils import data\nx = data._utils.collate",
        "tensors = module._buffers",
    ],
)
def test_a_private_name_is_noticed(line: str) -> None:
    assert list(private_names(f"import torch\n{line}\n")) != []


@pytest.mark.parametrize(
    "line", ["x = torch.__version__", "x = self._buffers", "from kdist_trainer import _x"]
)
def test_an_innocent_name_is_left_alone(line: str) -> None:
    assert list(private_names(f"import torch\n{line}\n")) == []

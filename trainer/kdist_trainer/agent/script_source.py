"""Reads the source of a script, and of its own modules, to decide whether its ranks may be forks of
a process that has imported torch (`script.preload: auto`). Sources are parsed and never run, and
what they leave unknown counts as unsafe.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_LEAST_MEMORY = 2 << 30
"""In a container with less there is no room for a process more, which needs 0.4 GB."""
_MOST_FILES, _MOST_BYTES = 200, 512 * 1024
_COMPILED = (*BYTECODE_SUFFIXES, *EXTENSION_SUFFIXES)
_READ_LATER = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|UCX|MASTER|SLURM|KDIST|WANDB|MLFLOW|COMET|NEPTUNE|TENSORBOARD|TF|HF"
    r"|HUGGINGFACE|TRANSFORMERS|DATASETS|TOKENIZERS|ACCELERATE|DEEPSPEED|DS|PL|AWS|RAY)_"
    r"|CUDA_(?!HOME|PATH)"
    r"|((LOCAL_|GROUP_|NODE_)?(RANK|WORLD_SIZE)|CUBLAS_WORKSPACE_CONFIG|TORCH_HOME)$"
)
"""Variables that neither a process reads when it starts nor torch when it is imported."""
_OUT_OF_SIGHT = {
    *("exec", "eval", "__import__", "import_module", "run_path", "run_module", "addsitedir"),
    *("spec_from_file_location", "load_dotenv", "putenv", "unsetenv", "meta_path", "path_hooks"),
    *("setdlopenflags", "RTLD_GLOBAL", "builtins", "eventlet", "gevent", "unsloth", "vllm"),
}
"""Names of what runs code, imports modules, loads libraries or sets variables."""
_TAKEN = sys.stdlib_module_names | {
    *("torch", "torchgen", "functorch", "triton", "numpy", "sympy", "mpmath", "networkx", "jinja2"),
    *("filelock", "fsspec", "typing_extensions", "typing_inspection", "annotated_types", "cuda"),
    *("pydantic", "pydantic_core", "packaging", "setuptools", "psutil", "optree", "yaml", "dill"),
    *("tqdm", "xxhash", "safetensors", "kdist_trainer"),
}
"""What importing torch may import."""
_NEED_TORCH = {"torch", "kdist_trainer", "accelerate", "deepspeed", "lightning", "transformers"}
_ENVIRONS = ("environ", "environb")
_READS = {"get", "copy", "items", "keys", "values", "dict", "len", "list", "set", "sorted"}


def find_obstacle(command: Sequence[str], folder: Path) -> str | None:
    """Why a script must run in new interpreters, with file and line; None if its ranks may be
    forks; empty if that gains nothing, since it does not import torch. `command` follows `python`,
    and `folder` is its working directory.
    """
    is_module = command[0] == "-m"
    script = (folder / command[0]).absolute()
    root = folder if is_module else script.parent
    try:
        if sys.platform != "linux":
            raise ValueError("only Linux makes the agent the parent of forked processes")
        for name in ("memory.max", "memory/memory.limit_in_bytes"):
            limit = (_CGROUP / name).read_text().strip() if (_CGROUP / name).exists() else "max"
            if limit.isdecimal() and int(limit) < _LEAST_MEMORY:
                raise ValueError(f"{int(limit) >> 20}Mi of memory leave no room for forks")
        files = _find_own(f"{command[1]}.__main__", root) if is_module else [script]
        if not files:
            raise ValueError(f"module {command[1]} is not in {folder}, where alone it is looked at")
        return None if _look_at(files, root) else ""
    except Exception as error:  # noqa: BLE001 - what cannot be looked at counts as unsafe
        return str(error) or repr(error)


def _look_at(files: list[Path], root: Path) -> bool:
    """Look at files and at what they import, from `root` on. Returns whether one imports torch;
    raises what stands against forks.
    """
    size, has_torch = 0, False
    for file in files:  # which grows meanwhile
        shown = file.relative_to(root) if file.is_relative_to(root) else file
        size += file.stat().st_size
        if size > _MOST_BYTES or len(files) > _MOST_FILES:
            raise ValueError(f"there is too much code to look at, up to {shown}")
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read_bytes(), str(shown))
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node, parent in parents.items():
            for what in _judge(node, parent, parents.get(parent)):
                raise ValueError(f"{shown}:{getattr(node, 'lineno', 0)} {what}")
            if isinstance(node, ast.alias):
                module, level = getattr(parent, "module", None), getattr(parent, "level", 0)
                name = f"{module}.{node.name}" if module else node.name
                has_torch |= not level and name.partition(".")[0] in _NEED_TORCH
                found = _find_own(name, file.parents[level - 1]) if level else _find(name, root)
                files += [each for each in found if each not in files]
    for entry in sorted(root.iterdir()):
        is_module = entry.suffix in (".py", ".so", ".pyc") or (entry / "__init__.py").exists()
        if entry.name.partition(".")[0] in _TAKEN and is_module:
            raise ValueError(f"{entry.name} has the name of a module that torch may import")
    return has_torch


def _find(name: str, root: Path) -> list[Path]:
    """The files that importing a module runs, unless it is installed."""
    top = name.partition(".")[0]
    if top in _TAKEN:
        return []
    if found := _find_own(name, root):
        return found
    spec = find_spec(top)
    places = [] if spec is None else spec.submodule_search_locations or [spec.origin or ""]
    own = (Path(each).parent for each in places if not re.search("(site|dist)-packages", each))
    return [file for folder in own for file in _find_own(name, folder)]


def _find_own(name: str, folder: Path) -> list[Path]:
    """Those below a folder. Raises `ValueError` if one has no source."""
    found = []
    for part in name.split("."):
        near, folder = folder, folder / part
        sources = [each for each in (folder / "__init__.py", near / f"{part}.py") if each.is_file()]
        if not sources and any((near / f"{part}{each}").is_file() for each in _COMPILED):
            raise ValueError(f"module {name} has no source")
        found += sources[:1]
    return found


def _judge(node: ast.AST, parent: ast.AST, above: ast.AST | None) -> Iterator[str]:
    """What may do something else in a fork of a process that has imported torch."""
    match node:
        case ast.alias(name=name, asname=alias):
            module = getattr(parent, "module", name) or ""
            is_sealed = not _OUT_OF_SIGHT.isdisjoint((name, module.partition(".")[0]))
            is_renamed = alias is not None and name in ("sys", *_ENVIRONS)
            if is_sealed or is_renamed or (module == "sys" and name in ("path", "modules", "*")):
                yield f"imports {name}" + (f" as {alias}" if is_renamed else "")
        case ast.Name(id=it) | ast.Attribute(attr=it) | ast.Constant(value=it) if it in _ENVIRONS:
            for variable in _list_set(parent, above):
                if not isinstance(variable, str):
                    yield "may set variables whose names are not known"
                elif not _READ_LATER.match(variable):
                    yield f"sets {variable}, which may be read when torch is imported"
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _OUT_OF_SIGHT:
            if isinstance(node, ast.Name) or name not in ("exec", "eval"):  # as model.eval()
                yield f"uses {name}"
        case ast.Attribute(value=ast.Name(id="sys"), attr="path" | "modules" as name):
            if not isinstance(parent, ast.Subscript) or ast.unparse(parent.slice) != "__name__":
                yield f"uses sys.{name}"
        case ast.Attribute(value=ast.Name(id=module), attr=name, ctx=ast.Store()):
            if module in sys.stdlib_module_names - {"sys", "ssl"}:
                yield f"changes {module}.{name}"


def _list_set(parent: ast.AST, call: ast.AST | None) -> Sequence[object]:
    """The variables that a use of `os.environ` sets; no text where the name is not known."""
    match parent, call:
        case ast.Subscript(ctx=ast.Load()) | ast.Compare() | ast.keyword(arg=None | "env"), _:
            return []
        case ast.Attribute(attr=name) | ast.Call(func=ast.Name(id=name)), _ if name in _READS:
            return []
        case ast.Dict(keys=[None, *_]), _:  # {**os.environ, …}
            return []
        case ast.Subscript(slice=ast.Constant(value=key)), _:
            return [key]
        case ast.Attribute(attr="setdefault" | "pop"), ast.Call(args=[ast.Constant(value=key), *_]):
            return [key]
        case ast.Attribute(attr="update"), ast.Call(args=[], keywords=given):
            return [each.arg for each in given]
        case ast.Attribute(attr="update"), ast.Call(args=[ast.Dict(keys=keys)], keywords=[]):
            return [getattr(key, "value", None) for key in keys]
    return [None]

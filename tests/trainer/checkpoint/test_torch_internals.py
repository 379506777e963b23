"""What `torch_internals` takes from torch without documentation is as it expects.

A failure here means that the installed torch has moved one of these names. Follow the move in
`trainer/kdist_trainer/checkpoint/torch_internals.py`, for the oldest and the newest supported
torch, and run `make compat`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import _nested_dict, _traverse
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta, TensorProperties

from kdist_trainer.checkpoint import torch_internals
from kdist_trainer.checkpoint.torch_internals import MemoryFormatEncoding, StorageInfo


def moved(name: str) -> str:
    """What to do about a name that is not where it was."""
    return (
        f"torch {torch.__version__} has changed {name}: adapt "
        "kdist_trainer/checkpoint/torch_internals.py and run `make compat`"
    )


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (_traverse.set_element, "root_dict path value"),
        (_state_dict_utils._create_cpu_state_dict, "state_dict pin_memory"),
        (_state_dict_utils._copy_state_dict, "state_dict copy_state_dict non_blocking"),
        (dcp_state_dict._get_fqns, "model name"),
        (FileSystem.create_stream, "self path mode"),
        (FileSystem.rename, "self path new_path"),
        (FileSystem.mkdir, "self path"),
        (FileSystem.rm_file, "self path"),
        (FileSystemWriter.storage_meta, "self"),
        (FileSystemReader.read_metadata, "self"),
        (DefaultSavePlanner.set_up_planner, "self state_dict storage_meta is_coordinator"),
        (DefaultLoadPlanner.load_bytes, "self read_item value"),
    ],
    ids=lambda value: getattr(value, "__qualname__", None),
)
def test_a_function_takes_the_arguments_that_it_is_given(
    function: Callable[..., Any], parameters: str
) -> None:
    expected = parameters.split()
    found = list(inspect.signature(function).parameters)[: len(expected)]
    assert found == expected, moved(f"{function.__module__}.{function.__qualname__}")


def test_a_state_is_flattened_to_names_and_paths_and_set_by_them() -> None:
    state: dict[str, Any] = {
        "model": {"weight": 1, "scales": torch.ones(1)},
        "steps": [{"lr": 2, "betas": (1, 2), "nothing": {}}, [torch.ones(1), [3]], 4],
        "list": [1, [2]],
        "empty": [],
    }
    flat, paths = torch_internals.flatten(state)
    expected = _nested_dict.flatten_state_dict(state)
    assert (flat, paths) == expected, moved("flatten_state_dict")
    assert paths["model.weight"] == ("model", "weight")
    torch_internals.set_value(state, paths["model.weight"], 3)
    assert state["model"]["weight"] == 3, moved("set_element")


def test_a_copy_on_the_cpu_holds_the_values_and_none_of_the_memory() -> None:
    tensors = {"weight": torch.arange(6.0).view(2, 3)}
    buffers = torch_internals.allocate_on_cpu(tensors, pin_memory=False)
    copies = torch_internals.copy_to_cpu(tensors, buffers, non_blocking=False)
    tensors["weight"].zero_()
    expected = torch.arange(6.0).view(2, 3)
    assert torch.equal(copies["weight"], expected), moved("_copy_state_dict")
    assert copies["weight"].data_ptr() == buffers["weight"].data_ptr(), moved("_copy_state_dict")


@pytest.mark.parametrize(("module", "name"), sorted(torch_internals.INDEX_GLOBALS))
def test_a_name_on_the_allow_list_is_there(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name), moved(f"{module}.{name}")


def test_the_records_of_the_index_have_the_fields_that_are_checked() -> None:
    found = [field.name for field in fields(StorageInfo)]
    assert found == ["relative_path", "offset", "length", "transform_descriptors"], moved(
        "filesystem._StorageInfo"
    )
    assert set(MemoryFormatEncoding.__members__) == {
        "TORCH_CONTIGUOUS_FORMAT",
        "TORCH_CHANNELS_LAST",
        "TORCH_PRESERVE_FORMAT",
    }, moved("metadata._MEM_FORMAT_ENCODING")


@pytest.mark.parametrize("newer", [(), ((3, 1),)], ids=["torch 2.13", "torch 2.15"])
def test_the_index_of_an_older_or_newer_torch_is_read(newer: tuple[Any, ...]) -> None:
    contiguous = MemoryFormatEncoding.TORCH_CONTIGUOUS_FORMAT
    properties = TensorProperties()
    state = (torch.bfloat16, torch.strided, True, contiguous, False, *newer)
    torch_internals.set_properties(properties, state)
    assert properties.dtype is torch.bfloat16, moved("TensorProperties.__setstate__")
    assert properties.memory_format is torch.contiguous_format


def test_the_writer_and_the_planners_keep_what_is_replaced_in_them(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path, thread_count=1, per_thread_copy_ahead=0, sync_files=False)
    assert isinstance(writer.fs, FileSystem), moved("FileSystemWriter.fs")
    assert isinstance(writer.save_id, str), moved("FileSystemWriter.save_id")
    assert {"checkpoint_id", "save_id", "load_id"} <= {
        field.name for field in fields(StorageMeta)
    }, moved("metadata.StorageMeta")
    saver = DefaultSavePlanner()
    saver.set_up_planner({"weight": torch.ones(1)}, None, True)
    assert saver.mappings == {"weight": ("weight",)}, moved("DefaultSavePlanner.mappings")
    assert "original_state_dict" in inspect.getsource(DefaultLoadPlanner), moved(
        "DefaultLoadPlanner.original_state_dict"
    )

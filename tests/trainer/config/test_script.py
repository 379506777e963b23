"""Scripts in `train.json`: which variables a forked rank cannot get, and what a finished run
remembers.
"""

from __future__ import annotations

import pytest

from kdist_trainer.config import START_VARIABLES, TrainConfig
from kdist_trainer.config.edit_rules import compare_done

READ_AT_START = (
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "GLIBC_TUNABLES",
    "MALLOC_ARENA_MAX",
    "MALLOC_CONF",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "GOMP_CPU_AFFINITY",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)
READ_LATER = (
    "CUDA_VISIBLE_DEVICES",
    "NCCL_DEBUG",
    "GLOO_SOCKET_IFNAME",
    "WANDB_API_KEY",
    "HF_HOME",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "MY_LD_PRELOAD",
    "GLIBC_TUNABLES_OF_MINE",
)


@pytest.mark.parametrize("name", READ_AT_START)
def test_what_a_process_reads_when_it_starts_is_known(name: str) -> None:
    assert START_VARIABLES.match(name)


@pytest.mark.parametrize("name", READ_LATER)
def test_what_is_read_later_is_nobodys_concern(name: str) -> None:
    assert not START_VARIABLES.match(name)


def describe(**script: str) -> TrainConfig:
    return TrainConfig.model_validate(
        {"name": "job", "nodes": {"min": 1, "max": 1}, "script": {"path": "train.py", **script}}
    )


def test_how_ranks_start_is_no_part_of_what_a_finished_script_has_computed() -> None:
    done = {"job": describe().to_job()}
    assert "preload" not in done["job"]["script"]
    assert compare_done(done, describe(preload="torch").to_job()).is_complete
    assert not compare_done(done, describe(collectiveTiming="off").to_job()).is_complete
    assert describe(preload="torch").to_document()["script"]["preload"] == "torch"
    assert describe(preload="none").to_document()["script"]["preload"] == "none"


def test_an_earlier_trainer_is_not_sent_the_default_which_it_does_not_know() -> None:
    for config in (describe(), describe(preload="auto")):
        assert config.script is not None
        assert config.script.preload == "auto"
        assert "preload" not in config.to_document()["script"]

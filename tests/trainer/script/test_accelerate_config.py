"""What `accelerate config` asks for and `accelerate launch` would have set is named where a script
lacks it, and only there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.agent.test_script_runner import run_script

CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
dynamo_config: {dynamo_backend: INDUCTOR}
fsdp_config: {fsdp_version: 2}
num_processes: 8
"""
ASKED = {"mixed_precision: bf16", "distributed_type: FSDP", "dynamo_backend: INDUCTOR"}


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "environment", "lacks"),
    [
        ("", {}, ASKED),
        ("mixed_precision='bf16', dynamo_backend='inductor'", {}, {"distributed_type: FSDP"}),
        (
            "",
            {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_FSDP": "true"},
            {"dynamo_backend: INDUCTOR"},
        ),
        ("", {"RANK": "1"}, set()),
    ],
)
def test_rank_0_names_what_its_accelerator_lacks(
    tmp_path: Path, arguments: str, environment: dict[str, str], lacks: set[str]
) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text(CONFIG)
    code = f"""
        from accelerate import Accelerator
        print(Accelerator(cpu=True, {arguments}).mixed_precision)
        Accelerator(cpu=True)
    """
    around = {"KDIST_GENERATION": "1", "HF_HOME": str(tmp_path), **environment}
    ended = run_script(tmp_path / "script.py", code=code, **around)
    assert ended.returncode == 0, ended.stderr
    assert {each for each in ASKED if each in ended.stderr} == lacks
    assert ended.stderr.count("accelerate-config-unused") == bool(lacks)

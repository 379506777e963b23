"""What one agent is told on its command line, and what its ranks read in their environment."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from kdist_trainer.config import TrainConfig

WORKER = "kdist_trainer.worker:main"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One agent. `entrypoint` is the `module:function` that a rank of a managed training runs; it returns its outcome."""

    config_path: Path
    config: TrainConfig
    run_id: str
    node: str
    scratch: Path
    rendezvous: str
    checkpoints: Path | None = None
    code: Path | None = None
    data: dict[str, str] = field(default_factory=dict)
    port: int = 9401
    lifeline: Path | None = None
    entrypoint: str = WORKER

    @property
    def socket(self) -> Path:
        """Where ranks send their records."""
        return self.scratch / "metrics.sock"

    @property
    def own_lifeline(self) -> Path:
        """The pipe whose end tells the ranks that this agent is gone."""
        return self.scratch / "lifeline"

    def environment(self) -> dict[str, str]:
        """What every rank of this agent finds in its environment besides torchrun's variables."""
        variables = {
            "KDIST_CONFIG": str(self.config_path),
            "KDIST_JOB": self.config.name,
            "KDIST_RUN_ID": self.run_id,
            "KDIST_NODE": self.node,
            "KDIST_SCRATCH": str(self.scratch),
            "KDIST_METRICS_SOCKET": str(self.socket),
            "KDIST_LIFELINE": str(self.own_lifeline),
            "KDIST_DATA": json.dumps(self.data),
        }
        if self.checkpoints is not None:
            variables["KDIST_CHECKPOINTS"] = str(self.checkpoints)
        if self.code is not None:
            variables["KDIST_CODE"] = str(self.code)
        return variables


def count_procs(config: TrainConfig) -> int:
    """Ranks on this node: as the job says, else one per GPU, else one."""
    if isinstance(config.procs_per_node, int):
        return config.procs_per_node
    import torch

    return max(1, torch.cuda.device_count())


def prepare_scratch(settings: Settings) -> int | None:
    """Make the folder private and clear what a dead predecessor left; returns the predecessor's pid if it is known.

    Raises `OSError`.
    """
    scratch = settings.scratch
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch.chmod(0o700)
    try:
        predecessor: int | None = json.loads((scratch / "agent.json").read_bytes())["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        predecessor = None
    for name in ("agent.json", "exit.json", "metrics.sock"):
        (scratch / name).unlink(missing_ok=True)
    return predecessor if predecessor != os.getpid() else None

"""What a training is told: the document `train.json`, and the exit codes that everything agrees on.

`kdist` renders a job's `train` or `script` section and the agent's settings into one `train.json`;
every agent and every rank reads the same file. Nothing here imports torch, so the command line can
share these models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import from_json, to_json

from kdist_trainer.config.base import ConfigModel, Count, Name, Nodes, PositiveSeconds, Seconds
from kdist_trainer.config.changes import Change, Fate, Finished, compare, judge_done, refuse
from kdist_trainer.config.exit_codes import Cause, Exit
from kdist_trainer.config.training import (
    QUANTITY,
    AllReduceCheck,
    Checkpointing,
    EarlyStop,
    Every,
    Init,
    LoaderConfig,
    Optimizer,
    Preflight,
    Schedule,
    Training,
    count_bytes,
)

__all__ = [
    "QUANTITY",
    "AllReduceCheck",
    "Cause",
    "Change",
    "Checkpointing",
    "ConfigModel",
    "Count",
    "EarlyStop",
    "Every",
    "Exit",
    "Fate",
    "Finished",
    "Init",
    "LoaderConfig",
    "Name",
    "Nodes",
    "Optimizer",
    "PositiveSeconds",
    "Preflight",
    "Schedule",
    "Script",
    "Seconds",
    "TrainConfig",
    "Training",
    "compare",
    "count_bytes",
    "judge_done",
    "refuse",
]


class Script(ConfigModel):
    """A torchrun script, run as it is: `spec.script`."""

    path: Name | None = Field(
        None, description="path of the script, relative to the job file or to code."
    )
    module: (
        Annotated[str, Field(max_length=253, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")] | None
    ) = Field(
        None, description="module to run instead of a path, as `python -m` and `torchrun -m` do."
    )
    args: list[Annotated[str, Field(max_length=32_768)]] = Field(
        [], max_length=1024, description="args of the script."
    )
    collective_timing: Literal["on", "off"] = Field(
        "on",
        description=(
            "collectiveTiming: whether the collectives between ranks are counted and timed."
        ),
    )

    @model_validator(mode="after")
    def _one_form(self) -> Script:
        if (self.path is None) == (self.module is None):
            raise ValueError("needs exactly one of path and module")
        return self

    @property
    def command(self) -> tuple[str, ...]:
        """What Python is given to run it: the path, or `-m` and the module, and the arguments."""
        return (
            *(("-m", self.module) if self.module is not None else (str(self.path),)),
            *self.args,
        )


NODES = "nodes.json"
"""The file beside a cluster's `train.json` that holds the job's `nodes`: all else is as it was when
the run was started.
"""


class TrainConfig(ConfigModel):
    """The whole of `train.json`: what the agents and ranks of one job are told, the same bytes
    everywhere.
    """

    name: Name = Field(description="name of the job.")
    nodes: Nodes = Field(description="nodes of the job.")
    procs_per_node: int | Literal["auto"] = Field(
        "auto", description="procsPerNode: ranks on each node; auto is one per GPU, else 1."
    )
    threads_per_rank: int = Field(
        1, ge=1, le=1024, description="threadsPerRank: CPU threads of each rank."
    )
    max_restarts: int = Field(
        10, ge=0, le=100_000, description="maxRestarts without progress before the job gives up."
    )
    termination_grace_period_seconds: PositiveSeconds = Field(
        60,
        description="terminationGracePeriodSeconds from the request to stop to the end by force.",
    )
    rendezvous_timeout_seconds: PositiveSeconds = Field(
        600, description="rendezvousTimeoutSeconds to wait for enough nodes."
    )
    join_window_seconds: Seconds = Field(
        10, description="joinWindowSeconds in which joining nodes are let in together."
    )
    collective_timeout_seconds: PositiveSeconds = Field(
        300, description="collectiveTimeoutSeconds a collective may take."
    )
    hang_timeout_seconds: PositiveSeconds = Field(
        300, description="hangTimeoutSeconds without progress before a rank is killed."
    )
    final_scrape_timeout_seconds: Seconds = Field(
        30,
        description=(
            "finalScrapeTimeoutSeconds at most that a scraped agent whose work is over waits for a "
            "last scrape."
        ),
    )
    preflight: Preflight | None = Field(
        None, description="preflight: what is measured before a group of ranks trains."
    )
    train: Training | None = Field(None, description="train: the managed loop.")
    script: Script | None = Field(None, description="script: a torchrun script as it is.")

    @model_validator(mode="after")
    def _one_kind(self) -> TrainConfig:
        if (self.train is None) == (self.script is None):
            raise ValueError("needs exactly one of train and script")
        return self

    @classmethod
    def read(cls, path: Path) -> TrainConfig:
        """Read `train.json`, and `nodes.json` beside it where that has the nodes, which may change
        while the job runs.

        Raises `OSError`, or `pydantic.ValidationError` with every problem.
        """
        text, nodes = path.read_bytes(), path.with_name(NODES)
        if not nodes.exists():
            return cls.model_validate_json(text)
        document = from_json(text)
        if isinstance(document, dict):
            document["nodes"] = from_json(nodes.read_bytes())
        return cls.model_validate_json(to_json(document))

    def to_json(self) -> str:
        """Text of `train.json`, every default written out, keys in the order of this file."""
        return self.model_dump_json(by_alias=True, indent=2)

    def to_document(self) -> dict[str, Any]:
        """The same as plain values."""
        return self.model_dump(mode="json", by_alias=True)

    def to_job(self) -> dict[str, Any]:
        """What a checkpoint keeps of the job: the `train` or `script` section as plain values."""
        return {
            name: value
            for name, value in self.to_document().items()
            if name in ("train", "script") and value is not None
        }

    def max_world_size(self, procs_per_node: int) -> int:
        """Most ranks that the job can have when every node has `procs_per_node` of them."""
        return self.nodes.max * procs_per_node

"""`TrainConfig`, the document `train.json`: the fields of a job outside `spec.train`, with their
defaults and limits, such as timeouts, restarts and `spec.script`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from kdist_trainer.config.base import (
    QUANTITY,
    Argument,
    ConfigModel,
    Name,
    Nodes,
    PositiveSeconds,
    Seconds,
    count_bytes,
    later,
)
from kdist_trainer.config.training import Preflight, Training
from kdist_trainer.formats import take_format
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json, parse_model, parse_object

START_VARIABLES = re.compile(
    "LD_|GLIBC_TUNABLES$|MALLOC_|PYTHON|(OMP|GOMP|KMP|MKL|OPENBLAS)_|PYTORCH_.*ALLOC"
)
"""Names of variables that the C library, the interpreter or torch read when a process starts: a
fork has those of the process that it is forked from.
"""


class PrintedSteps(ConfigModel):
    """How the steps of a script are found in what it prints: `spec.script.progress`."""

    pattern: Annotated[str, Field(min_length=1, max_length=1000)] = Field(
        description=(
            "Regular expression of Python's for a line of rank 0, with the group `step`, and with "
            "`loss` and `target` (the number of steps) if the line has them."
        )
    )

    @model_validator(mode="after")
    def _has_step(self) -> PrintedSteps:
        import regex  # most jobs have no pattern, and commands start fast

        try:
            groups = regex.compile(self.pattern).groupindex.keys()
        except regex.error as error:
            raise ValueError(f"pattern is no regular expression: {error}") from None
        if "step" not in groups or groups - {"step", "loss", "target"}:
            raise ValueError("pattern needs the group (?P<step>...), and may have loss and target")
        return self


class Script(ConfigModel):
    """A torchrun script that runs unchanged: `spec.script`."""

    path: Name | None = Field(
        None, description="Path of the script, relative to the job file or to code."
    )
    module: (
        Annotated[str, Field(max_length=253, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")] | None
    ) = Field(
        None, description=("Module to run instead of a path, like `python -m` and `torchrun -m`.")
    )
    args: list[Argument] = Field([], max_length=1024, description="Arguments of the script.")
    collective_timing: Literal["on", "off"] = Field(
        "on",
        description=("Whether collectives between ranks are counted and timed."),
    )
    tracker_identity: Literal["on", "off"] = later(
        "on",
        description="Whether W&B and MLflow continue the run's curve after a restart.",
    )
    progress: PrintedSteps | None = later(
        None,
        description="How steps and losses are found in what rank 0 prints, without a Reporter.",
    )
    preload: Literal["auto", "none", "torch"] = later(
        "auto",
        description=(
            "How ranks start: none is a new interpreter for each, torch forks them from a process "
            "that has imported torch, which restarts them seconds sooner; auto is torch where the "
            "source of the script shows that nothing in it can notice, else none."
        ),
    )

    @model_validator(mode="after")
    def _exactly_one_target(self) -> Script:
        if (self.path is None) == (self.module is None):
            raise ValueError("needs exactly one of path and module")
        return self

    @property
    def command(self) -> tuple[str, ...]:
        """Arguments of the Python interpreter that run the script."""
        return (
            *(("-m", self.module) if self.module is not None else (str(self.path),)),
            *self.args,
        )


QUANTITY_OR_NONE = f"^none$|{QUANTITY}"
COMPILE_CACHE = r"^(auto|off|/[^\x00-\x1f]*)$"


class Logs(ConfigModel):
    """The logs that are kept when the pods are gone: `spec.logs`."""

    keep: str = Field(
        "64Mi",
        max_length=32,
        pattern=QUANTITY_OR_NONE,
        description=(
            "Maximum size of the log that each node keeps next to the checkpoints, such as 64Mi; "
            "its oldest lines are removed first. With none, no log is kept."
        ),
    )

    @property
    def max_bytes(self) -> int:
        """The most bytes of one node's log; 0 keeps none."""
        return 0 if self.keep == "none" else count_bytes(self.keep)


RESTARTS, MACHINES, NOTHING = "restarts", "machines", "nothing"
"""What a restart is counted against: the job's `maxRestarts`, the limit of the faults of devices
and nodes, or nothing.
"""
DEFAULT_RESTARTS = 10
"""Restarts without progress, where the job names no number."""
NODES = "nodes.json"
"""Name of the file next to `train.json` that contains the job's `nodes` in a cluster: unlike the
rest of the configuration, they may change during the run.
"""


class ExitCodes(ConfigModel):
    """Exit codes of a script's rank; a signal N is 128 + N."""

    operator: Literal["In", "NotIn"] = Field(description="Whether the code is one of the values.")
    values: list[Annotated[int, Field(ge=1, le=255)]] = Field(
        min_length=1, max_length=255, description="Exit codes."
    )

    @property
    def codes(self) -> frozenset[int]:
        """All codes that it is about."""
        values = frozenset(self.values)
        return values if self.operator == "In" else frozenset(range(1, 256)) - values


FAIL_JOB, IGNORE, COUNT = "FailJob", "Ignore", "Count"


class RestartRule(ConfigModel):
    """What follows from a failure of a rank, in the words of a Job's podFailurePolicy."""

    action: Literal["FailJob", "Ignore", "Count"] = Field(
        description=(
            "FailJob ends the job, Ignore starts it again without counting, Count starts it again "
            "and counts against maxRestarts."
        )
    )
    on_exit_codes: ExitCodes | None = Field(
        None, description="Exit codes of a script's rank; an error that it raises is 1."
    )
    on_errors: (
        Annotated[
            list[Annotated[str, Field(max_length=253, pattern=r"^[A-Za-z_]\w*(\.\w+)*$")]],
            Field(min_length=1, max_length=64),
        ]
        | None
    ) = Field(
        None,
        description=(
            "Names of error types, plain or with their module; they stand for derived types too."
        ),
    )

    @model_validator(mode="after")
    def _exactly_one_condition(self) -> RestartRule:
        if (self.on_exit_codes is None) == (self.on_errors is None):
            raise ValueError("needs exactly one of onExitCodes and onErrors")
        if "SystemExit" in (self.on_errors or ()):
            raise ValueError("SystemExit is an exit code, not an error; use onExitCodes")
        return self

    def matches(self, code: int | None, types: Iterable[str]) -> bool:
        """Whether it is for a rank that has ended with this code and raised an error whose type,
        or a base of it, is one of these.
        """
        if self.on_exit_codes is not None:
            return code in self.on_exit_codes.codes
        known = {name for each in types for name in (each, each.rpartition(".")[2])}
        return not known.isdisjoint(self.on_errors or ())


class Restart(ConfigModel):
    """When the job is started again: `spec.restart`."""

    device_faults: Annotated[int, Field(ge=0, le=100_000)] | None = Field(
        None,
        description=(
            "Restarts without progress after faults of GPUs and nodes, which do not count against "
            f"maxRestarts. Without a number {DEFAULT_RESTARTS}, or 0 if maxRestarts is 0."
        ),
    )
    rules: list[RestartRule] = Field(
        [], max_length=32, description="What certain failures lead to; the first that matches."
    )


class TrainConfig(ConfigModel):
    """The document `train.json`, identical for all agents and ranks of a job."""

    name: Name = Field(description="Name of the job.")
    nodes: Nodes = Field(description="Number of nodes.")
    procs_per_node: int | Literal["auto"] = Field(
        "auto", description="Ranks per node; auto is one per GPU, or 1 without GPUs."
    )
    threads_per_rank: int = Field(1, ge=1, le=1024, description="CPU threads of each rank.")
    max_restarts: Annotated[int, Field(ge=0, le=100_000)] | None = Field(
        None,
        description=(
            "Restarts without progress before the job fails; progress resets the count. Default: "
            f"{DEFAULT_RESTARTS}; none for a script of which no rank has opened a Checkpointer or "
            "an integration that resumes."
        ),
    )
    active_deadline_seconds: PositiveSeconds | None = later(
        None,
        description=(
            "Time for which the job may be active: then it saves and fails. It begins when the "
            "nodes have met, and again when a suspended job is resumed."
        ),
    )
    memory_snapshot: Literal["on", "off"] = later(
        "off",
        description=(
            "Record GPU memory allocations, and write a snapshot next to the checkpoints when "
            "a GPU runs out of memory. Slows allocations down."
        ),
    )
    termination_grace_period_seconds: PositiveSeconds = Field(
        60,
        description="Seconds between the request to stop and a forced kill.",
    )
    rendezvous_timeout_seconds: PositiveSeconds = Field(
        600, description="Maximum time to wait for enough nodes, in seconds."
    )
    join_window_seconds: Seconds = Field(
        10,
        description=(
            "Seconds that a node waits to join a running group, so that others join with it; none "
            "once `nodes.max` is reached. It does not change how long a start waits."
        ),
    )
    collective_timeout_seconds: PositiveSeconds = Field(
        300, description="Maximum duration of a collective, in seconds."
    )
    hang_timeout_seconds: PositiveSeconds = Field(
        300, description="Seconds without progress after which a rank is killed."
    )
    final_scrape_timeout_seconds: Seconds = Field(
        30,
        description=(
            "Maximum time a finished agent keeps serving /metrics for a final scrape, in seconds."
        ),
    )
    logs: Logs = Field(Logs(), description="Logs that are kept when the pods are gone.")
    secret_variables: list[str] = Field(
        [], description="Variables whose values are in no log that is kept."
    )
    compile_cache: str = later(
        "auto",
        max_length=4096,
        pattern=COMPILE_CACHE,
        description="Where compiled code is cached between starts: auto, an absolute path, or off.",
    )
    preflight: Preflight | None = Field(
        None,
        description=(
            "Checks of nodes before they join, and of the network between ranks before they train."
        ),
    )
    train: Training | None = Field(None, description="Settings of the managed training loop.")
    script: Script | None = Field(None, description="A torchrun script, run unchanged.")

    restart: Restart | None = later(
        None,
        description="When the job is started again after a failure.",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> TrainConfig:
        if (self.train is None) == (self.script is None):
            raise ValueError("needs exactly one of train and script")
        return self

    @model_serializer(mode="wrap")
    def _keep_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out a number of restarts that nobody has named, as earlier trainers expect."""
        document: dict[str, Any] = serialize(self)
        unnamed = ("max_restarts", "maxRestarts") if self.max_restarts is None else ()
        return {name: value for name, value in document.items() if name not in unnamed}

    @property
    def restart_limit(self) -> int:
        """The restarts without progress of a training that continues after one."""
        return DEFAULT_RESTARTS if self.max_restarts is None else self.max_restarts

    @property
    def restart_limits(self) -> dict[str, int]:
        """The restarts without progress, by what they are counted against: faults of devices and
        nodes have a limit of their own, unless the job wants no restart.
        """
        named = None if self.restart is None else self.restart.device_faults
        default = DEFAULT_RESTARTS if self.restart_limit else 0
        return {RESTARTS: self.restart_limit, MACHINES: default if named is None else named}

    @property
    def starts_once(self) -> bool:
        """Whether a failure ends the job unless a rank has opened the job's checkpoints: a script
        that cannot continue would start from its beginning, and overwrite its own files.
        """
        return self.script is not None and self.max_restarts is None

    @classmethod
    def read(cls, path: Path) -> TrainConfig:
        """Read `train.json`, and the nodes from `nodes.json` next to it if that exists.

        Raises:
            OSError: A file cannot be read.
            MalformedTextError: A file is not JSON.
            NewerFormatError: A newer version wrote one.
            pydantic.ValidationError: The document is invalid; has every problem.
        """
        nodes = path.with_name(NODES)
        document = take_format("train.json", parse_object(path.read_bytes()))
        document.pop("standby", None)  # a setting of version 0.1.0; that of nodes stays
        if nodes.exists():
            document["nodes"] = take_format(NODES, parse_json(nodes.read_bytes()))
        return parse_model(cls, encode_json(document))

    def to_json(self) -> str:
        """The text of `train.json`, with all defaults, keys in the order of declaration."""
        return self.model_dump_json(by_alias=True, indent=2)

    def to_document(self) -> dict[str, Any]:
        """The document as plain values."""
        return self.model_dump(mode="json", by_alias=True)

    def to_job(self) -> dict[str, Any]:
        """The part stored in checkpoints: the `train` or `script` section as plain values, without
        what changes nothing that a script computes.
        """
        unused = {"script": {"preload", "progress", "tracker_identity"}}
        document = self.model_dump(mode="json", by_alias=True, exclude=unused)
        return {
            name: value
            for name, value in document.items()
            if name in ("train", "script") and value is not None
        }

    def max_world_size(self, procs_per_node: int) -> int:
        """The maximum number of ranks of the job, with `procs_per_node` ranks on every node."""
        return self.nodes.max * procs_per_node

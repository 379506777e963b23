"""The rules of the strategies of parallel training: over which numbers of nodes and ranks each can
be spread, and which of the shipped workloads it can train.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kdist.spec.violations import Violation

if TYPE_CHECKING:
    from kdist.spec.training_job import Spec

SHIPPED_WORKLOADS = ("digits", "gpt")
MODEL_PARALLEL = ("tensor", "pipeline")
"""Strategies in which several ranks share one copy of the model."""
TENSOR_WORKLOADS = ("gpt",)
"""Shipped workloads that have a tensor plan."""
GPT_HEADS = 4
"""Default number of heads of `gpt`."""


def check_strategy(spec: Spec) -> Iterator[Violation]:
    """Yield the violations of the rules of a job's strategy."""
    yield from _one_process(spec)
    yield from _replicas(spec)
    yield from _tensor_plan(spec)
    yield from _stages(spec)


def _one_process(spec: Spec) -> Iterator[Violation]:
    """`data_parallel` is a single process with all GPUs; nothing averages gradients across
    processes.
    """
    if spec.train is None or spec.train.strategy != "data_parallel":
        return
    if spec.nodes.max > 1:
        message = (
            "must be 1 with strategy data_parallel, which is one process; ddp supports several "
            f"nodes, found {spec.nodes.max}"
        )
        yield Violation(message, "nodes.max", ("nodes.max", "train.strategy"))
    if spec.procs_per_node not in ("auto", 1):
        message = (
            "must be 1 with strategy data_parallel, which is one process, found "
            f"{spec.procs_per_node}"
        )
        yield Violation(message, "procsPerNode", ("procsPerNode", "train.strategy"))


def _replicas(spec: Spec) -> Iterator[Violation]:
    """Every world size of the job must be a whole number of model replicas, each within a node or
    on whole nodes.
    """
    train = spec.train
    if train is None or (train.strategy not in MODEL_PARALLEL and train.model_parallel is None):
        return
    ways, strategy = train.model_parallel, train.strategy
    fields_read = ("train.modelParallel", "train.strategy")
    if strategy not in MODEL_PARALLEL:
        message = (
            f"must be left out with strategy {strategy}, which has no ranks that share a copy "
            "of the model"
        )
        yield Violation(message, "train.modelParallel", fields_read)
        return
    if ways is None:
        message = f"needs modelParallel with {strategy}: how many ranks share one copy of the model"
        yield Violation(message, "train.strategy", fields_read)
        return
    per_node = (spec.resources.gpu or 1) if spec.procs_per_node == "auto" else spec.procs_per_node
    fields = ("train.modelParallel", "procsPerNode", "resources.gpu", "nodes.min", "nodes.max")
    nodes = spec.nodes
    if per_node % ways == 0:
        return  # any number of nodes fits
    if ways % per_node:
        message = (
            f"must be a multiple of modelParallel, {ways}, so that a copy of the model is "
            f"within one node, found {per_node}"
        )
        yield Violation(
            message,
            "procsPerNode" if spec.procs_per_node != "auto" else "train.modelParallel",
            fields,
        )
    elif nodes.min != nodes.max:
        message = (
            f"must be one number: a copy of the model takes {ways // per_node} nodes "
            f"(modelParallel {ways}, procsPerNode "
            f"{per_node}), and not every size in between is a multiple; procsPerNode: {ways} "
            "keeps the job elastic"
        )
        yield Violation(message, "nodes", (*fields, "nodes"))
    elif nodes.max * per_node % ways:
        share = ways // per_node
        message = (
            f"must be a multiple of {share}, the nodes that share one copy of the model, "
            f"found {nodes.max}"
        )
        yield Violation(message, "nodes", (*fields, "nodes"))


def _tensor_plan(spec: Spec) -> Iterator[Violation]:
    """A shipped workload must have a tensor plan; others are checked when the job starts."""
    train = spec.train
    if train is None or train.strategy != "tensor" or train.workload not in SHIPPED_WORKLOADS:
        return
    fields_read = ("train.strategy", "train.workload", "train.modelParallel")
    if train.workload not in TENSOR_WORKLOADS:
        message = f"must not be tensor: {train.workload} has no tensor plan; use fsdp"
        yield Violation(message, "train.strategy", fields_read)
        return
    heads = train.options.get("heads", GPT_HEADS)
    if train.model_parallel is not None and isinstance(heads, int) and heads % train.model_parallel:
        message = (
            f"must divide the {heads} heads of gpt's attention (options.heads), found "
            f"{train.model_parallel}"
        )
        yield Violation(message, "train.modelParallel", (*fields_read, "train.options"))


def _stages(spec: Spec) -> Iterator[Violation]:
    """A shipped workload's model must have a part with weights for each stage; other workloads are
    checked when the job starts.
    """
    train = spec.train
    if (
        train is None
        or train.strategy != "pipeline"
        or train.workload not in SHIPPED_WORKLOADS
        or not train.model_parallel
    ):
        return
    layers = train.options.get("layers", 2)
    parts = 4 if train.workload == "digits" else layers + 2 if isinstance(layers, int) else None
    if parts is not None and train.model_parallel > parts:
        message = (
            f"must be at most {parts}, the parts of {train.workload}'s model, found "
            f"{train.model_parallel}"
        )
        yield Violation(
            message,
            "train.modelParallel",
            ("train.modelParallel", "train.strategy", "train.options"),
        )

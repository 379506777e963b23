"""What is said of each kind of failure, and what to do, where no row of the table says more.

The command line reads it too: a record may be of an agent that had no row for its failure.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kdist_trainer.config.exit_codes import Cause


class Words(NamedTuple):
    """A sentence with the fields `{where}`, `{message}` and `{collective}`, and what to do."""

    sentence: str
    advice: str


GENERAL: Final[dict[Cause, Words]] = {
    Cause.USER_CODE: Words(
        "{where} raised {message}",
        "fix the code, then apply and restart",
    ),
    Cause.CONFIG: Words(
        "the job cannot be trained: {message}",
        "change job.yaml, then apply and restart",
    ),
    Cause.PREFLIGHT: Words(
        "the network between the ranks is slower than the job requires: {message}",
        "give it other nodes (nodeSelector, tolerations), or lower "
        "spec.preflight.allReduce.minBusBandwidth; "
        "`kdist bench all_reduce -f JOB.yaml` measures by itself",
    ),
    Cause.DATA: Words(
        "the data cannot be used: {message}",
        "fix the data or spec.data, then apply and restart",
    ),
    Cause.MISMATCH: Words(
        "the checkpoint or the data does not fit this job: {message}",
        "do what the message says, or use another checkpoint folder",
    ),
    Cause.NAN: Words(
        "the loss is not finite: {message}",
        (
            "lower the learning rate, use bf16 or fp32, check the data; train.onNonfinite: "
            "skip drops such steps"
        ),
    ),
    Cause.OOM_DEVICE: Words(
        "{where} ran out of the GPU's memory: {message}",
        "lower train.microBatch (the batch stays the same), or use bf16",
    ),
    Cause.BUDGET: Words(
        "the job failed too often without progress: {message}",
        "fix the last failure, or raise spec.maxRestarts",
    ),
    Cause.HANG: Words(
        "{where} hung{collective}: {message}",
        "see the stacks in its log; spec.hangTimeoutSeconds is the limit",
    ),
    Cause.COLLECTIVE_TIMEOUT: Words(
        "{where} waited too long for its peers{collective}: {message}",
        "find the rank that is behind; spec.collectiveTimeoutSeconds is the limit",
    ),
    Cause.COLLECTIVE_MISMATCH: Words(
        "{where} diverged from its peers: {message}",
        (
            "fix the code: all ranks must enter the same collectives, in the same order, "
            "with equal sizes"
        ),
    ),
    Cause.DEVICE: Words(
        "a GPU fails or is missing: {message}",
        "see `nvidia-smi` on that node, and keep the job off it (`kubectl cordon`)",
    ),
    Cause.STORAGE: Words(
        "the checkpoint storage failed: {message}",
        "free space, or repair the volume; committed checkpoints are safe",
    ),
    Cause.RENDEZVOUS: Words(
        "the rendezvous failed: {message}",
        "check whether pods reach each other and the API server: `kdist doctor`",
    ),
    Cause.NODE_LOST: Words(
        "{where} lost its peers: {message}",
        "find the pod that was lost first: `kdist events`",
    ),
    Cause.SIGNAL: Words(
        "{where} was killed: {message}",
        "something outside the training ended it: `kdist events`",
    ),
    Cause.NODE: Words(
        "{where} runs on a node that cannot train: {message}",
        "an administrator must look at the node; keep the job off it until then",
    ),
    Cause.LOADER: Words(
        "a process of {where}'s data loader died: {message}",
        "see its log; lower train.loader.workers, or raise spec.resources.memory",
    ),
    Cause.EARLY_EXIT: Words(
        "{where} left while the others waited for it: {message}",
        "all ranks must enter the same collectives before they leave",
    ),
    Cause.RETRY: Words(
        "{where} asked to be tried again: {message}",
        "see its log",
    ),
    Cause.NETWORK: Words(
        "a server does not answer {where}: {message}",
        "check the network between the pods and that server",
    ),
    Cause.PREEMPTED: Words(
        "{where} was asked to end: {message}",
        "start it again, or have spec.maxRestarts do so; a Checkpointer keeps a script's work",
    ),
    Cause.UNKNOWN: Words(
        "{where} failed, and it is not known by what: {message}",
        "see its log",
    ),
}
"""Of `oom_host` a rule of the command line's says it, which sees the limits of the pods."""
ENDED_BY_ITSELF: Final = "{message}"
"""The sentence of a rank that has ended with an exit code of its own, and raised nothing."""
PARTED: Final = Words(
    "the ranks no longer held the same model: {message}",
    "keep what a step changes in a state, or set train.recovery: restart",
)
"""Of ranks that start again since their weights differ."""
SLOW_START: Final = "slow-start"
"""The name of a run that has ended since it was lost again and again as it started."""
SLOW: Final = Words(
    "{message}",
    "use nodes that live longer, or make the start shorter: pull the image onto the nodes "
    "beforehand, load less data before the first step, set spec.script.preload: torch for a "
    "script, train.recovery: inPlace and nodes.standby where nodes are lost one by one; "
    "checkpoint.every only limits what a loss costs",
)
UNLOADABLE: Final = Words(
    "the state of this training could not be given back: {message}",
    "change what the message names: a checkpoint must be able to give back all that it saves",
)
"""Sentence and fix of a state that is refused when it is saved."""

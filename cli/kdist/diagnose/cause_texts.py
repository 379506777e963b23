"""A sentence and a fix for each cause of an exit record."""

from __future__ import annotations

# cause of an exit record -> (sentence, fix), templates with `{where}`, `{message}`, `{collective}`.
CAUSES: dict[str, tuple[str, str]] = {
    "user_code": (
        "{where} raised {message}",
        "fix the code, then apply and restart: it resumes from its last checkpoint, if it has one",
    ),
    "config": (
        "the job cannot be trained: {message}",
        "change job.yaml, then apply and restart",
    ),
    "preflight": (
        "the network between the ranks is slower than the job requires: {message}",
        "give it other nodes (nodeSelector, tolerations), or lower "
        "spec.preflight.allReduce.minBusBandwidth; "
        "`kdist bench all_reduce -f JOB.yaml` measures by itself",
    ),
    "data": (
        "the data cannot be used: {message}",
        "fix the data or spec.data, then apply and restart",
    ),
    "mismatch": (
        "the checkpoint or the data does not fit this job: {message}",
        "do what the message says, or use another checkpoint folder",
    ),
    "nan": (
        "the loss is not finite: {message}",
        (
            "lower the learning rate, use bf16 or fp32, check the data; train.onNonfinite: "
            "skip drops such steps"
        ),
    ),
    "oom_device": (
        "{where} ran out of the GPU's memory: {message}",
        "lower train.microBatch (the batch stays the same), or use bf16",
    ),
    "budget": (
        "the job failed too often without progress: {message}",
        "fix the last failure, or raise spec.maxRestarts",
    ),
    "hang": (
        "{where} hung{collective}: {message}",
        "see the stacks in its log; spec.hangTimeoutSeconds is the limit",
    ),
    "collective_timeout": (
        "{where} waited too long for its peers{collective}: {message}",
        "find the rank that is behind; spec.collectiveTimeoutSeconds is the limit",
    ),
    "collective_mismatch": (
        "{where} diverged from its peers: {message}",
        (
            "fix the code: all ranks must enter the same collectives, in the same order, "
            "with equal sizes"
        ),
    ),
    "device": (
        "a GPU fails or is missing: {message}",
        "see `nvidia-smi` on that node, and keep the job off it (`kubectl cordon`)",
    ),
    "storage": (
        "the checkpoint storage failed: {message}",
        "free space, or repair the volume; committed checkpoints are safe",
    ),
    "rendezvous": (
        "the rendezvous failed: {message}",
        "check whether pods reach each other and the API server: `kdist doctor`",
    ),
    "node_lost": (
        "{where} lost its peers: {message}",
        "find the pod that was lost first: `kdist events`",
    ),
    "signal": (
        "{where} was killed: {message}",
        "something outside the training ended it: `kdist events`",
    ),
    "node": (
        "{where} runs on a node that cannot train: {message}",
        "an administrator must look at the node; keep the job off it until then",
    ),
    "loader": (
        "a process of {where}'s data loader died: {message}",
        "see its log; lower train.loader.workers, or raise spec.resources.memory",
    ),
    "early_exit": (
        "{where} left while the others waited for it: {message}",
        "all ranks must enter the same collectives before they leave",
    ),
    "retry": ("{where} asked to be tried again: {message}", "see its log"),
    "network": (
        "a server does not answer {where}: {message}",
        "check the network between the pods and that server",
    ),
    "preempted": (
        "{where} was asked to end: {message}",
        "start it again, or have spec.maxRestarts do so; a Checkpointer keeps a script's work",
    ),
    "unknown": ("the agent failed: {message}", "see its log"),
}
ENDED_BY_ITSELF = "{message}"
"""The sentence of a rank that has ended with an exit code of its own, and raised nothing."""
UNLOADABLE = (
    "the state of this training could not be given back: {message}",
    "change what the message names: a checkpoint must be able to give back all that it saves",
)
"""Sentence and fix of a state that is refused when it is saved."""

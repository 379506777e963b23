"""Sentences of the documentation that repeat facts of the code: numbers, names and lists.

Each page, a path below `docs/`, has rows: a part of a sentence with `{}` for each fact, and the
places of these facts, `MODULE:NAME`. A module that begins with `.` is one of `kdist_trainer`, and a
name may go on with a field of a model, an attribute or a key. `{:time}` and the like say how the
sentence writes the fact: see `Shown` in `test_facts_in_prose`.
"""

from __future__ import annotations

from typing import Final

FACTS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "../CONTRIBUTING.md": (("{} at most. A function", "tests.house.rules:LONGEST_FILE"),),
    "../README.md": (("Python {:version} or newer", ".formats.requirements:OLDEST_PYTHON"),),
    "../charts/kdist/README.md": (
        ("Kubernetes {:version} or newer", "kdist.doctor.cluster_checks:OLDEST"),
    ),
    "explanation/recovery.md": (
        ("does not answer within {:time}", ".processes.threads:ANSWER_SECONDS"),
        ("With more than {} nodes", ".rendezvous.many_nodes:MOST_SINGLE"),
        ("`restart.deviceFaults` of them ({})", ".config.train_config:DEFAULT_RESTARTS"),
        ("has not answered for {} seconds", ".rendezvous.membership:SILENCE_SECONDS"),
        ("or {:times} as long as they ever had to", ".rendezvous.membership:_SILENCE_FACTOR"),
        ("does not leave within {:time}", ".agent.worker_group:LEAVE_SECONDS"),
        ("or after {:time}, does the node ask to join", ".agent.worker_group:READY_SECONDS"),
        ("they give it {:time} to connect", ".distributed.world:_CONNECT_TIMEOUT"),
    ),
    "explanation/security.md": (
        ("or, more than {:size}, to", "kdist.manifest:CONFIG_MAP_BYTES"),
        ("digests ({:digest}, which", ".formats.digest:WRITTEN"),
        ("torch is at least {:needed},", ".formats.requirements:OF_IMAGE.torch"),
    ),
    "how-to/bench.md": (
        (
            "exchanges {:size}: one pair at a time for up to {} ranks",
            ".distributed.measure:NBYTES",
            ".distributed.measure:MAX_SEQUENTIAL",
        ),
        ("The fastest of {:word} rounds counts", ".worker:_EFFORT.rounds"),
        ("within `timeoutSeconds` ({})", ".config.training:Preflight.timeout_seconds"),
        (
            "the same matrix product for {:time} on all of them",
            ".distributed.health_check:_SECONDS",
        ),
        ("ends with exit code {:or}, ends the job", ".distributed.health_check:_NOT_RUN"),
    ),
    "how-to/controller.md": (
        ("After the {:nth} fault of a machine", "kdist_controller.node_recovery:AVOIDANCE.faults"),
        (
            "After {:time} the node is used again",
            "kdist_controller.node_recovery:AVOIDANCE.seconds",
        ),
        ("avoids at most {:word} nodes", "kdist_controller.node_recovery:_MOST_AVOIDED"),
        ("one agent of each job every {} s", "kdist_controller.agent_poller:INTERVAL_SECONDS"),
    ),
    "how-to/data-and-checkpoints.md": (
        ("per node ({} unless given)", ".config.sources:DEFAULT_SIZE"),
        ("has come within the last {:time}", ".fetch:STALL_SECONDS"),
        (
            "the next is tried {0} seconds later, then {0:twice}",
            ".checkpoint.checkpointer:_FIRST_PAUSE",
        ),
        ("the median of the last {:word}", ".checkpoint.interval:_COSTS"),
        ("Without any so far, {:time} is assumed", ".checkpoint.interval:_EXPECTED_SECONDS"),
        ("The last {} failures in the run's ledger", ".checkpoint.interval:_LOSSES"),
        ("at least {} s, and", ".checkpoint.interval:_LEAST_SECONDS"),
        (
            "at most {:time}, or {} times the cost if that is more; never more than {:time}.",
            ".checkpoint.interval:_MOST_SECONDS",
            ".checkpoint.interval:_MOST_COSTS",
            ".checkpoint.interval:LONGEST_INTERVAL",
        ),
        (
            "It goes below {} s, down to {} s, only after",
            ".checkpoint.interval:_LEAST_SECONDS",
            ".checkpoint.interval:_LEAST_AFTER_LOSS",
        ),
        ("The first save comes after {} s", ".checkpoint.interval:_LEAST_SECONDS"),
        (
            "by {:share} or more, at most every {:time}, and",
            ".checkpoint.interval:_CHANGE",
            ".checkpoint.interval:_REPORT_SECONDS",
        ),
        ("older ones that are at least {:time} apart", ".config.training:SECONDS_APART"),
        ("holds the whole model, of up to {:size},", ".training.training_state:MOST_BYTES"),
        ("for models of more than {:size}, the run", ".training.training_state:MOST_BYTES"),
        ("a request is tried again for up to {:time}", ".object_store.store:RETRY_SECONDS"),
        ("The last {:time} of a node's kept log", ".object_store.files:FLUSH_SECONDS"),
        ("written to the bucket again every {:time}", ".object_store.files:FLUSH_SECONDS"),
        (
            "wait for room, {:minutes_word} to {:time} before each new try",
            ".agent.agent:FULL_SECONDS",
            ".agent.agent:_MAX_FULL_SECONDS",
        ),
        ("after {0} seconds, {0:twice} and so on, or", ".checkpoint.checkpointer:_FIRST_PAUSE"),
        ("After {:time}, which is as long as anything", ".checkpoint.checkpointer:LONGEST_SECONDS"),
        ("waits for it no longer than {:time}, and", ".processes.threads:ANSWER_SECONDS"),
    ),
    "how-to/dead-node.md": (
        ("stay away for {:time}, or", "kdist.recovery.avoidance:AVOID_SECONDS"),
        (
            "to the dead node for up to {:minutes} after",
            "kdist.recovery.decision:FORCE_DETACH_SECONDS",
        ),
        ("A script on gloo takes {:time}", ".agent.hangs:SCRIPT_SILENT_SECONDS"),
        ("the time of {:word} more Lease", "kdist.recovery.decision:MORE_LEASES"),
    ),
    "how-to/debugging-a-hang.md": (
        (
            "after the time of {:word} typical steps, but not before {:time}",
            "kdist.diagnose.runtime:_STEPS",
            "kdist.diagnose.runtime:_SHORT",
        ),
        (
            "was seen of it for {} seconds, and then once {:time}",
            ".agent.hangs:LOOK_SECONDS",
            ".agent.hangs:MAX_LOOK_SECONDS",
        ),
        ("a collective of the last {:past} `kdist why`", "kdist.diagnose.runtime:_RECENT"),
    ),
    "how-to/drill.md": (
        (
            "and {:share} as long again, but at least {} s",
            "kdist.drill.faults:_SILENCE_RATIO",
            "kdist.drill.faults:_LEAST_SILENCE",
        ),
        (
            "fewer than {:word} restarts of `maxRestarts` are left",
            "kdist.drill.faults:_LEAST_RESTARTS",
        ),
    ),
    "how-to/gpu.md": (
        (
            "are {} cores and {}Gi for each of the `gpu`",
            "kdist.spec.models:_CORES_OF_GPU",
            "kdist.spec.models:_GIB_OF_GPU",
        ),
        (
            "the default of {} core and {},",
            "kdist.spec.models:Resources.cpu",
            "kdist.spec.models:Resources.memory",
        ),
        ("so it is {} by default; how much", ".config.train_config:TrainConfig.memory_snapshot"),
    ),
    "how-to/install.md": (
        ("You need Python {:version} or newer", ".formats.requirements:OLDEST_PYTHON"),
    ),
    "how-to/kubernetes.md": (
        (
            "More than {:size}, up to {:size}, goes to where the checkpoints are",
            "kdist.manifest:CONFIG_MAP_BYTES",
            "kdist.manifest:CODE_BYTES",
        ),
        ("the files of `spec.code`, at most {:size},", "kdist.manifest:CONFIG_MAP_BYTES"),
        (
            "the image needs Python {:version}, torch {:needed}, numpy {:needed} (or",
            ".formats.requirements:OLDEST_PYTHON",
            ".formats.requirements:OF_IMAGE.torch",
            ".formats.requirements:OF_IMAGE.numpy",
        ),
        ("for all packages on a node, {} unless given", "kdist.spec.models:PACKAGES_SIZE"),
        ("is removed by a later one, after {:time}.", "kdist.deploy.receive_code:_KEPT_SECONDS"),
        ("a later installation, after {:time} at most", ".install.__main__:_ABANDONED_SECONDS"),
        ("one of the {:len} kinds", "kdist.backends:NAMES"),
        ("Job | Kubernetes {:version} |", "kdist.doctor.cluster_checks:OLDEST"),
        (
            "is reported once and retried for {:time} (`--timeout`), an unreachable admission "
            "webhook for {:time}",
            "kdist.cluster.transport:RETRY_SECONDS",
            "kdist.cluster.transport:WEBHOOK_SECONDS",
        ),
        ("a job of more than {} nodes", ".rendezvous.many_nodes:MOST_SINGLE"),
    ),
    "how-to/migrating.md": (
        ("up to {} restarts without progress", ".config.train_config:DEFAULT_RESTARTS"),
    ),
    "how-to/running-jobs.md": (
        (
            "after the time of {:word} typical steps, at least {} s",
            "kdist.diagnose.runtime:_STEPS",
            "kdist.diagnose.runtime:_SHORT",
        ),
        (
            "next to the checkpoints, {:quantity} unless `spec.logs.keep`",
            ".config.train_config:Logs.keep",
        ),
        ("nor a collective was seen in the last {:past} |", "kdist.diagnose.runtime:_RECENT"),
        ("has failed at least {:times} in this run", "kdist.diagnose.failures:_LEAST_FAULTS"),
        ("if {:size} of its memory are free", ".tensorboard.__main__:NEEDED_BYTES"),
        ("`kdist resume` in the last {:time}", "kdist.status.job_status:_START_SECONDS"),
        ("at least {:word} worker groups in a row", ".agent.restart_policy:LOSSES"),
    ),
    "how-to/scripts.md": (
        ("the first call more than {:time} later", ".formats:SAME_REQUEST_SECONDS"),
        (
            "less {:share} of it (at most {} s) that the agent needs",
            ".processes.signals:_EXIT_SHARE",
            ".processes.signals:_MOST_EXIT",
        ),
        (
            "The first {:digits} characters of a line count",
            ".script.printed_progress:_LONGEST_LINE",
        ),
        (
            "needs more than {:time} of CPU time for a line",
            ".script.printed_progress:_MATCH_SECONDS",
        ),
        (
            "too much code to look at ({} files, {:size})",
            ".agent.script_source:_MOST_FILES",
            ".agent.script_source:_MOST_BYTES",
        ),
        ("may use less than {:size} of memory", ".agent.script_source:_LEAST_MEMORY"),
        ("prints at most one line every {:time}", ".agent.logs:LOG_SECONDS"),
        ("at {:quantity} `log` becomes `log.1`", ".agent.logs:DEFAULT_LIMIT"),
        ("buffers up to {:size} for a slow reader", ".agent.logs:LIMIT"),
        (
            "without progress ({} if the job names no number)",
            ".config.train_config:DEFAULT_RESTARTS",
        ),
        ("when it occurs for the {:nth} time", ".causes.row:MAX_REPEATS"),
        ("without progress end the job, {} by default", ".config.train_config:DEFAULT_RESTARTS"),
    ),
    "how-to/trackers.md": (
        ("what is missing is sent {:time} later", ".agent.tracker_process:_RETRY_SECONDS"),
        ("what is missing is sent {:time} later", ".tracker.__main__:_RETRY_SECONDS"),
        ("waits up to {} s for the rest", ".agent.tracker_process:_END_SECONDS"),
        (
            "`pip install '{}'` or `'{}'`",
            ".agent.tracker_process:PACKAGES.wandb",
            ".agent.tracker_process:PACKAGES.mlflow",
        ),
    ),
    "how-to/training.md": (
        ("After {:word} rollbacks to one checkpoint", ".training.gradient_guard:MAX_ROLLBACKS"),
        ("the mean of about the last {:memory} steps", ".training.gradient_guard:_DECAY"),
        ("at most {:rate} points a second", ".tensorboard.writer:MIN_INTERVAL_SECONDS"),
        (
            "{0} to {0:double} seconds after the last compilation",
            ".agent.compile_cache:_QUIET_SECONDS",
        ),
        ("keep it in the folder `{}UID`", ".agent.compile_cache:_PREFIX"),
        ("little more than {:size} at most", ".agent.compile_cache:_ENOUGH_BYTES"),
        ("`size`, {} unless given", ".config.sources:DEFAULT_SIZE"),
        ("until nothing has come for {:time}", ".fetch:STALL_SECONDS"),
        ("whole tensors in buckets of {:size}", ".distributed.checkpoint_group:BUCKET_BYTES"),
        ("For sets of less than {} samples", ".data.sampler:LARGE"),
        ("{} rounds of splitmix64's finisher", ".data.sampler:FeistelOrder.rounds"),
        ("the newest {:word}) and copied", ".profiling.requests:_KEPT"),
        ("are also compared every {:time}", ".agent.hangs:COMPARE_SECONDS"),
    ),
    "how-to/upgrading.md": (
        ("keep the {} s of their version", "kdist_controller.resource:_FORMER_INTERVAL.seconds"),
        (
            "needs torch {:needed} or newer, the command line Python {:version} or newer, "
            "and the chart Kubernetes {:version} or newer",
            ".formats.requirements:OF_IMAGE.torch",
            ".formats.requirements:OLDEST_PYTHON",
            "kdist.doctor.cluster_checks:OLDEST",
        ),
    ),
    "how-to/workflows.md": (
        ("tells Trainer every {:time}", ".agent.trainjob_status:_SECONDS"),
        (
            "`ttlSecondsAfterFinished` ({:time}, unless set)",
            "kdist.spec.training_job:Spec.ttl_seconds_after_finished",
        ),
    ),
    "reference/commands.md": (
        ("it takes {:word} more Lease", "kdist.recovery.decision:MORE_LEASES"),
        ("at most {:size} of each stream", "kdist.commands.exec:_MOST_BYTES"),
        ("the job gets to train again ({:short})", "kdist.drill.drill:TIMEOUT"),
    ),
    "reference/job-yaml.md": (
        ("By default matrix products for {} s", ".distributed.health_check:_SECONDS"),
        ("older ones that are at least {:time} apart", ".config.training:SECONDS_APART"),
        (
            "and is between {} s ({} s after the first of them) and {:time}.",
            ".checkpoint.interval:_LEAST_SECONDS",
            ".checkpoint.interval:_LEAST_AFTER_LOSS",
            ".checkpoint.interval:LONGEST_INTERVAL",
        ),
        ("up to {:size} in a ConfigMap", "kdist.manifest:CONFIG_MAP_BYTES"),
        ("The file is YAML 1.2, of at most {:size}", "kdist.job_file.yaml_parser:MAX_BYTES"),
        (
            "up to {} values and {} levels",
            "kdist.job_file.yaml_parser:MAX_NODES",
            "kdist.job_file.yaml_parser:MAX_DEPTH",
        ),
        ("At most {} URLs can be fetched", "kdist.spec.sources:MOST_SOURCES"),
    ),
    "reference/runbooks.md": (
        ("in the end every {:time}", "kdist_controller.work_queue:LONGEST_PAUSE"),
        ("codes below {} are permanent", ".formats:FIRST_RETRYABLE_CODE"),
        ("has a line `connections-refused` {:time}, with", ".network.server:_WARNING_SECONDS"),
        ("has a line `connections-refused` {:time} with", ".network.server:_WARNING_SECONDS"),
        ("a missing right to the Lease `{}`", "kdist_controller.__main__:LEASE"),
        (
            "has seen {:word} faults of that machine",
            "kdist_controller.node_recovery:AVOIDANCE.faults",
        ),
        (
            "From the {:nth} fault of a machine on, `kdist why` says so",
            "kdist.diagnose.failures:_LEAST_FAULTS",
        ),
        ("keeps its pods away for {:time}", "kdist_controller.node_recovery:AVOIDANCE.seconds"),
        ("avoids at most {:word} nodes", "kdist_controller.node_recovery:_MOST_AVOIDED"),
        (
            "{:word} of them without progress end the job (`restart.deviceFaults`",
            ".config.train_config:DEFAULT_RESTARTS",
        ),
    ),
    "reference/script-api.md": (
        ("checkpoints that are at least {:time} apart", ".config.training:SECONDS_APART"),
        ("at a call more than {:time} later", ".formats:SAME_REQUEST_SECONDS"),
    ),
    "reference/workloads.md": (
        (
            "must reduce its loss; {} and {} unless given",
            ".testing:check_workload.__kwdefaults__.samples",
            ".testing:check_workload.__kwdefaults__.steps",
        ),
    ),
}

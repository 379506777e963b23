"""The configuration of a run: the document `train.json`, the exit codes and failure causes.

`kdist` renders a job's `train` or `script` section and the agent's settings into one `train.json`;
every agent and every rank reads the same file. `train_config` has its models, `training` those of
`spec.train`, `base` what all models share, `sources` the URLs of data and weights and the variables
by which a process reaches a store, `edit_rules` what may be edited between two runs, `exit_codes`
the codes and causes that agents, ranks and the command line agree on.

Nothing here imports torch or another package of the trainer, because `kdist.spec` uses these
models. The arguments of one agent (folders, addresses) are in `kdist_trainer.agent.settings`. Read
`train_config` first.
"""

from __future__ import annotations

from kdist_trainer.config.base import (
    QUANTITY,
    ConfigModel,
    NodeCount,
    Nodes,
    PositiveSeconds,
    Seconds,
    count_bytes,
)
from kdist_trainer.config.exit_codes import Cause, Exit
from kdist_trainer.config.sources import (
    CHECKPOINTS_ENDPOINT,
    CHECKPOINTS_REGION,
    CREDENTIAL_VARIABLES,
    NOT_FETCHED,
    SECRET_VARIABLES,
    Init,
)
from kdist_trainer.config.train_config import (
    COMPILE_CACHE,
    DEFAULT_RESTARTS,
    NODES,
    QUANTITY_OR_NONE,
    START_VARIABLES,
    Logs,
    Restart,
    Script,
    TrainConfig,
)
from kdist_trainer.config.training import (
    DEFAULT_KEEP,
    AllReduceCheck,
    Best,
    Checkpointing,
    EarlyStop,
    Every,
    Keep,
    LoaderConfig,
    Optimizer,
    Preflight,
    Schedule,
    Training,
)
from kdist_trainer.formats import METRICS_PORT

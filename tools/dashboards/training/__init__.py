"""The dashboard of one training: whether it learns, how fast, what it waits for, which rank is
slow, and what a restart cost.

`learning` has the rows on the model and its steps, `operations` those on checkpoints, restarts,
pods and devices. A row is data; `model` defines what it consists of, and
`grafana` converts it.
"""

from tools.dashboards.model import Annotation, Dashboard, Variable
from tools.dashboards.training.learning import (
    BREAKDOWN,
    COMMUNICATION,
    LEARNING,
    OVERVIEW,
    STRAGGLERS,
)
from tools.dashboards.training.operations import (
    CHECKPOINTS,
    DEVICES,
    EXPORTER,
    GOODPUT,
    RELIABILITY,
    RESOURCES,
)

TRAINING = Dashboard(
    uid="kdist-training-job",
    title="kdist / Training job",
    description=(
        "One distributed training: learning, step breakdown, all-reduce, stragglers, goodput, "
        "checkpoints, restarts."
    ),
    rows=(
        OVERVIEW,
        LEARNING,
        BREAKDOWN,
        COMMUNICATION,
        STRAGGLERS,
        GOODPUT,
        CHECKPOINTS,
        RELIABILITY,
        DEVICES,
        RESOURCES,
        EXPORTER,
    ),
    variables=(
        Variable("namespace", "Namespace", "kdist_job_info", all_value=".*"),
        Variable("kdist_job", "Training", "kdist_job_info", multi=False),
        Variable("job", "Job", "kdist_job_info"),
        Variable("instance", "Instance", "kdist_job_info"),
    ),
    annotations=(
        Annotation("New group", "max(changes(kdist_generation{}[$__rate_interval]))", "bad"),
        Annotation(
            "Checkpoint",
            "max(changes(kdist_checkpoint_last_success_step{}[$__rate_interval]))",
            "neutral",
        ),
    ),
)

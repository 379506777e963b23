"""The model of job.yaml, `TrainingJob`. The JSON Schema, `kdist explain`, `kdist init` and the
documentation are generated from it.

Read `training_job` first (metadata and spec), then `models` (text types and small sections) and
`validators` (rules across fields). `sources` lists what a job fetches by URL, `reference` describes
fields, and formats and suggests paths to them, and `scaffold` writes new job files. Reading YAML
does not belong here but in `kdist.job_file`.

What others need of the trainer's configuration, such as `TrainConfig` and `Exit`, they import from
here.
"""

from __future__ import annotations

from kdist.spec.models import (
    ACCESS_MODE,
    PACKAGES_SIZE,
    Checkpoints,
    CodeFile,
    CodeSource,
    Data,
    EnvVar,
    Install,
    Resources,
    port_of,
)
from kdist.spec.sources import CODE_MOUNT, INIT_MOUNT, FetchSource, list_sources
from kdist.spec.training_job import (
    API_VERSION,
    KIND,
    Metadata,
    Spec,
    TrainingJob,
    job_document,
)
from kdist.spec.validators import list_warnings
from kdist_trainer.config import (
    CHECKPOINTS_ENDPOINT,
    CHECKPOINTS_REGION,
    CREDENTIAL_VARIABLES,
    Exit,
    Nodes,
    Script,
    TrainConfig,
    Training,
    count_bytes,
)
from kdist_trainer.formats import RUN

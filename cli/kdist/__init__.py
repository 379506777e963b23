"""The command line: it turns a job.yaml into local processes or into Kubernetes objects.

`commands` only parse and print; `app` has their table. `job_file` and `spec` read a job file,
`render` and `backends` turn it into objects, `deploy` applies them, and `job` is what can be done
with a job afterwards, in a cluster (`job.cluster`) or on this machine (`job.local`).

What runs inside the pods is the other distribution, `kdist_trainer`; it is started as a process,
and only its `config` is imported, by `spec`.

The names below are for programs and notebooks: `import kdist`, then `kdist.load("job.yaml").run()`.
Each is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdist.api.code import from_code as from_code
    from kdist.api.code import train as train
    from kdist.api.definition import JobDefinition as JobDefinition
    from kdist.api.definition import load as load
    from kdist.api.handle import Checkpoint as Checkpoint
    from kdist.api.handle import JobHandle as JobHandle
    from kdist.api.handle import get as get
    from kdist.api.handle import list_jobs as list_jobs
    from kdist.diagnose import Diagnosis as Diagnosis
    from kdist.errors import Code as Code
    from kdist.errors import InvalidJobError as InvalidJobError
    from kdist.errors import KdistError as KdistError
    from kdist.errors import KdistWarning as KdistWarning
    from kdist.errors import NotFoundError as NotFoundError
    from kdist.errors import UsageError as UsageError
    from kdist.spec import Checkpoints as Checkpoints
    from kdist.spec import Data as Data
    from kdist.spec import EnvVar as EnvVar
    from kdist.spec import Metadata as Metadata
    from kdist.spec import Nodes as Nodes
    from kdist.spec import Resources as Resources
    from kdist.spec import Script as Script
    from kdist.spec import Spec as Spec
    from kdist.spec import Training as Training
    from kdist.spec import TrainingJob as TrainingJob
    from kdist.status import JobStatus as JobStatus
    from kdist.status import Phase as Phase

__version__ = "0.2.0.dev0"

_MODULES = {
    "api.code": "from_code train",
    "api.definition": "JobDefinition load",
    "api.handle": "Checkpoint JobHandle get list_jobs",
    "diagnose": "Diagnosis",
    "errors": "Code InvalidJobError KdistError KdistWarning NotFoundError UsageError",
    "spec": "Checkpoints Data EnvVar Metadata Nodes Resources Script Spec Training TrainingJob",
    "status": "JobStatus Phase",
}


if not TYPE_CHECKING:  # to a type checker, the names above are all

    def __getattr__(name: str) -> object:
        """Import what a program asks for."""
        from importlib import import_module

        for module, names in _MODULES.items():
            if name in names.split():
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for names in _MODULES.values() for name in names.split())})

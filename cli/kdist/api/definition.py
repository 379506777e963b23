"""A job that has not been started: from a file, from typed fields, or from code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from kdist import deploy
from kdist.api import DIALOG, Where
from kdist.api.handle import JobHandle
from kdist.errors import Code, KdistError, Problem
from kdist.job.find import Place, in_cluster
from kdist.job.local import launch_detached, run_dir
from kdist.job.local.job import LocalJob
from kdist.job_file import load_file, load_text, resolve_path
from kdist.spec import TrainingJob, list_warnings
from kdist.threads import OnError, start_thread
from kdist_trainer.formats.json_text import encode_json

if TYPE_CHECKING:
    from kdist.job_file.code import Use


@dataclass(frozen=True)
class JobDefinition:
    """A job that has not been started. It never changes: `set` returns another one.

    Attributes:
        job: its fields.
        file: the job file that it was read from; None if it was made in Python, and its paths start
            from the working directory.
        overrides: what `set` has changed in the file.
    """

    job: TrainingJob
    file: Path | None = None
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.job.metadata.name

    def set(self, *overrides: str) -> JobDefinition:
        """The job with other values, as `--set` takes them: `job.set("spec.nodes=2")`.

        Raises:
            InvalidJobError: with every problem of the job.
        """
        source = self.file or self.job
        return load(source, *self.overrides, *overrides)

    def validate(self) -> list[str]:
        """Check also the code and the data that the job names, and return warnings.

        Raises:
            InvalidJobError: with every problem of the job.
        """
        found = list_warnings(self.job.spec)
        self._read("either", warn=found.append)
        return found

    def render(self) -> list[dict[str, Any]]:
        """The Kubernetes objects of the job, as `kdist render` shows them."""
        plan = deploy.make_plan(None, self.job, base=self._base)
        return [each.document for each in plan.manifests]

    def run(self, *, fresh: bool = False) -> JobHandle:
        """Start the job on this machine, as `kdist run --detach` does, and return once its agents
        have started. A run that was stopped or has failed continues; one that is done stays as it
        is.

        Args:
            fresh: archive the run of this name, and start from scratch.

        Raises:
            KdistError: the job cannot be started.
        """
        self._read("here", warn=DIALOG.warn)
        words = ["run", *(["--fresh"] if fresh else [])]
        for each in self.overrides if self.file else ():
            words += ["--set", each]
        root = run_dir.home() / self.name
        launched = launch_detached([*words, str(self.file or self._write())], Path.cwd())
        if launched.pid is not None:  # and must be no zombie of this process when it ends
            reap = partial(_reap, launched.pid)
            start_thread(reap, name="reap-run", on_error=OnError.REPORT)
        elif launched.error is not None:
            raise launched.error
        elif launched.code != Code.OK:
            raise KdistError(
                f"{self.name} has ended before all of its agents had started",
                hint=launched.output.strip().rpartition("\n")[2],
                next_command=f"kdist why {self.name}",
                code=Code.JOB_FAILED,
            )
        return JobHandle(LocalJob(root, DIALOG))

    def apply(
        self,
        *,
        direct: bool = False,
        force_conflicts: bool = False,
        timeout: float | None = None,
        **where: Unpack[Where],
    ) -> JobHandle:
        """Apply the job to a cluster, as `kdist apply` does, and return once that is done.

        Args:
            direct: apply the job's objects themselves, not a TrainingJob for kdist's controller.
            force_conflicts: take over fields that another field manager has set.
            timeout: seconds for which an API server that does not answer is tried again.
            **where: `namespace`, `context` and `kubeconfig`, as the command's options.

        Raises:
            KdistError: the job cannot be applied, or the controller refuses it.
        """
        said: list[str] = []
        dialog = replace(DIALOG, warn=said.append)
        try:
            job = self._read("cluster", warn=dialog.warn)
            place = Place(**where)
            cluster = place.connect(job=job.metadata.namespace, timeout=timeout, dialog=dialog)
            applied = in_cluster(cluster, self.name, dialog=dialog)
            plan = deploy.plan_job(cluster, job, base=self._base, direct=direct)
            how: Any = {"notify": dialog.notify, "warn": dialog.warn, "force": force_conflicts}
            sent = list(deploy.send_plan(cluster, plan, base=self._base, **how))
            for each in deploy.prune_plan(cluster, plan):
                dialog.notify(f"{each.title} pruned")
            if isinstance(plan, deploy.ResourcePlan):
                applied.await_answer(plan, sent[-1].applied.document, since=time.monotonic())
        finally:
            for text in said:  # now that nothing is left undone if a filter makes errors of them
                DIALOG.warn(text)
        return JobHandle(in_cluster(cluster, self.name, dialog=DIALOG))

    @property
    def _base(self) -> Path:
        return Path.cwd() if self.file is None else self.file.parent

    def _read(self, use: Use, *, warn: Callable[[str], None] = lambda _: None) -> TrainingJob:
        """The job once more, with its code and data checked."""
        looks: list[Problem] = []
        if self.file is None:
            job = _parse(_to_document(self.job), use=use, warnings=looks)
        else:
            job = load_file(self.file, overrides=self.overrides, use=use, warnings=looks)
        for each in looks:
            warn(each.advice)
        return job

    def _write(self) -> Path:
        """The job as a file among the run folders, by which it can be resumed."""
        document = _to_document(self.job)
        spec = document["spec"]
        named = [spec.get("checkpoints") or {}, *spec.get("data", ())]
        named += [spec.get("script") or {}] if "code" not in spec else []
        for each in (each for each in named if each.get("path")):
            each["path"] = str(resolve_path(Path.cwd(), each["path"]))
        if isinstance(spec.get("code"), str):
            spec["code"] = str(resolve_path(Path.cwd(), spec["code"]))
        return run_dir.write_generated(f"{self.name}.json", encode_json(document))


def load(
    source: str | os.PathLike[str] | TrainingJob | Mapping[str, Any], *overrides: str
) -> JobDefinition:
    """Read a job.

    Args:
        source: the job file; or the job as typed fields, or as the content of a file.
        *overrides: other values, as `--set` takes them: `kdist.load("job.yaml", "spec.nodes=2")`.

    Raises:
        UsageError: there is no such file, or it has several jobs.
        InvalidJobError: with every problem of the job.
    """
    if isinstance(source, str | os.PathLike):
        file = Path(source).absolute()
        return JobDefinition(load_file(file, overrides=overrides), file, overrides)
    document = _to_document(source) if isinstance(source, TrainingJob) else source
    return JobDefinition(_parse(document, overrides))


def _to_document(job: TrainingJob) -> dict[str, Any]:
    return job.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _parse(document: Mapping[str, Any], overrides: tuple[str, ...] = (), **how: Any) -> TrainingJob:
    text = encode_json(dict(document))
    return load_text(text, source="the job", overrides=overrides, generated=True, **how)


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):  # this process ignores SIGCHLD
        os.waitpid(pid, 0)

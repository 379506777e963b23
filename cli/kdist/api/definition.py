"""A job that has not been started: from a file, from typed fields, or from code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist import deploy
from kdist.api import DIALOG, Timeout, read_timeout
from kdist.api.handle import JobHandle
from kdist.api.words import in_python
from kdist.errors import Code, KdistError, Problem, UsageError
from kdist.job.find import Place, in_cluster
from kdist.job.job import Change
from kdist.job.local import launch_detached, run_dir
from kdist.job.local.job import LocalJob
from kdist.job_file import load_file, load_text, resolve_path
from kdist.spec import TrainingJob, list_warnings
from kdist.threads import OnError, start_thread
from kdist_trainer.formats.json_text import encode_json

if TYPE_CHECKING:
    from kdist.job_file.code import Use


@in_python
@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        spec = self.job.spec
        train = spec.train and f"workload {spec.train.workload}"
        what = train or f"script {spec.script and (spec.script.path or spec.script.module)}"
        return f"<JobDefinition {self.name}: {what}, nodes {spec.nodes.max}, image {spec.image}>"

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
        is, except that a script without a `Checkpointer` runs once more.

        Args:
            fresh: archive the run of this name, or the checkpoints that it has left after `delete`
                in its folder, and start from scratch.

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
        return JobHandle(LocalJob(root, DIALOG).pin())

    def apply(
        self,
        *,
        fresh: bool | None = None,
        direct: bool = False,
        force_conflicts: bool = False,
        timeout: Timeout = None,
        namespace: str | None = None,
        context: str | None = None,
        kubeconfig: str | None = None,
    ) -> JobHandle:
        """Apply the job to a cluster, as `kdist apply` does, and return once that is done. Applying
        again what has not changed changes nothing.

        Args:
            fresh: have a job that exists start again with what is applied now: True from scratch,
                with its checkpoints archived, False from its last checkpoint. Without it a job
                that runs goes on as it is until a restart, and one that has finished is refused if
                it was not of what is applied now.
            direct: apply the job's objects themselves, not a TrainingJob for kdist's controller.
            force_conflicts: take over fields that another field manager has set.
            timeout: how long an API server that does not answer is tried again: seconds, or `5m`.
            namespace: None for the job's, or else that of the kubeconfig's context.
            context: of the kubeconfig; None for the current one.
            kubeconfig: the file; None for `$KUBECONFIG` or `~/.kube/config`.

        Raises:
            KdistError: the job cannot be applied, or has finished with other code or settings, or
                the controller refuses it.
        """
        said: list[str] = []
        dialog = replace(DIALOG, warn=said.append)
        try:
            job = self._read("cluster", warn=dialog.warn)
            place, limit = Place(namespace, context, kubeconfig), read_timeout(timeout)
            cluster = place.connect(job=job.metadata.namespace, timeout=limit, dialog=dialog)
            applied = in_cluster(cluster, self.name, dialog=dialog)
            plan = deploy.plan_job(cluster, job, base=self._base, direct=direct)
            end = None if fresh else applied.find_old_end(plan)
            # checkpoints of a script that is done say so: its ranks would not start
            continues = end == "failed" or job.spec.script is None or job.spec.checkpoints is None
            if end and not (continues and fresh is False):
                more = ", apply(fresh=False) from the last checkpoint" * continues
                raise KdistError(
                    f"{self.name} in namespace {cluster.namespace} has already {end}, with other "
                    "code or settings than this job: it is not changed, and its end is not this "
                    "job's",
                    hint=f"apply(fresh=True) starts this job from scratch{more}; "
                    f'kdist.get("{self.name}", namespace="{cluster.namespace}").delete() deletes '
                    "the one that has finished",
                )
            if fresh is not None and isinstance(plan, deploy.Plan):
                plan = replace(plan, restarts=True)
            how: Any = {"notify": dialog.notify, "warn": dialog.warn, "force": force_conflicts}
            sent = list(deploy.send_plan(cluster, plan, base=self._base, **how))
            for each in deploy.prune_plan(cluster, plan):
                dialog.notify(f"{each.title} pruned")
            live = plan.before if isinstance(plan, deploy.ResourcePlan) else plan.workload
            again = fresh is not None and live is not None
            if isinstance(plan, deploy.ResourcePlan) and not again:
                applied.await_answer(plan, sent[-1].applied.document, since=time.monotonic())
            # a new workload continues from the checkpoints that the one before it has left
            if again or (fresh and job.spec.checkpoints is not None):
                applied.applied.changes.restart(Change(), fresh=bool(fresh))
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


@in_python
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
    for each in overrides:
        if not isinstance(each, str):
            raise UsageError(f"{each!r:.80} is no text", hint='write each value as "spec.nodes=2"')
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

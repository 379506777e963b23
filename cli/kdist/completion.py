"""What a shell may offer for a word of the command line: names of jobs, fields of job.yaml and
their values, namespaces and contexts.

Nothing here fails or waits for long: whatever cannot be read in time is not offered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kdist.threads import OnError, start_thread

if TYPE_CHECKING:
    from kdist.job.find import Place
    from kdist.spec.reference import Field

SECONDS = 2.0  # for all that a cluster is asked for one word


def job_names(place: Place, *, local: bool = False) -> list[str]:
    """Names of the runs on this machine and of the jobs of a namespace, sorted. `local` leaves out
    the jobs; without it a cluster that options choose leaves out the runs.
    """
    runs = [] if place.is_chosen and not local else _silently(_list_runs)
    jobs = [] if local else _in_time(lambda: _list_jobs(place))
    return sorted({*runs, *jobs})


def namespaces(place: Place) -> list[str]:
    """Names of the cluster's namespaces, sorted."""
    return _in_time(lambda: sorted(_names(place.connect(patience=SECONDS).list("v1", "Namespace"))))


def contexts(place: Place) -> list[str]:
    """Names of the kubeconfig's contexts, sorted."""
    from kdist.cluster import kubeconfig

    return _silently(lambda: sorted(kubeconfig.list_contexts(place.kubeconfig)))


def backends() -> list[str]:
    """The workload kinds, as `--backend` takes them."""
    from kdist.spec import reference

    field = reference.look_up("spec.backend")
    return [] if field is None else field.choices


def fields(word: str) -> list[str]:
    """Paths of the fields that begin with `word`, for `kdist explain`: those of one section, with
    a final dot where there are more below.
    """
    return [path + ("." if child.below else "") for path, child in _below(word).items()]


def settings(word: str) -> list[str]:
    """What `--set PATH=VALUE` may continue with: a field, or after the `=` one of its values."""
    path, equals, _ = word.partition("=")
    if equals:
        from kdist.spec import reference

        field = reference.look_up(path)
        if field is None:
            return []
        booleans = ["true", "false"] if field.type_text == "true or false" else []
        values = [f"{path}={value}" for value in field.choices or booleans]
        return [value for value in values if value.startswith(word)]
    return [path + ("." if child.children else "=") for path, child in _below(word).items()]


def _below(word: str) -> dict[str, Field]:
    """The fields that begin with `word`, by their paths: those of one section."""
    from kdist.spec import reference

    section, dot, _ = word.rpartition(".")
    field = reference.look_up(section)
    found = {} if field is None else field.below
    paths = {f"{section}{dot}{name}": child for name, child in found.items()}
    return {path: child for path, child in paths.items() if path.startswith(word)}


def _list_runs() -> list[str]:
    from kdist.job.local.job import list_jobs

    return [job.name for job in list_jobs()]


def _list_jobs(place: Place) -> list[str]:
    from kdist.cluster import kubeconfig
    from kdist.manifest import JOB_LABEL, TRAINING_JOB

    if not kubeconfig.exists(place.kubeconfig):
        return []
    connection = place.connect(patience=SECONDS)
    listed = connection.list("v1", "ConfigMap", selector=JOB_LABEL, metadata_only=True)
    names = [str(each["metadata"]["labels"][JOB_LABEL]) for each in listed]
    return [*names, *_names(connection.list_readable(*TRAINING_JOB))]


def _names(documents: Iterable[Any]) -> list[str]:
    return [str(each["metadata"]["name"]) for each in documents]


def _silently(read: Callable[[], list[str]]) -> list[str]:
    with contextlib.suppress(Exception):
        return read()
    return []


def _in_time(read: Callable[[], list[str]]) -> list[str]:
    """What `read` returns within `SECONDS`; empty if it takes longer, or fails.

    A thread, because a resolver and a credential plugin have timeouts of their own.
    """
    found: list[str] = []
    thread = start_thread(
        lambda: found.extend(_silently(read)), name="completion", on_error=OnError.REPORT
    )
    thread.join(SECONDS)
    return list(found)

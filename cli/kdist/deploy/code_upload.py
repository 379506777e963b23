"""Sends the files of a code folder to the bucket or the claim that `code` has chosen, unless they
are there.

To a bucket a process of its own sends them, because the command line never imports the trainer; its
credentials are those of this machine. A claim is mounted by a helper pod, in which the program
`receive_code` takes them. That a claim has them is noted on the job's object, so that the next
apply needs no pod to find that out.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from kdist import backends, rbac, units
from kdist.deploy.delete import is_active, undo
from kdist.deploy.helper_pod import (
    CONTAINER,
    POD_RIGHTS,
    build_helper_pod,
    start_helper_pod,
    wait_until_running,
)
from kdist.deploy.plan import ApplyResult, Plan, objects_of
from kdist.errors import KdistError
from kdist.job_file.folder import CodeFolder
from kdist.manifest import CLAIM, CODE_SENT
from kdist.spec import CodeSource, TrainingJob
from kdist.spec.validators import CHECKPOINTS_MOUNT
from kdist.status.documents import annotation, items, text, texts, uid
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_object

if TYPE_CHECKING:
    from kdist.cluster import Cluster

_SECONDS: Final = 3600  # for all files, on a slow connection
_CHUNK: Final = 1 << 16
_OTHER_WAYS: Final = (
    "without a pod: code in the image, in a bucket (checkpoints.url), or on a claim that has it "
    "already (`code: {claim: NAME, subPath: FOLDER}`)"
)


def upload_code(
    cluster: Cluster,
    plan: Plan,
    folder: CodeFolder | None,
    before: Mapping[str, Any] | None,
    notify: Callable[[str], None],
) -> list[ApplyResult]:
    """Send the files of a code folder, unless they are there or belong in a ConfigMap; returns what
    was created for it. `before` is the job's ConfigMap or TrainingJob as it was last applied.
    Raises `KdistError`; the cluster is as it was then.
    """
    code = plan.job.spec.code
    if folder is None or not folder.place or code is None:
        return []
    if code.claim is None:
        _send_to_bucket(code, folder)
        return []
    note = describe_sent(cluster, plan.job)
    if note and note == annotation(before, CODE_SENT):
        return []
    claims = [each for each in plan.manifests if each.kind == CLAIM and not note]
    objects = objects_of(cluster, plan.job.metadata.name, plan.placement.backend)
    created: list[ApplyResult] = []
    try:
        rbac.require(cluster, (*POD_RIGHTS, *rbac.EXEC, *rbac.to_send(claims)))
        for each in claims:
            applied = objects.apply(each)
            if applied.verb == "created":  # else another apply may be sending to it
                created.append(ApplyResult(each, applied))
        _send_to_claim(cluster, plan, code, folder, notify)
    except KdistError as error:
        message = f"spec.code cannot be sent to {folder.place}: {error.message}"
        hint = "; or ".join(filter(None, (error.hint, _OTHER_WAYS)))
        command = error.next_command
        said = KdistError(message, hint=hint, next_command=command, code=error.code)
        raise undo(objects, created, said) from error
    except BaseException as error:  # Ctrl-C
        undo(objects, created, KdistError(str(error)))
        raise
    return created


def describe_sent(cluster: Cluster, job: TrainingJob) -> str:
    """What is noted of a job whose code is on a claim: the claim's uid, and the folder. Empty for
    other code, and without that claim.
    """
    code = job.spec.code
    if code is None or code.claim is None:
        return ""
    found = uid(cluster.look_up("v1", CLAIM, code.claim))
    return f"{found}/{code.sub_path}" if found else ""


def _send_to_claim(
    cluster: Cluster,
    plan: Plan,
    code: CodeSource,
    folder: CodeFolder,
    notify: Callable[[str], None],
) -> None:
    claim = cluster.get("v1", CLAIM, str(code.claim))
    single = "ReadWriteMany" not in texts(claim, "spec", "accessModes")
    unbound = text(claim, "status", "phase") == "Pending"
    backend, manifests = backends.get(plan.placement.backend), [*plan.deferred, *plan.manifests]
    pod = build_helper_pod(
        plan.job,
        backend,
        manifests,
        read_only=False,
        tools=False,
        for_new_volume=single and unbound,
    )
    # not every volume can be mounted on a second node
    node = next(_find_nodes(cluster, str(code.claim)), "") if single else ""
    objects = objects_of(cluster, plan.job.metadata.name, backend.name)
    size = units.size(folder.size)
    notify(f"starting pod {pod['metadata']['name']} to send {size} to {folder.place}")
    with start_helper_pod(objects, pod, seconds=_SECONDS, node=node) as name:
        wait_until_running(cluster, name, notify=notify)
        place, error = f"{CHECKPOINTS_MOUNT}/{code.sub_path}", bytearray()
        source = files("kdist.deploy").joinpath("receive_code.py").read_text(encoding="utf-8")
        command = ["python", "-I", "-c", source]
        look = [*command, place, folder.digest]
        if cluster.run(name, look, container=CONTAINER, timeout=_SECONDS)[0] == 0:
            return
        ended = cluster.exec(
            name,
            [*command, *place.rsplit("/", 1), folder.digest],
            container=CONTAINER,
            out=lambda _: None,
            err=error.extend,
            feed=_pack(folder),
            timeout=_SECONDS,
        )
        if ended != 0:
            lines = error.decode(errors="replace").splitlines() or [f"exit code {ended}"]
            full = "make room on the claim, or enlarge it" if "No space left" in lines[-1] else ""
            raise KdistError(lines[-1][:400], hint=full)


def _find_nodes(cluster: Cluster, claim: str) -> Iterator[str]:
    """The nodes on which the claim is mounted now."""
    for pod in cluster.list_readable("v1", "Pod"):
        volumes, node = items(pod, "spec", "volumes"), text(pod, "spec", "nodeName")
        mounted = {text(each, "persistentVolumeClaim", "claimName") for each in volumes}
        if is_active(pod) and claim in mounted and node:
            yield node


def _pack(folder: CodeFolder) -> Iterator[bytes]:
    """The files as a tar archive. Raises `KdistError` if one cannot be read as it was."""
    for each in folder.files:
        info = tarfile.TarInfo(each.name)
        info.size = left = each.size
        yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
        try:
            with each.path.open("rb") as file:
                while left and (data := file.read(min(_CHUNK, left))):
                    left -= len(data)
                    yield data
        except OSError as error:
            raise KdistError(f"cannot read {each.path}: {error.strerror or error}") from error
        yield bytes(left + -each.size % tarfile.BLOCKSIZE)  # of a shorter one the digest is wrong
    yield bytes(2 * tarfile.RECORDSIZE)  # it is read in whole records


def _send_to_bucket(code: CodeSource, folder: CodeFolder) -> None:
    argv = [sys.executable, "-m", "kdist_trainer.fetch.upload", "--url", folder.place]
    for name in ("endpoint", "region"):
        if (value := getattr(code, name)) is not None:
            argv += [f"--{name}", value]
    request = encode_json(
        {"files": {each.name: str(each.path) for each in folder.files}, "sums": folder.sums}
    )
    done = subprocess.run(argv, input=request, text=True, capture_output=True, check=False)
    try:
        parse_object(done.stdout)
    except MalformedTextError:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        hint = (
            "the credentials for the bucket are those in the environment of kdist, as kdist run's"
        )
        if "obstore" in last[0]:
            hint = "`pip install 'obstore>=0.12'` adds it"
        raise KdistError(
            f"spec.code cannot be sent to {folder.place}: {last[0]}", hint=hint
        ) from None

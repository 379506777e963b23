"""Where the files of a code folder go: into a ConfigMap while that holds them, else to where the
job's checkpoints are: on their claim, which pods mount, or in their bucket, from which each pod
fetches them before it starts.

There their folder has the digest of their content as its name: jobs share it, it is sent once, and
a running job keeps what it was started with. `code_upload` sends them.
"""

from __future__ import annotations

from hashlib import file_digest
from pathlib import Path
from typing import Final

from kdist import render
from kdist.deploy.receive_code import SUMS, describe
from kdist.errors import KdistError
from kdist.job_file.folder import CodeFolder, find_code
from kdist.manifest import CONFIG_MAP_BYTES
from kdist.spec import CodeSource, TrainingJob

FOLDER: Final = "_code"
"""Next to the checkpoints, where no job has this name."""
_MEBI: Final = 1024 * 1024

Placed = tuple[TrainingJob, CodeFolder | None, dict[str, bytes] | None]


def place_code(job: TrainingJob, base: Path) -> Placed:
    """The job as a cluster gets it, what is sent of its code folder, and the files for a ConfigMap;
    None where there are none. For files that go elsewhere, `spec.code` of the job says where.

    Raises:
        UsageError: there is no such folder, or it cannot be read.
        KdistError: it is too large, or has a file that must not be sent.
    """
    folder, checkpoints = find_code(job, base), job.spec.checkpoints
    if folder is None:
        return job, None, None
    if folder.size <= CONFIG_MAP_BYTES:
        return job, folder, folder.read(Path.read_bytes)
    if checkpoints is None or not checkpoints.in_cluster:
        render.check_size({each.name: each.size for each in folder.files})
        raise AssertionError("unreachable: it does not fit")
    if any(each.name == SUMS for each in folder.files):
        raise KdistError(
            f"spec.code: {folder.shown}/{SUMS} has the name of kdist's own list of digests",
            hint="rename it, or list it in .kdistignore",
        )
    folder.sums = "".join(map(describe, *zip(*folder.read(_digest).items(), strict=True)))
    name = f"{FOLDER}/{folder.digest[:16]}"
    if checkpoints.bucket is None:
        code = CodeSource(claim=job.checkpoint_claim, sub_path=name)
        folder.place = f"{name} on claim {code.claim}"
    else:
        folder.place = f"{checkpoints.bucket}/{name}"
        given = {key: getattr(checkpoints, key) for key in ("endpoint", "region", "secret")}
        code = CodeSource(
            url=folder.place,
            sha256=folder.digest,
            size=f"{-(-(folder.size + len(folder.sums.encode())) // _MEBI)}Mi",
            **{key: value for key, value in given.items() if value is not None},
        )
    return job.model_copy(update={"spec": job.spec.model_copy(update={"code": code})}), folder, None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()

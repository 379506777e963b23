"""Where the files of a code folder go: into a ConfigMap while that holds them, else to the bucket
with the job's checkpoints, from which each pod fetches them before it starts.

In the bucket their folder has the digest of their content as its name: jobs share it, it is sent
once, and a running job keeps what it was started with. A process of its own sends them, because the
command line never imports the trainer; its credentials are those of this machine.
"""

from __future__ import annotations

import subprocess
import sys
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Final

from kdist import render
from kdist.errors import KdistError
from kdist.job_file.folder import CodeFolder, find_code
from kdist.manifest import CONFIG_MAP_BYTES
from kdist.spec import CodeSource, TrainingJob
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_object

FOLDER: Final = "_code"
"""In the bucket, where no job has this name."""
_SUMS: Final = "SHA256SUMS"
_MEBI: Final = 1024 * 1024

Placed = tuple[TrainingJob, CodeFolder | None, dict[str, bytes] | None]


def place_code(job: TrainingJob, base: Path) -> Placed:
    """The job as a cluster gets it, what is sent of its code folder, and the files for a ConfigMap;
    None where there are none. For files in a bucket, `spec.code` of the job names their URL.

    Raises:
        UsageError: there is no such folder, or it cannot be read.
        KdistError: it is too large, or has a file that must not be sent.
    """
    folder, checkpoints = find_code(job, base), job.spec.checkpoints
    if folder is None:
        return job, None, None
    if folder.size <= CONFIG_MAP_BYTES:
        return job, folder, folder.read(Path.read_bytes)
    if checkpoints is None or checkpoints.bucket is None:
        render.check_size({each.name: each.size for each in folder.files})
        raise AssertionError("unreachable: it does not fit")
    if any(each.name == _SUMS for each in folder.files):
        raise KdistError(
            f"spec.code: {folder.shown}/{_SUMS} has the name of kdist's own list of digests",
            hint="rename it, or list it in .kdistignore",
        )
    folder.sums = "".join(map(_line, *zip(*folder.read(_digest).items(), strict=True)))
    digest = sha256(folder.sums.encode()).hexdigest()
    folder.url = f"{checkpoints.bucket}/{FOLDER}/{digest[:16]}"
    given = {name: getattr(checkpoints, name) for name in ("endpoint", "region", "secret")}
    code = CodeSource(
        url=folder.url,
        sha256=digest,
        size=f"{-(-(folder.size + len(folder.sums.encode())) // _MEBI)}Mi",
        **{name: value for name, value in given.items() if value is not None},
    )
    return job.model_copy(update={"spec": job.spec.model_copy(update={"code": code})}), folder, None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _line(name: str, digest: str) -> str:
    """A line as sha256sum writes it."""
    written = name
    for character, escape in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r")):
        written = written.replace(character, escape)
    mark = "" if written == name else "\\"
    return f"{mark}{digest}  {written}\n"


def upload_code(job: TrainingJob, folder: CodeFolder | None) -> None:
    """Send the files of a code folder to the bucket, unless they are there or belong into a
    ConfigMap. Raises `KdistError`.
    """
    if folder is None or not folder.url or job.spec.code is None:
        return
    argv = [sys.executable, "-m", "kdist_trainer.fetch.upload", "--url", folder.url]
    for name in ("endpoint", "region"):
        if (value := getattr(job.spec.code, name)) is not None:
            argv += [f"--{name}", value]
    files = {each.name: str(each.path) for each in folder.files}
    request = encode_json({"files": files, "sums": folder.sums})
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
            f"spec.code cannot be sent to {folder.url}: {last[0]}", hint=hint
        ) from None

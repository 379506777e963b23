"""What pods install before they start, for `spec.install`: the trainer of this version as an
archive, and the packages that pip adds to the image.

The archive is in a ConfigMap of the job, so that no index needs to have the trainer, and it is
always of the version that has rendered the pods.
"""

from __future__ import annotations

import io
import zipfile
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from kdist.errors import KdistError
from kdist.manifest import CONFIG_MAP_BYTES
from kdist.render.context import literal
from kdist.render.storage import fit, list_credentials
from kdist.spec import PACKAGES_SIZE, TrainingJob, list_sources
from kdist.spec.validators import CACHE_MOUNT
from kdist_trainer.formats import OBJECT_STORES
from kdist_trainer.formats.requirements import REQUIREMENTS

ARCHIVE: Final = "trainer.zip"
LISTED: Final = "requirements.txt"
_FOLDER: Final = "/etc/kdist-install"
_WHEELS: Final = "/wheels"
_BUCKETS: Final = "obstore>=0.12"
_HUB: Final = "huggingface-hub>=1.0"
_SAFETENSORS: Final = "safetensors>=0.5"
_YEAR: Final = (1980, 1, 1, 0, 0, 0)  # the same bytes whenever it is made


def list_packages(job: TrainingJob, *, own_only: bool = False) -> list[str]:
    """The packages that the pods need besides torch and numpy: what the trainer imports for this
    job, and, unless only its own are asked for, what the job names.
    """
    schemes = {source.scheme for source in list_sources(job.spec)}
    if job.spec.checkpoints is not None:
        schemes.add(job.spec.checkpoints.scheme)
    found = [*REQUIREMENTS.values(), _SAFETENSORS]
    found += [_BUCKETS] if schemes & {*OBJECT_STORES} else []
    found += [_HUB] if "hf" in schemes else []
    install = job.spec.install
    return found if own_only or install is None else [*found, *install.packages]


def describe_install(job: TrainingJob) -> dict[str, Any] | None:
    """Values for templates; None for a job whose image has the trainer. Raises `KdistError` if they
    do not fit into a ConfigMap.
    """
    install = job.spec.install
    if install is None:
        return None
    archive = _pack()
    listed = "\n".join(install.lock or list_packages(job)) + "\n"
    if len(archive) + len(listed) > CONFIG_MAP_BYTES:
        raise KdistError(
            f"spec.install: the trainer and {len(listed) // 1024} KiB of digests do not fit into a "
            f"ConfigMap, which has at most {CONFIG_MAP_BYTES // 1024} KiB: name fewer packages"
        )
    arguments = [
        *("--folder=/packages", f"--archive={_FOLDER}/{ARCHIVE}"),
        *(f"--requirements={_FOLDER}/{LISTED}", "--termination-message=/dev/termination-log"),
    ]
    arguments += ["--no-deps", "--require-hashes"] if install.lock else []
    if install.index is not None:
        arguments += [f"--index-url={install.index}"]
        if install.index.startswith("http://"):  # which pip takes only from hosts that are named
            arguments += [f"--trusted-host={urlsplit(install.index).netloc}"]
    variables = list[dict[str, Any]]()
    if install.wheels is not None and install.wheels.url is not None:
        (source,) = [each for each in list_sources(job.spec) if not each.mount]
        arguments += [f"--wheels={literal(each)}" for _, each in source.arguments()]
        arguments += [f"--needed={each}" for each in list_packages(job, own_only=True)]
        if source.secret is not None:
            variables += list_credentials(source.scheme, source.secret, source.field)
    elif install.wheels is not None:
        arguments += [f"--find-links={_WHEELS}"]
    if install.wheels is not None:
        arguments += ["--no-index"] if install.index is None else []
    arguments += [f"--cache={CACHE_MOUNT}"] if install.cache is not None else []
    return {
        "digest": sha256(archive + listed.encode()).hexdigest()[:10],
        "archive": b64encode(archive).decode(),
        "listed": listed,
        "arguments": arguments,
        "folder": _FOLDER,
        "archive_path": f"{_FOLDER}/{ARCHIVE}",
        "wheels": _WHEELS,
        "cache": CACHE_MOUNT,
        "variables": variables,
        "size": fit(install.size or PACKAGES_SIZE),
    }


@cache
def _pack() -> bytes:
    """The trainer of this installation."""
    found = find_spec("kdist_trainer")
    root = Path(str((found.submodule_search_locations or [""])[0])) if found is not None else Path()
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(root.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                name = f"{root.name}/{path.relative_to(root).as_posix()}"
                archive.writestr(
                    zipfile.ZipInfo(name, _YEAR), path.read_bytes(), zipfile.ZIP_DEFLATED, 9
                )
    return written.getvalue()

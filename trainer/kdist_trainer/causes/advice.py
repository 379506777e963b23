"""Fills in what to do next: paths with what is free there, the peak of memory, missing packages."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path

_SHM = "/dev/shm"  # noqa: S108 - the folder is read only
_PACKAGES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Packages whose name is not that of their module."""


def fill_advice(advice: str, error: BaseException, place: str | None) -> str:
    """The advice with its fields filled in from the error and this process."""
    if "{" not in advice:
        return advice
    fields: defaultdict[str, str] = defaultdict(str)
    path = str(getattr(error, "filename", None) or "")
    folder = _SHM if _SHM in advice else path
    fields.update(
        place=shorten(place) or "your code",
        path=path or "the volume",
        free=_free(folder) if "{free}" in advice and folder else "",
        peak=_peak() if "{peak}" in advice else "",
    )
    if "{python}" in advice:
        fields.update(_installation(str(getattr(error, "name", None) or "the package")))
    return advice.format_map(fields).strip().removesuffix(";")


def shorten(place: str | None) -> str:
    """`File "x.py", line 3, in f` as `x.py:3`, as editors and terminals read it."""
    if place is None:
        return ""
    file, _, rest = place.removeprefix('File "').partition('", line ')
    return f"{file}:{rest.partition(',')[0]}"


def _free(path: str) -> str:
    """How much is free where a file is, or would be."""
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        found = os.statvfs(folder)
    except OSError:
        return ""
    free, whole = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    return f" ({folder} has {free:,} of {whole:,} bytes free)"


def _peak() -> str:
    """The most memory that this rank has had on its GPU, if it has one."""
    torch = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return ""
        used, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    except Exception:  # noqa: BLE001 - a GPU that has failed answers nothing
        return ""
    return (
        f"at its peak this rank had {used / 2**30:.2f} GiB in tensors and {reserved / 2**30:.2f} "
        f"GiB in all of {whole / 2**30:.2f} GiB"
    )


def _installation(module: str) -> dict[str, str]:
    """The Python that runs, the environment that is active, and the command that installs."""
    module = module.partition(".")[0]
    package = _PACKAGES.get(module, module)
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX") or ""
    environment = ""
    if active and Path(active) != Path(sys.prefix):
        environment = f" (the environment that is active is another one, {active})"
    elif active:
        environment = f" (of the active environment {active})"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        install = f"add `RUN {sys.executable} -m pip install {package}` to the image"
    elif _is_of_uv():
        install = f"uv pip install --python {sys.executable} {package}"
    else:
        install = f"{sys.executable} -m pip install {package}"
    return {
        "python": sys.executable,
        "environment": environment,
        "install": install,
        "package": package,
    }


def _is_of_uv() -> bool:
    """Whether uv has made the environment, in which there is no pip then."""
    try:
        return "\nuv = " in f"\n{(Path(sys.prefix) / 'pyvenv.cfg').read_text()}"
    except OSError:
        return False

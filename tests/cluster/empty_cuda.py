"""Makes libraries that have CUDA's names and nothing in them, for an image that is to train on
processors only.

torch's normal wheel is linked against two gigabytes of NVIDIA's libraries, without which it cannot
even be imported, and which a machine without a GPU never calls. Each function here answers 100,
`cudaErrorNoDevice`. The CUDA runtime itself is small and is asked at import, so it stays the real
one.

Run as `python empty_cuda.py TORCH FOLDER`, TORCH being an installed torch. Needs gcc and binutils.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# the last is the driver, which belongs to the machine
REAL = ("libcudart.", "libcupti.", "libcuda.")
SYSTEM = (
    "libc.",
    "libm.",
    "libdl.",
    "librt.",
    "libpthread.",
    "libgcc_s.",
    "libstdc++.",
    "libgomp.",
    "libz.",
    "ld-linux",
)
THEIRS = re.compile(
    r"(cu(blas|dnn|fft|rand|solver|sparse|File|pti|da)|nccl|nvrtc|nvshmem|nvJit)\w*"
)


def main(torch: Path, folder: Path) -> None:
    """Write one empty library for each that torch's own libraries need and that is not there."""
    libraries = sorted((torch / "lib").glob("*.so*"))
    own = {library.name for library in libraries}
    needed: dict[str, set[str]] = {}
    for library in libraries:
        needed[library.name] = {
            name
            for name in _needed(library)
            if name not in own and not name.startswith(SYSTEM + REAL)
        }
    functions: dict[str, set[str]] = {name: set() for names in needed.values() for name in names}
    versions: dict[str, str] = {}
    for library in libraries:
        holders = {version: name for name, version in _versions(library) if name in functions}
        versions |= {name: version for version, name in holders.items()}
        for symbol, version in _undefined(library):
            if version in holders:
                functions[holders[version]].add(symbol)
            elif not version and THEIRS.fullmatch(symbol) and needed[library.name]:
                # The loader looks in all libraries for a symbol without a version, so any of them
                # may hold it.
                functions[min(needed[library.name])].add(symbol)
    folder.mkdir(parents=True, exist_ok=True)
    for name, symbols in functions.items():
        _write(folder / name, symbols, versions.get(name))


def _needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", _output("readelf", "-d", library))


def _undefined(library: Path) -> Iterable[tuple[str, str]]:
    """Every symbol that a library expects from others, with the version it expects it in (or
    "").
    """
    return re.findall(
        r" U ([^@\s]+)@{0,2}(\S*)$", _output("nm", "-D", "--undefined-only", library), re.MULTILINE
    )


def _versions(library: Path) -> Iterable[tuple[str, str]]:
    """Which version of which library this one was linked against: a library offers its symbols
    under one name or none.
    """
    name = ""
    for found, version in re.findall(
        r"File: (\S+)|Name: (\S+)", _output("readelf", "-V", "-W", library)
    ):
        name = found or name
        if version and name:
            yield name, version


def _write(target: Path, symbols: Iterable[str], version: str | None) -> None:
    source = "".join(f"int {symbol}(void) {{ return 100; }}\n" for symbol in sorted(symbols))
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-nostdlib",
        "-fno-builtin",
        "-O1",
        "-x",
        "c",
        "-",
        f"-Wl,-soname,{target.name}",
    ]
    if version:
        script = target.with_suffix(".map")
        script.write_text(f"{version} {{ global: *; }};\n")
        command.append(f"-Wl,--version-script={script}")
    subprocess.run([*command, "-o", str(target)], input=source, text=True, check=True)
    target.with_suffix(".map").unlink(missing_ok=True)


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

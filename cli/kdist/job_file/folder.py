"""The only code that walks the files that leave this machine: those of the folder that `spec.code`
names.

It says what is sent, what is left out and why, and what must not be sent. Hidden files, byte code
and what `.gitignore` and `.kdistignore` name are left out, those of the folders above too, up to
the repository's root. Links inside the folder are followed, except back to a folder that they are
in; a link out of the folder is refused. pathspec reads the patterns, and not `git check-ignore`:
git need not be installed, the folder need not be a repository, and the settings of a repository can
make git run programs.

`find_warnings` finds what looks like a credential in what a job would send to a cluster: files of
its code folder, and values of its environment. It warns and refuses nothing: only the user knows.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kdist.errors import KdistError, Problem, UsageError
from kdist.job_file import resolve_path, unreadable
from kdist.job_file.yaml_parser import YamlNode
from kdist.manifest import CODE_BYTES, CONFIG_MAP_BYTES
from kdist.spec import TrainingJob

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec


T = TypeVar("T")

# Later ones have the last word, so that `!name` in .kdistignore sends what git ignores.
IGNORE_FILES: Final = (".gitignore", ".kdistignore")
MAX_ENTRIES: Final = 20_000
_EXCLUDED: Final = frozenset({"__pycache__", "node_modules"})
_MAX_RULES: Final = 1024 * 1024
_SHOWN: Final = 5


class SentFile(NamedTuple):
    """A file that is sent.

    Attributes:
        name: its path in the folder, with `/`.
        path: where it really is.
        size: bytes.
    """

    name: str
    path: Path
    size: int


class Omission(NamedTuple):
    """A file, folder or link that is not sent, and the reason."""

    name: str
    reason: str


@dataclass
class CodeFolder:
    """What of a code folder is sent.

    Attributes:
        shown: the folder as the job names it.
        root: the folder, without links.
        files: what is sent, by name.
        left_out: what is not sent.
        refused: why nothing can be sent; empty if all is well.
        place: where in a bucket or on a claim it is sent; empty for a ConfigMap.
        sums: what the file SHA256SUMS there has.
    """

    shown: str
    root: Path
    files: list[SentFile] = field(default_factory=list)
    left_out: list[Omission] = field(default_factory=list)
    refused: list[Omission] = field(default_factory=list)
    place: str = ""
    sums: str = ""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(each.size for each in self.files)

    @property
    def digest(self) -> str:
        """The digest of `sums`."""
        return sha256(self.sums.encode()).hexdigest()

    def read(self, convert: Callable[[Path], T]) -> dict[str, T]:
        """What `convert` makes of each file, by name. Raises `KdistError` if one must not or cannot
        be sent.
        """
        if self.refused:
            raise KdistError(
                "spec.code: " + "; ".join(f"{name} {reason}" for name, reason in self.refused),
                hint=HINT,
            )
        try:
            return {each.name: convert(each.path) for each in self.files}
        except OSError as error:
            raise unreadable(f"spec.code: cannot read {error.filename}", error) from None

    def describe(self, *, all_names: bool = False) -> str:
        """Count, bytes and first names of what is sent, then what is left out."""
        names = _listed([each.name for each in self.files], all_names=all_names)
        count = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        of = f"of {self.shown}{self.place and f' to {self.place}'}"
        text = f"spec.code sends {count}, {self.size} bytes, {of}{names and f': {names}'}"
        left = [f"{name} ({reason})" for name, reason in self.left_out]
        return f"{text}; left out: {_listed(left, all_names=all_names)}" if left else text


HINT: Final = "copy the file into the folder, or list the name in .kdistignore there"


def _listed(names: list[str], *, all_names: bool) -> str:
    more = 0 if all_names else len(names) - _SHOWN
    return ", ".join([*names[:_SHOWN], f"{more} more"] if more > 0 else names)


def find_code(job: TrainingJob, base: Path) -> CodeFolder | None:
    """What is sent of the job's code folder, a path that starts from `base`; None if the job has
    none.

    Raises:
        UsageError: there is no such folder, or it cannot be read.
        KdistError: it is far too large.
    """
    if job.spec.code is None or job.spec.code.path is None:
        return None
    return list_folder(resolve_path(base, job.spec.code.path), shown=job.spec.code.path)


def missing_folder(root: Path) -> UsageError:
    """The error for a code folder that does not exist."""
    hint = "its path is relative to the job file"
    return UsageError(f"spec.code: there is no folder {root}", hint=hint)


def list_folder(root: Path, *, shown: str) -> CodeFolder:
    """Walk a folder, without reading its files. Raises as `find_code` does."""
    found = CodeFolder(shown, root.resolve())
    try:
        if not root.is_dir():
            raise missing_folder(root)
        _Walk(found).folder(found.root, PurePosixPath(), ())
    except OSError as error:
        raise unreadable(f"spec.code: cannot read {error.filename}", error) from None
    found.files.sort()
    return found


class _Walk:
    """One walk through a folder, whose findings it adds to `found`."""

    def __init__(self, found: CodeFolder) -> None:
        self._found = found
        self._rules = _Rules(found.root)
        self._entries = 0
        self._bytes = 0

    def folder(self, real: Path, name: PurePosixPath, above: tuple[Path, ...]) -> None:
        """Add what is in a folder.

        Args:
            real: the folder, without links.
            name: its name in what is sent, by which a link may have led here.
            above: the real folders that it is in.
        """
        chain = (*above, real)
        for entry in sorted(real.iterdir()):
            self._entries += 1
            if self._entries > MAX_ENTRIES:
                raise KdistError(
                    f"spec.code: {self._found.root} has more than {MAX_ENTRIES} entries",
                    hint="name the folder that has the code alone",
                )
            self._entry(entry, name / entry.name, chain)

    def _entry(self, entry: Path, name: PurePosixPath, chain: tuple[Path, ...]) -> None:
        shown = str(name)
        if reason := self._rules.why_not(entry):
            if entry.name not in _EXCLUDED | {".git", *IGNORE_FILES}:
                self._omit(shown, reason)
            return
        if entry.is_symlink():
            target = Path(os.path.realpath(entry))
            if not target.is_relative_to(self._found.root):
                self._refuse(shown, f"is a link out of the folder, to {target}")
                return
            reason = "a link in a circle" if target in chain else self._rules.why_no_part(target)
            if reason or not target.exists():
                self._omit(shown, f"a link to {target.name}: {reason or 'which is not there'}")
                return
            entry = target
        mode = entry.stat().st_mode
        if stat.S_ISDIR(mode):
            self.folder(entry, name, chain)
        elif not stat.S_ISREG(mode):
            self._omit(shown, "neither a file nor a folder")
        else:
            self._file(entry, shown)

    def _file(self, path: Path, name: str) -> None:
        try:
            name.encode()
        except UnicodeEncodeError:
            self._refuse(ascii(name), "has a name that is not UTF-8, which a ConfigMap cannot hold")
            return
        size = path.stat().st_size
        self._bytes += size
        if self._bytes > CODE_BYTES:
            raise KdistError(
                f"spec.code: {self._found.root} has more than {CODE_BYTES // 2**20} MiB",
                hint="put data and weights on a claim or at a URL (spec.data)",
            )
        self._found.files.append(SentFile(name, path, size))

    def _omit(self, name: str, reason: str) -> None:
        self._found.left_out.append(Omission(name, reason))

    def _refuse(self, name: str, reason: str) -> None:
        self._found.refused.append(Omission(name, reason))


class _Rules:
    """What is left out below a folder, by the files of patterns in it and above it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._read: dict[Path, GitIgnoreSpec | None] = {}
        self._above = list(_up_to_repository(root))

    def why_not(self, path: Path) -> str:
        """Why a path is left out whose folders are not; empty if it is sent."""
        if path.name.startswith("."):
            return "hidden"
        if path.name in _EXCLUDED:
            return "not code"
        inside = path.relative_to(self._root).parents
        folders = [self._root / each for each in inside] + self._above
        for file in reversed(IGNORE_FILES):
            for folder in folders:  # the nearest one that has something to say decides
                spec = self._patterns(folder / file)
                relative = path.relative_to(folder).as_posix()
                found = None if spec is None else _match(spec, relative, path)
                if found is not None:
                    return file if found else ""
        return ""

    def why_no_part(self, path: Path) -> str:
        """The same for a path that a link leads to, whose folders may be left out."""
        parts = path.relative_to(self._root).parts
        paths = (self._root.joinpath(*parts[: count + 1]) for count in range(len(parts)))
        return next(filter(None, map(self.why_not, paths)), "")

    def _patterns(self, file: Path) -> GitIgnoreSpec | None:
        if file not in self._read:
            self._read[file] = _read_patterns(file) if file.is_file() else None
        return self._read[file]


def _up_to_repository(root: Path) -> Iterator[Path]:
    """The folders above, up to the one that has the repository; none without a repository."""
    if (root / ".git").exists():
        return
    above = list(root.parents)
    tops = [index for index, each in enumerate(above) if (each / ".git").exists()]
    yield from above[: tops[0] + 1] if tops else ()


def _match(spec: GitIgnoreSpec, relative: str, path: Path) -> bool | None:
    """Whether the patterns ignore a path, and not what another pattern takes back; None if they do
    not mention it.
    """
    found = spec.check_file(f"{relative}/" if path.is_dir() else relative).include
    return spec.check_file(relative).include if found is None else found


def _read_patterns(file: Path) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec  # slow to import, and most folders need it not

    with file.open("rb") as stream:
        text = stream.read(_MAX_RULES + 1)
    try:
        if len(text) > _MAX_RULES:
            raise ValueError(f"larger than {_MAX_RULES // 2**20} MiB")
        return GitIgnoreSpec.from_lines(text.decode("utf-8", "surrogateescape").splitlines())
    except ValueError as error:
        raise UsageError(
            f"spec.code: cannot read the patterns of {file}: {error}",
            hint="`git check-ignore -v NAME` shows how git reads them",
        ) from None


# Hidden ones, such as .env and .aws/, are never sent.
_FILES: Final = (
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx", "*.keytab", "*.token", "*.env", "env"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "credentials", "credentials*.json"),
    *("client_secret*.json", "*service*account*.json", "*kubeconfig*", "secrets.*", "_netrc"),
)
_CONTENTS: Final = (
    (rb"-----BEGIN [A-Z ]*PRIVATE KEY", "a private key"),
    (rb'"type"\s*:\s*"service_account"', "the key of a service account"),
    (rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", "an access key of AWS"),
    (rb"\baws_secret_access_key\s*=\s*['\"]?[A-Za-z0-9/+]{40}", "an access key of AWS"),
    (rb"\b(?:client-key-data|id-token)\s*:\s*\S", "a kubeconfig"),
    (rb"\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{36}|glpat-[\w-]{20})\b", "a token"),
)
_VARIABLE: Final = re.compile(r"(?i)(?:^|_)(?:KEY|TOKEN)$|SECRET|PASSWORD|PASSWD|CREDENTIAL")


def find_warnings(tree: YamlNode, job: TrainingJob, *, base: Path) -> Iterator[Problem]:
    """What looks like a credential and is not in a Secret, each with its place in the job file,
    whose relative paths start from `base`.
    """
    yield from _in_environment(tree, ())
    try:
        folder = find_code(job, base)
    except KdistError:
        return  # whoever reads the folder says why it cannot
    if folder is not None:
        from kdist.job_file.problems import locate  # only files with problems need the rest of it

        mark = locate(tree, ("spec", "code")).value._replace(width=1)
        where = "in a ConfigMap, which also the role `view` may read"
        if folder.size > CONFIG_MAP_BYTES:
            where = "to the bucket or claim with the checkpoints, for all who may read these"
        for sent, reason in _in_files(folder):
            yield mark.problem(
                f"{folder.shown}/{sent.name} looks like a credential ({reason}), and would "
                f"be sent {where}",
                hint=f"list it in {folder.shown}/.kdistignore; a Secret, named in spec.env[].secret"
                " or podTemplate, brings it to the pods",
                path="spec.code",
            )


def _in_files(folder: CodeFolder) -> Iterator[tuple[SentFile, str]]:
    for sent in folder.files:
        # a link may hide what it is by its own name, and what it leads to by that of the link
        if any(map(_is_named_like_one, (PurePosixPath(sent.name).name, sent.path.name))):
            yield sent, "by its name"
        elif found := _look_into(sent.path):
            yield sent, f"it holds {found}"


def _is_named_like_one(name: str) -> bool:
    plain = name.lower()
    if plain.endswith((".pub", ".py")):
        return False
    return any(fnmatch(plain, each) for each in _FILES)


def _look_into(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(CONFIG_MAP_BYTES)
    except OSError:
        return ""  # whoever sends it says that it cannot be read
    return next((what for pattern, what in _CONTENTS if re.search(pattern, content)), "")


def _in_environment(node: YamlNode, path: tuple[str | int, ...]) -> Iterator[Problem]:
    """Variables with a value, in `spec.env` and in containers of `podTemplate`."""
    for key, (_, child) in node.entries.items():
        if key == "env" and child.kind == "list":
            for index, item in enumerate(child.items):
                yield from _in_variable(item, (*path, key, index))
        yield from _in_environment(child, (*path, key))
    for index, child in enumerate(node.items):
        yield from _in_environment(child, (*path, index))


def _in_variable(item: YamlNode, path: tuple[str | int, ...]) -> Iterator[Problem]:
    name = item.entries["name"][1].text if "name" in item.entries else ""
    if not _VARIABLE.search(name) or "value" not in item.entries:
        return
    value = item.entries["value"][1]
    if not value.text or value.text.startswith("$("):
        return
    from kdist.spec.reference import show  # only files with warnings need it

    reference = "secret: {name: SECRET, key: KEY}"
    if path[1] == "podTemplate":
        reference = "valueFrom: {secretKeyRef: {name: SECRET, key: KEY}}"
    yield value.mark._replace(width=1).problem(
        f"the value of {name} would be readable for everyone who may read ConfigMaps, pods or this "
        "file",
        path=show(path),
        hint=f"`{reference}` instead of `value` takes it from a Secret",
    )

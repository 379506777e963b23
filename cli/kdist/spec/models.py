"""The text types of job.yaml (names, labels, quantities, paths) and its small sections: code, data,
checkpoints, environment, resources, tolerations.

Each text type has a pattern, which is part of the JSON Schema, so that editors check it too;
`PATTERN_MESSAGES` maps it to the message that a problem shows instead of the pattern.

Also here are the rules of single fields: reserved names of environment variables, reserved mount
paths, the URL of a bucket with checkpoints and the address of its server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from kdist_trainer.config import COMPILE_CACHE, QUANTITY, QUANTITY_OR_NONE, ConfigModel, Seconds
from kdist_trainer.config.base import (
    DIGEST,
    LABEL,
    NO_NUL,
    OBJECT_NAME,
    RULE,
    Argument,
    Bytes,
    CheckedModel,
    Violation,
)
from kdist_trainer.config.sources import (
    SERVER_URL,
    URL,
    UrlSource,
    find_secret,
    find_server_problem,
)
from kdist_trainer.formats import OBJECT_STORES

__all__ = ["RULE", "Violation", "check_mount", "check_variable"]

# Set for the ranks by torch's elastic agent and kdist; a job that sets them would break its own
# rendezvous.
_RESERVED_RANKS = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_RESERVED_SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
_RESERVED_PREFIXES = ("KDIST_", "TORCHELASTIC_")


def check_variable(name: str) -> Iterator[Violation]:
    """Check that kdist does not set a variable of this name itself."""
    if name in _RESERVED_RANKS + _RESERVED_SIZES or name.startswith(_RESERVED_PREFIXES):
        yield Violation(f"`{name}` is set by kdist itself and cannot be changed", "name", ("name",))


# Folders of the image itself, and those that kdist mounts.
_SYSTEM_FOLDERS = (
    "bin",
    "boot",
    "dev",
    "etc",
    "kdist",
    "lib",
    "lib64",
    "proc",
    "run",
    "sbin",
    "sys",
    "tmp",
    "usr",
)
_KDIST_FOLDERS = ("checkpoints", "code")


def check_mount(path: str) -> Iterator[Violation]:
    """Check that a mount path is normalized and outside of the folders of the system and kdist."""
    parts = path.split("/")[1:]
    if {"..", ".", ""} & set(parts):
        yield Violation("must not contain `.`, `..` or `//`", "mountPath", ("mountPath",))
    elif parts[0] in _SYSTEM_FOLDERS:
        yield Violation(
            f"must not be in /{parts[0]}, which belongs to the system", "mountPath", ("mountPath",)
        )
    elif parts[0] in _KDIST_FOLDERS or path.startswith("/var/run"):
        yield Violation(
            "must not be where kdist itself mounts a volume", "mountPath", ("mountPath",)
        )


BUCKET: Final = (
    f"^({'|'.join(OBJECT_STORES)})://[a-z0-9][-a-z0-9._]{{1,220}}[a-z0-9]"
    "(/[-A-Za-z0-9_=+@][-A-Za-z0-9._=+@]*)*/?$"
)
NO_BUCKET: Final = (
    "must be s3://BUCKET, gs://BUCKET or az://CONTAINER, in lower case, with or without /PREFIX, "
    "whose parts are letters, digits, `-`, `_` and `.`, neither empty nor beginning with `.`"
)


def scheme_of(url: str) -> str:
    """The scheme of a URL; empty if it has none."""
    return url.partition("://")[0] if "://" in url else ""


def port_of(endpoint: str) -> int:
    """The port of a server's address."""
    address = urlsplit(endpoint)
    return address.port or (80 if address.scheme == "http" else 443)


def check_endpoint(endpoint: str, field: str = "endpoint") -> Iterator[Violation]:
    """Check the address of a server."""
    if problem := find_server_problem(endpoint):
        yield Violation(problem, field, (field,))


_JOB_NAME: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_LABEL_KEY: Final = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
_LABEL_VALUE: Final = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
_ENV_NAME: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"
_DATA_KEY: Final = r"^[-._a-zA-Z0-9]+$"
_IMAGE: Final = r"^[a-zA-Z0-9][-a-zA-Z0-9_.:/@]*$"
_STORAGE: Final = r"^[1-9][0-9]*(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)$"
_CPU: Final = r"^([1-9][0-9]*m|[1-9][0-9]*(\.[0-9]+)?|0\.0*[1-9][0-9]*)$"
_MOUNT_PATH: Final = r"^/[^\x00:]*[^\x00:/]$"
_RELATIVE_PATH: Final = r"^[^/\x00-\x1f\x7f]+(/[^/\x00-\x1f\x7f]+)*$"
_ONE_LINE: Final = r"^[^\x00-\x1f\x7f]+$"
_PACKAGE: Final = (
    r"^[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?(\[[-A-Za-z0-9._, ]+\])?"
    r"( *[<>=!~]=?=?[A-Za-z0-9.*+!_<>=~, ]+)?( *;[A-Za-z0-9_.<>=!~'\"(), ]+)?"
)
_REQUIREMENT: Final = f"{_PACKAGE}$"
_LOCKED: Final = f"{_PACKAGE}( --hash=sha256:[0-9a-f]{{64}})+$"
_TIME: Final = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)$"

PATTERN_MESSAGES: Final[dict[str, str]] = {
    _JOB_NAME: (
        "must be lower-case letters, digits and `-`, beginning with a letter and ending with "
        "a letter or digit"
    ),
    LABEL: (
        "must be lower-case letters, digits and `-`, beginning and ending with a letter or digit"
    ),
    OBJECT_NAME: (
        "must be lower-case letters, digits, `-` and `.`, beginning and ending with a letter "
        "or digit"
    ),
    _LABEL_KEY: "must be a label key such as `disk` or `example.com/disk`",
    _LABEL_VALUE: (
        "must be letters, digits, `-`, `_` and `.`, beginning and ending with a letter or digit"
    ),
    _ENV_NAME: "must be letters, digits and `_`, not beginning with a digit",
    _DATA_KEY: "must be letters, digits, `-`, `_` and `.`",
    _IMAGE: "must be an image reference such as `registry.example.com/team/trainer:1.0`",
    _STORAGE: "must be a whole number with a unit such as `4Gi` or `500Mi`",
    QUANTITY: "must be a whole number with a unit such as `64Mi` or `10G`",
    QUANTITY_OR_NONE: "must be a whole number with a unit such as `64Mi` or `10G`, or none",
    COMPILE_CACHE: "must be auto, off, or an absolute path such as `/cache`",
    _CPU: "must be millicores such as `500m`",
    _MOUNT_PATH: "must be an absolute path such as `/data`, without `:` and without `/` at its end",
    _RELATIVE_PATH: "must be a relative path such as `models/mine.py`",
    _ONE_LINE: "must be a path: one line without control characters",
    NO_NUL: "must not contain a NUL character",
    URL: "must be a URL without spaces such as `s3://BUCKET/PREFIX`",
    SERVER_URL: "must be a URL such as `https://minio.example.com:9000`",
    DIGEST: "must be 64 hexadecimal digits in lower case, as `sha256sum` prints them",
    _REQUIREMENT: "must be a package as pip names it, such as `einops>=0.8`, without a URL",
    _LOCKED: "must be a package with its digests, as `NAME==VERSION --hash=sha256:DIGEST`",
    _TIME: "must be a time such as `2026-05-01T12:00:00Z`",
}

LONGEST_POD_NAME = 63


def jobset_pod_name(job: str, index: object, suffix: str = "abcde") -> str:
    """The name of a pod of a JobSet."""
    return f"{job}-node-0-{index}-{suffix}"


LONGEST_JOB_NAME = LONGEST_POD_NAME - len(jobset_pod_name("", 0))
"""Leaves room for the suffixes of the names of a JobSet's pods. With more nodes less is left."""
JobName = Annotated[str, Field(min_length=1, max_length=LONGEST_JOB_NAME, pattern=_JOB_NAME)]
Label = Annotated[str, Field(min_length=1, max_length=63, pattern=LABEL)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=OBJECT_NAME)]
LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=_LABEL_KEY)]
LabelValue = Annotated[str, Field(max_length=63, pattern=_LABEL_VALUE)]
EnvName = Annotated[str, Field(min_length=1, max_length=256, pattern=_ENV_NAME)]
SecretKeyName = Annotated[str, Field(min_length=1, max_length=253, pattern=_DATA_KEY)]
ImageReference = Annotated[str, Field(min_length=1, max_length=512, pattern=_IMAGE)]
Storage = Annotated[str, Field(max_length=32, pattern=_STORAGE)]
CpuText = Annotated[str, Field(max_length=32, pattern=_CPU)]
MountPath = Annotated[str, Field(max_length=1024, pattern=_MOUNT_PATH)]
FilePath = Annotated[str, Field(min_length=1, max_length=1024, pattern=_RELATIVE_PATH)]
BucketUrl = Annotated[str, Field(max_length=1024, pattern=URL)]
ServerUrl = Annotated[str, Field(max_length=1024, pattern=SERVER_URL)]
FolderPath = Annotated[str, Field(min_length=1, max_length=4096, pattern=_ONE_LINE)]
Time = Annotated[str, Field(max_length=40, pattern=_TIME)]
"""RFC 3339, as Kubernetes writes times."""


_MOST_CORES: Final = 4096
_CORES_OF_GPU: Final = 3
_GIB_OF_GPU: Final = 10
CoreCount = Annotated[float, Field(gt=0, le=_MOST_CORES)]


def _text_of_cores(value: Any) -> Any:
    """`cpu: 2` means `cpu: "2"`, as Kubernetes reads it."""
    if type(value) not in (int, float):
        return value
    if not 0 < value <= _MOST_CORES:
        raise ValueError(f"must be more than 0 and at most {_MOST_CORES}")
    return str(value)


class Resources(ConfigModel):
    """Requests and limits of each pod."""

    cpu: Annotated[
        CpuText, BeforeValidator(_text_of_cores, json_schema_input_type=CoreCount | CpuText)
    ] = Field(
        "1",
        description=(
            "CPU cores of each pod: a number, or millicores such as 500m; with GPUs "
            f"{_CORES_OF_GPU} for each of them unless given."
        ),
    )
    memory: Storage = Field(
        "4Gi",
        description=(
            "Memory of each pod, with a unit such as Gi; includes shared memory; with GPUs "
            f"{_GIB_OF_GPU}Gi for each of them unless given."
        ),
    )
    gpu: int = Field(0, ge=0, le=1024, description="Number of GPUs of each pod.")

    @model_validator(mode="before")
    @classmethod
    def _add_share(cls, given: Any) -> Any:
        """Add what a pod with GPUs needs and the file does not say. It is what the smallest nodes
        with a GPU (4 cores, 15 GiB) have left, so that no job waits for nodes because of it.
        """
        gpus = given.get("gpu") if isinstance(given, dict) else None
        if type(gpus) is not int or gpus < 1:
            return given
        return {"cpu": str(_CORES_OF_GPU * gpus), "memory": f"{_GIB_OF_GPU * gpus}Gi", **given}


class CodeFile(ConfigModel):
    """A key of the ConfigMap with the code, and the file that it becomes."""

    key: SecretKeyName = Field(description="Key in the ConfigMap.")
    path: FilePath = Field(description="Path of the file in the code folder, such as `data/a.py`.")


class CodeSource(UrlSource):
    """The job's own modules or script: a folder next to the job file, a ConfigMap, a folder on a
    claim, or a URL.
    """

    path: FolderPath | None = Field(
        None,
        description=(
            "Path of a folder, relative to the job file; `kdist` sends its files, `kubectl` "
            "cannot: up to 1 MiB in a ConfigMap, more to the claim or bucket of checkpoints."
        ),
    )
    config_map: ObjectName | None = Field(
        None,
        description=(
            "Existing ConfigMap on the cluster, each key of which is a file; not for `kdist run`."
        ),
    )
    claim: ObjectName | None = Field(
        None,
        description="PersistentVolumeClaim that has the code already; not for `kdist run`.",
    )
    sub_path: FilePath | None = Field(
        None, description="Path of the code folder in the claim; its root unless given."
    )
    items: list[CodeFile] = Field(
        [],
        max_length=4096,
        description=(
            "Which keys of the ConfigMap become which files, for files in folders; all keys by "
            "their own names unless given."
        ),
    )

    def _violations(self) -> Iterator[Violation]:
        if [self.path, self.config_map, self.claim, self.url].count(None) != 3:
            raise ValueError("needs exactly one of path, configMap, claim and url")
        yield from super()._violations()
        if self.sub_path is not None and self.claim is None:
            yield Violation("is a path in a claim", "subPath", ("claim", "subPath"))
        if ".." in (self.sub_path or "").split("/"):
            yield Violation("must not contain `..`", "subPath", ("subPath",))
        if self.items and self.config_map is None:
            yield Violation("applies to a ConfigMap: it needs configMap", "items", ("items",))
        for index, each in enumerate(self.items):
            if ".." in each.path.split("/"):
                field = f"items.{index}.path"
                yield Violation("must not contain `..`", field, (field,))

    @model_serializer(mode="wrap")
    def _write(self, handler: SerializerFunctionWrapHandler) -> str | dict[str, Any]:
        """A folder is written as its path, which earlier versions read too."""
        document: dict[str, Any] = handler(self)
        given = {name: value for name, value in document.items() if value}
        return given if self.path is None else self.path


ACCESS_MODE: Final = "ReadWriteMany"
PACKAGES_SIZE: Final = "10Gi"


class Checkpoints(CheckedModel):
    """Where checkpoints are stored: an existing claim, a claim to create, a bucket, or a folder on
    this machine.
    """

    claim: ObjectName | None = Field(None, description="Existing PersistentVolumeClaim.")
    size: Storage | None = Field(
        None, description="Size of a PersistentVolumeClaim to create for the job."
    )
    class_: ObjectName | None = Field(
        None, alias="class", description="StorageClass of the created claim."
    )
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"] | None = Field(
        None,
        description=f"Access mode of the created claim; {ACCESS_MODE} unless given.",
    )
    reclaim_policy: Literal["Retain", "Delete"] | None = Field(
        None,
        description=(
            "What happens to the created claim when the job is deleted; Retain, which keeps the "
            "checkpoints, unless given."
        ),
    )
    path: FolderPath | None = Field(
        None, description="Path of a folder on this machine, for `kdist run`."
    )
    url: BucketUrl | None = Field(
        None,
        description=(
            "Bucket of an object store and a prefix in it, such as s3://BUCKET/PREFIX; also gs:// "
            "and az://."
        ),
    )
    endpoint: ServerUrl | None = Field(
        None,
        description=(
            "Address of a server that stores buckets as S3 does, such as "
            "https://minio.example.com:9000; without it that of the cloud."
        ),
    )
    region: Label | None = Field(None, description=UrlSource.model_fields["region"].description)
    secret: ObjectName | None = Field(
        None,
        description=(
            "Secret on the cluster whose keys are the variables with the bucket's credentials; "
            "without it the pods' own identity is used, that of serviceAccountName."
        ),
    )

    @property
    def in_cluster(self) -> bool:
        """Whether pods can use it: all but a folder of this machine."""
        return self.path is None

    @property
    def bucket(self) -> str | None:
        """The bucket and the prefix as a URL without a slash at its end; None without one."""
        return None if self.url is None else self.url.rstrip("/")

    @property
    def scheme(self) -> str:
        """That of the bucket: `s3`, `gs` or `az`; empty without a bucket."""
        return scheme_of(self.url or "")

    def _violations(self) -> Iterator[Violation]:
        forms = ("claim", "size", "path", "url")
        given = [name for name in forms if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            yield Violation(
                f"needs exactly one of claim, size, path and url, found {found}", "", forms
            )
        if self.size is None:
            for value, name in (
                (self.class_, "class"),
                (self.access_mode, "accessMode"),
                (self.reclaim_policy, "reclaimPolicy"),
            ):
                if value is not None:
                    yield Violation(
                        "applies to a claim that is created for the job: it needs size",
                        name,
                        ("size", name),
                    )
        yield from self._bucket_violations()

    def _bucket_violations(self) -> Iterator[Violation]:
        for name in ("endpoint", "region", "secret"):
            if getattr(self, name) is not None and self.url is None:
                yield Violation("belongs to a bucket: it needs url", name, ("url", name))
        if self.url is not None:
            problem = find_secret(self.url) or ("" if re.search(BUCKET, self.url) else NO_BUCKET)
            if problem:
                yield Violation(problem, "url", ("url",))
        if self.endpoint is not None:
            yield from check_endpoint(self.endpoint)
            if self.scheme == "gs":
                message = "is for s3:// and az://: the buckets of gs:// have one address"
                yield Violation(message, "endpoint", ("url", "endpoint"))
        if self.region is not None and self.scheme in ("gs", "az"):
            yield Violation("is for s3:// only", "region", ("url", "region"))


class SecretKey(ConfigModel):
    """A key of a Secret."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: SecretKeyName = Field(description="Key in the Secret.")


class EnvVar(CheckedModel):
    """One variable of the training's environment."""

    name: EnvName = Field(description="Name of the variable.")
    value: Argument | None = Field(None, description="Value as text; quote numbers.")
    secret: SecretKey | None = Field(
        None,
        description=(
            "Secret with the value on a cluster; `kdist run` takes the value from its own "
            "environment."
        ),
    )

    def _violations(self) -> Iterator[Violation]:
        if (self.value is None) == (self.secret is None):
            yield Violation("needs exactly one of value and secret", "", ("value", "secret"))
        yield from check_variable(self.name)


Requirement = Annotated[str, Field(max_length=512, pattern=_REQUIREMENT)]
LockedPackage = Annotated[str, Field(max_length=65_536, pattern=_LOCKED)]


class Wheels(UrlSource):
    """A folder with wheels."""

    claim: ObjectName | None = Field(None, description="PersistentVolumeClaim with the wheels.")
    path: FilePath | None = Field(
        None, description="Path of their folder in it; its root unless given."
    )

    def _violations(self) -> Iterator[Violation]:
        if (self.claim is None) == (self.url is None):
            yield Violation("needs exactly one of claim and url", "", ("claim", "url"))
        if self.path is not None and self.claim is None:
            yield Violation("is a path in a claim", "path", ("claim", "path"))
        if ".." in (self.path or "").split("/"):
            yield Violation("must not contain `..`", "path", ("path",))
        yield from super()._violations()


class PackageCache(CheckedModel):
    """Where pods find what others have installed: a claim, or a folder of each node."""

    claim: ObjectName | None = Field(
        None, description="PersistentVolumeClaim that all pods can mount and user 65532 can write."
    )
    host_path: MountPath | None = Field(
        None,
        description="Existing folder of each node; Pod Security `baseline` forbids it.",
    )

    def _violations(self) -> Iterator[Violation]:
        if (self.claim is None) == (self.host_path is None):
            yield Violation("needs exactly one of claim and hostPath", "", ("claim", "hostPath"))
        if ".." in (self.host_path or "").split("/"):
            yield Violation("must not contain `..`", "hostPath", ("hostPath",))


class Install(CheckedModel):
    """What the pods install before they start, into an image with Python and torch."""

    packages: list[Requirement] = Field(
        [],
        max_length=256,
        description="Packages as pip names them, such as einops>=0.8; the trainer comes by itself.",
    )
    index: ServerUrl | None = Field(
        None,
        description=(
            "Package index such as https://pypi.example.com/simple; unless given, that of pip's "
            "settings in the image or of PIP_INDEX_URL in env, else PyPI."
        ),
    )
    wheels: Wheels | None = Field(
        None,
        description=(
            "Folder with wheels, in a claim or at a URL: the only source of packages unless index "
            "is given."
        ),
    )
    size: Bytes | None = Field(
        None,
        description=f"Most bytes that all packages take on a node; {PACKAGES_SIZE} unless given.",
    )
    cache: PackageCache | None = Field(
        None,
        description="Where pods keep what they install, so that others need not install it.",
    )
    lock: list[LockedPackage] = Field(
        [],
        max_length=1024,
        description=(
            "Versions and digests of all packages, which `kdist apply` writes where it reaches the "
            "index; no others are installed then."
        ),
    )

    def _violations(self) -> Iterator[Violation]:
        if self.index is not None:
            yield from check_endpoint(self.index, "index")
        if self.lock and self.wheels is not None and self.wheels.url is not None:
            yield Violation(
                "cannot be used with wheels.url: what fetches the wheels is not locked",
                "lock",
                ("lock", "wheels.url"),
            )


class Toleration(CheckedModel):
    """A node taint that the pods tolerate, as in a pod's `tolerations`."""

    key: LabelKey | None = Field(
        None, description="Key of the taint; without it all taints are tolerated."
    )
    operator: Literal["Equal", "Exists"] = Field(
        "Equal", description=("Equal compares the value of the taint, Exists matches any value.")
    )
    value: LabelValue | None = Field(None, description="Value of the taint, for Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="Effect of the taint; without it all effects are tolerated."
    )
    toleration_seconds: Seconds | None = Field(
        None, description="Seconds before a NoExecute taint evicts the pod."
    )

    def _violations(self) -> Iterator[Violation]:
        if self.key is None and self.operator != "Exists":
            yield Violation("must be Exists if there is no key", "operator", ("key", "operator"))
        if self.operator == "Exists" and self.value is not None:
            yield Violation(
                "cannot be used with the operator Exists", "value", ("operator", "value")
            )


NO_SOURCE: Final = "needs a claim, a url, or a path on this machine"
TWO_SOURCES: Final = "excludes claim; keep one"


class Data(UrlSource):
    """One data set that every rank can read."""

    claim: ObjectName | None = Field(
        None, description="PersistentVolumeClaim with the data on a cluster."
    )
    path: FolderPath | None = Field(
        None, description="Path of the same data on this machine, for `kdist run`."
    )
    mount_path: MountPath = Field(description="Path at which the data is mounted on a cluster.")
    access: Literal["ReadOnly", "ReadWrite"] = Field(
        "ReadOnly", description="Whether the ranks may write to the claim: ReadOnly or ReadWrite."
    )

    def _violations(self) -> Iterator[Violation]:
        if self.claim is None and self.path is None and self.url is None:
            yield Violation(NO_SOURCE, "", ("claim", "url", "path"))
        if self.claim is not None and self.url is not None:
            yield Violation(TWO_SOURCES, "url", ("claim", "url"))
        if self.access == "ReadWrite" and self.claim is None:
            yield Violation("is for a claim", "access", ("claim", "access"))
        yield from check_mount(self.mount_path)
        yield from super()._violations()

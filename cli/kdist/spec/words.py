"""The kinds of text that a job.yaml holds: names, labels, quantities, paths; each with its pattern and its sentence.

A pattern stays in the JSON Schema, so editors check it too; `SAYS` is what a person is told instead of the pattern.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from kdist_trainer.config import QUANTITY

_JOB_NAME: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_LABEL: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_SUBDOMAIN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
_LABEL_KEY: Final = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
_LABEL_VALUE: Final = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
_ENV_NAME: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"
_DATA_KEY: Final = r"^[-._a-zA-Z0-9]+$"
_IMAGE: Final = r"^[a-zA-Z0-9][-a-zA-Z0-9_.:/@]*$"
_STORAGE: Final = r"^[1-9][0-9]*(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)$"
_CPU: Final = r"^([1-9][0-9]*m|[0-9]+(\.[0-9]+)?)$"
_MOUNT_PATH: Final = r"^/[^\x00:]*[^\x00:/]$"
_ONE_LINE: Final = r"^[^\x00-\x1f\x7f]+$"
_NO_NUL: Final = r"^[^\x00]*$"

SAYS: Final[dict[str, str]] = {
    _JOB_NAME: "must be lower-case letters, digits and `-`, beginning with a letter and ending with a letter or digit",
    _LABEL: "must be lower-case letters, digits and `-`, beginning and ending with a letter or digit",
    _SUBDOMAIN: "must be lower-case letters, digits, `-` and `.`, beginning and ending with a letter or digit",
    _LABEL_KEY: "must be a label key such as `disk` or `example.com/disk`",
    _LABEL_VALUE: "must be letters, digits, `-`, `_` and `.`, beginning and ending with a letter or digit",
    _ENV_NAME: "must be letters, digits and `_`, not beginning with a digit",
    _DATA_KEY: "must be letters, digits, `-`, `_` and `.`",
    _IMAGE: "must be an image reference such as `registry.example.com/team/trainer:1.0`",
    _STORAGE: "must be a whole number with a unit such as `4Gi` or `500Mi`",
    QUANTITY: "must be a whole number with a unit such as `64Mi` or `10G`",
    _CPU: "must be millicores such as `500m`",
    _MOUNT_PATH: "must be an absolute path such as `/data`, without `:` and without `/` at its end",
    _ONE_LINE: "must be a path: one line without control characters",
    _NO_NUL: "must not hold a NUL character",
}

# 50 characters leave room for what backends append to make the names of pods, which end at 63.
JobName = Annotated[str, Field(min_length=1, max_length=50, pattern=_JOB_NAME)]
Label = Annotated[str, Field(min_length=1, max_length=63, pattern=_LABEL)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=_SUBDOMAIN)]
LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=_LABEL_KEY)]
LabelValue = Annotated[str, Field(max_length=63, pattern=_LABEL_VALUE)]
EnvName = Annotated[str, Field(min_length=1, max_length=256, pattern=_ENV_NAME)]
EnvValue = Annotated[str, Field(max_length=32_768, pattern=_NO_NUL)]
SecretKeyName = Annotated[str, Field(min_length=1, max_length=253, pattern=_DATA_KEY)]
ImageReference = Annotated[str, Field(min_length=1, max_length=512, pattern=_IMAGE)]
Storage = Annotated[str, Field(max_length=32, pattern=_STORAGE)]
CpuText = Annotated[str, Field(max_length=32, pattern=_CPU)]
MountPath = Annotated[str, Field(max_length=1024, pattern=_MOUNT_PATH)]
FolderPath = Annotated[str, Field(min_length=1, max_length=4096, pattern=_ONE_LINE)]

"""What `kdist init` writes: job files of a few fields with values, each below a comment with its
description from the model, and the code that they run, with its test.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Any, Final

from kdist import __version__
from kdist.spec import reference
from kdist.spec.training_job import job_document
from kdist_trainer.formats.json_text import encode_json

_WIDTH = 100
_CODE: Final = Path(__file__).parent.parent / "scaffolds"
CODE_FOLDER: Final = "src"
"""Where the code of a template is, next to its job file."""


class _Optional:
    """A field that is written as a comment, for the user to enable."""

    def __init__(self, value: Any) -> None:
        self.value = value


_CLUSTER: Final = {
    "image": _Optional(f"registry.example.com/team/kdist-trainer:{__version__}"),
    "resources": _Optional({"cpu": 2, "memory": "4Gi", "gpu": 1}),
    "checkpoints": _Optional({"claim": "checkpoints"}),
}
_DATA: Final = _Optional([{"claim": "my-data", "path": "./data", "mountPath": "/data"}])

TEMPLATES: Final[dict[str, dict[str, Any]]] = {
    "digits": job_document(
        "digits",
        nodes={"min": 1, "max": 2},
        procsPerNode=1,
        **_CLUSTER,
        train={
            "workload": "digits",
            "epochs": 40,
            "globalBatch": 128,
            "virtualShards": 4,
            "optimizer": {"name": "adamw", "learningRate": 0.002},
            "schedule": {"name": "cosine", "warmupSteps": 20},
            "checkpoint": {"every": {"steps": 50}, "keep": 3},
        },
    ),
    "gpt": job_document(
        "gpt",
        nodes={"min": 1, "max": 2},
        procsPerNode="auto",
        **_CLUSTER,
        train={
            "workload": "gpt",
            "steps": 500,
            "globalBatch": 32,
            "microBatch": 8,
            "precision": "fp32",
            "clipGradNorm": 1.0,
            "optimizer": {"name": "adamw", "learningRate": 0.001, "weightDecay": 0.1},
            "schedule": {"name": "cosine", "warmupSteps": 50, "finalRatio": 0.1},
            "checkpoint": {"every": {"seconds": 60}, "keep": 3},
        },
    ),
    "workload": job_document(
        "workload",
        nodes={"min": 1, "max": 2},
        procsPerNode="auto",
        code=CODE_FOLDER,
        data=_DATA,
        **_CLUSTER,
        train={
            "workload": "workload:Classifier",
            "options": {"width": 64},
            "epochs": 10,
            "globalBatch": 64,
            "optimizer": {"name": "adamw", "learningRate": 0.001},
        },
    ),
} | {
    name: job_document(
        name,
        nodes=2,
        procsPerNode="auto",
        code=CODE_FOLDER,
        data=_DATA,
        **_CLUSTER,
        env=_Optional([{"name": "WANDB_MODE", "value": "offline"}]),
        script={"path": "train.py", "args": args},
    )
    for name, args in (
        ("script", ["--epochs", "10"]),
        ("huggingface", ["--steps", "100"]),
        ("lightning", ["--epochs", "10"]),
    )
}


def read_code(template: str) -> dict[str, str]:
    """The files that a template's job needs next to its job file: relative path to text."""
    files = sorted((_CODE / template).glob("*.py"))
    return {f"{CODE_FOLDER}/{file.name}": file.read_text(encoding="utf-8") for file in files}


def write(template: str, *, schema: str = reference.SCHEMA_ID) -> str:
    """Render a template of `TEMPLATES` as the text of a job file, which names the URL or path of
    the JSON Schema by which editors check it. Raises `KeyError` if there is no such template.
    """
    head = [
        f"# yaml-language-server: $schema={schema}",
        "#",
        (
            "# A training job. `kdist validate` checks this file, `kdist run` trains on this "
            "machine, and"
        ),
        "# `kdist explain spec` describes all other fields, with their defaults.",
        "# Lines that start with `#` and no space are optional fields: remove the `#` to use them.",
    ]
    return "\n".join([*head, *_section(TEMPLATES[template], reference.root(), 0)]) + "\n"


def _section(values: dict[str, Any], section: reference.Field, depth: int) -> list[str]:
    lines: list[str] = []
    indent = "  " * depth
    for name, value in values.items():
        field = section.children[name]
        mark, plain = ("#", value.value) if isinstance(value, _Optional) else ("", value)
        if depth:
            lines += wrap(
                field.description,
                _WIDTH,
                initial_indent=f"{indent}# ",
                subsequent_indent=f"{indent}# ",
            )
        if isinstance(plain, dict) and not mark and (depth == 0 or name == "train"):
            lines += [f"{indent}{name}:", *_section(plain, field, depth + 1)]
        else:
            lines.append(f"{indent}{mark}{name}: {_flow(plain)}")
    return lines


def _flow(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(inner) for inner in value) + "]"
    if (
        isinstance(value, str)
        and value.replace("-", "a").replace(".", "a").replace("/", "a").isalnum()
        and value[0].isalpha()
    ):
        return value
    return encode_json(value)

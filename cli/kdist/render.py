"""A `TrainingJob` becomes Kubernetes objects. Pure: the same job gives the same bytes; no clock, network or randomness.

Templates in `manifests/` write every value as JSON (`as_json`, Jinja's `finalize`), which is also YAML, so that no value can add
a key, a line or an object; what comes out is parsed back, and only then is it a `Manifest`. A template may use nothing undefined.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml

from kdist import manifest
from kdist.errors import KdistError
from kdist.manifest import Manifest
from kdist.spec import TrainingJob

TEMPLATES = Path(__file__).parent / "manifests"

# Characters that JSON leaves bare and YAML does not take inside a quoted string, or folds as line breaks.
_BARE_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")


def as_json(value: object) -> str:
    """`value` as JSON that every YAML reader understands in the same way; Jinja's `finalize`.

    Raises `ValueError` for what JSON cannot say (NaN, infinity), `TypeError` for other kinds of objects, and
    `jinja2.UndefinedError` for a name that the template has not been given.
    """
    if isinstance(value, jinja2.Undefined):
        return str(value)  # StrictUndefined raises here
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{as_json(str(key))}: {as_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_json(item) for item in value) + "]"
    text = json.dumps(
        value, ensure_ascii=False, allow_nan=False
    )  # with ASCII only, 😀 would be two surrogates, which YAML refuses
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")  # to YAML 1.1, 1e-05 is a word
    return _BARE_IN_JSON.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        finalize=as_json,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - the output is YAML; as_json is what keeps values in their place
    )
    environment.globals.clear()  # Jinja brings a function `namespace`, which must not stand in for a value that is missing
    return environment


def render_template(name: str, values: Mapping[str, Any]) -> list[Manifest]:
    """The objects that the template `name` describes. Raises `KdistError` where it gives anything but whole objects."""
    try:
        text = _environment().get_template(name).render(values)
        documents = [document for document in yaml.load_all(text, Loader=_Loader) if document is not None]
        return [Manifest(document) for document in documents]
    except (jinja2.TemplateError, yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        raise KdistError(f"manifests/{name} cannot be rendered: {error}") from error


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def render(job: TrainingJob) -> list[Manifest]:
    """All objects of the job, in the order of sending."""
    config = job.to_train_config()
    values = {
        "name": job.metadata.name,
        "namespace": job.metadata.namespace,
        "labels": {**job.metadata.labels, **_labels(job)},
        "annotations": job.metadata.annotations,
        "notes": "\n".join(_notes(job)) + "\n",
        "train_json": config.to_json() + "\n",
    }
    return manifest.sort(render_template("configmap.yaml.j2", values))


def _labels(job: TrainingJob) -> dict[str, str]:
    """What kdist finds its own objects by."""
    return {
        "app.kubernetes.io/name": "kdist",
        "app.kubernetes.io/instance": job.metadata.name,
        "app.kubernetes.io/component": "training",
        "app.kubernetes.io/managed-by": "kdist",
        "kdist.dev/job": job.metadata.name,
    }


def _notes(job: TrainingJob) -> Iterable[str]:
    """What somebody who comes upon the object in a cluster should know."""
    yield f"The training job {job.metadata.name}, rendered by kdist from its job.yaml; change it there and send it again."
    yield "train.json is read by every agent and every rank of the job: the same bytes everywhere, every default written out."


def read_train_json(manifests: Iterable[Manifest]) -> str:
    """Text of `train.json` as the rendered ConfigMap carries it. Raises `KdistError` if no object does."""
    for each in manifests:
        if each.kind == "ConfigMap" and "train.json" in each.document.get("data", {}):
            return str(each.document["data"]["train.json"])
    raise KdistError("the rendered objects carry no train.json")

"""The fields of a running job's objects that cannot change, or must not, while it runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kdist.job.cluster.job import ClusterJob, is_workload
from kdist.manifest import Manifest
from kdist_trainer.json_text import encode_json
from kdist_trainer.untrusted_text import parse_json


def keep_immutable(
    target: ClusterJob, manifests: Iterable[Manifest], workload: Mapping[str, Any]
) -> list[Manifest]:
    """Adapt rendered objects to a job that is running: fields of its workload that cannot change
    keep their values, and so does the configuration of its agents.

    The ConfigMap with `train.json` stays the one that the workload mounts: the job may have been
    applied by another version of kdist, with other fields.

    Args:
        target: the job.
        manifests: its objects as rendered now.
        workload: its workload as it is in the cluster.
    """
    prefix = f"{target.name}-train-"
    mounted = {
        str(each["name"])
        for each in _find_all(workload, "configMap")
        if str(each.get("name")).startswith(prefix)
    }
    found = []
    for one in manifests:
        document = one.document
        if is_workload(target, one):
            document = target.backend.keep(document, workload)
            if len(mounted) == 1:
                (name,) = mounted
                text = re.sub(rf'"{prefix}[0-9a-f]+"', f'"{name}"', encode_json(document))
                document = parse_json(text)
        elif one.kind == "ConfigMap" and one.name.startswith(prefix):
            continue
        found.append(Manifest(document))
    return found


def _find_all(document: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Every object under the key `key`, at any depth."""
    if isinstance(document, Mapping):
        for name, value in document.items():
            if name == key and isinstance(value, Mapping):
                yield value
            yield from _find_all(value, key)
    elif isinstance(document, list):
        for value in document:
            yield from _find_all(value, key)

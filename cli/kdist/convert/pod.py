"""A pod template as fields of the job: what kdist has fields for, and the rest in `podTemplate`."""

from __future__ import annotations

import re
from math import ceil
from typing import Any, Final

from kdist import backends
from kdist.convert.draft import POD, TRAINER, JobDraft
from kdist.convert.launch import LaunchReader
from kdist.convert.values import InputValue
from kdist.manifest import QUEUE_LABEL, own_labels
from kdist.spec.models import check_mount, check_variable
from kdist.spec.validators import OWN_FOLDERS, OWN_KEYS, OWN_VOLUMES
from kdist.units import parse_quantity
from kdist_trainer.formats import METRICS_PORT

_OWN_KEYS: Final = (
    *own_labels(""),
    "kubectl.kubernetes.io/last-applied-configuration",
    "kubectl.kubernetes.io/default-container",
)
_FIELDS: Final = {
    "priorityClassName": "priorityClass",
    "serviceAccount": "serviceAccountName",
    **{name: name for name in ("serviceAccountName", "terminationGracePeriodSeconds")},
}
_PROBE: Final = "kdist's own probe asks the agent, which watches the ranks"
_NAMES: Final = "the pods are named by the workload"
LEFT: Final = {
    "hostname": _NAMES,
    "livenessProbe": _PROBE,
    "readinessProbe": _PROBE,
    "restartPolicy": "agents restart the ranks, and a permanent failure ends the job",
    "startupProbe": _PROBE,
    "subdomain": _NAMES,
    "terminationMessagePath": "the agent writes its exit record",
    "terminationMessagePolicy": "the agent writes its exit record",
}
"""Fields of a pod or of its container that kdist sets itself."""
_LISTS: Final = (
    *("containers", "imagePullSecrets", "initContainers", "nodeSelector", "tolerations"),
)
_EMPTY_MOUNTS: Final = {"/dev/shm": "shm", "/tmp": "tmp"}  # noqa: S108 - in the pod
_TRAINING: Final = ("trainer", *sorted({backends.get(each).container for each in backends.NAMES}))
"""What the kinds of workloads call the training's container."""
_EXPANDED = re.compile(r"\$[($]|[-.]$")
"""A value that Kubernetes expands, which `podTemplate` keeps."""
_GPU: Final = "nvidia.com/gpu"


def convert_labels(draft: JobDraft, metadata: InputValue, *path: str) -> None:
    """Labels and annotations of the workload, or of its pods."""
    for kind in ("labels", "annotations"):
        for each in metadata.get(kind).below():
            if each.key == QUEUE_LABEL:
                draft.set("queue", each.text, each)
            elif each.key in _OWN_KEYS or each.key.startswith(OWN_KEYS):
                each.leave("is written by kdist, or by kubectl, itself", needless=True)
            else:
                value = each.value()
                plain = not isinstance(value, dict | list)
                draft.set((*path, kind, each.key), each.text if plain else value, each)


def find_container(pod: InputValue) -> InputValue:
    """The training's container of a pod: by its name, by its GPUs, or else the first."""
    found = pod.get("containers").below()
    named = [each for each in found if each.get("name").text in _TRAINING]
    gpus = [each for each in found if each.get("resources.limits").entry(_GPU)]
    return next(iter([*named, *gpus, *found]), pod.get("containers.trainer"))


class PodConverter:
    """Converts one pod template. A TrainJob's trainer comes before the container's own fields.
    `lost_volumes` are those that each pod has of its own, which cannot be carried over.
    """

    def __init__(
        self, draft: JobDraft, pod: InputValue, trainer: InputValue, lost_volumes: list[str]
    ) -> None:
        self._draft = draft
        self._pod = pod
        self._trainer = trainer
        self._lost = lost_volumes
        self._container = find_container(pod)
        volumes = pod.get("volumes").below()
        self._volumes = {name: each for each in volumes if (name := each.get("name").text)}
        for each in volumes:
            if not each.get("name").text:
                each.leave("is no volume: it has no name")
        self._mounted = set[str]()  # volumes that podTemplate needs
        self._placed = set[str]()  # volumes that a field of the job has

    def convert(self, nodes: int, default_procs: int | str) -> None:
        """Convert all of it; the arguments are those of `LaunchReader`."""
        container, draft = self._container, self._draft
        container.get("name").keep("the container trainer")
        image, command, args = (self._choose(name) for name in ("image", "command", "args"))
        where = image or container
        if image:
            draft.set("image", image.text, image)
        where.change("the image must have kdist-trainer in it, and start its agent")
        contexts = [each.get("securityContext") for each in (self._pod, container)]
        if not any(each.get("runAsUser") or each.get("runAsNonRoot") for each in contexts):
            where.change(
                "pods do not run as root, and the image's files are read-only: a script writes to "
                "/tmp or to a volume; podTemplate can loosen this"
            )
        variables = [*self._trainer.get("env").below(), *container.get("env").below()]
        known = {each.get("name").text: each.get("value").text for each in reversed(variables)}
        known = {name: value for name, value in known.items() if name and value}
        words = [*command.below(), *args.below()]
        reader = LaunchReader(draft, known, nodes, default_procs)
        reader.read(words, command or args or container, entrypoint=not command)
        self._convert_variables(variables)
        self._convert_resources(self._choose("resources", "resourcesPerNode"))
        for each in container.get("volumeMounts").below():
            self._convert_mount(each)
        for each in container.get("ports").below():
            names = each.get("name").text, each.get("containerPort").text
            if "metrics" in names or str(METRICS_PORT) in names:
                each.leave("kdist's own port has this name or number")
            else:
                draft.add((*TRAINER, "ports"), each.value(), each)
        done = ("name", "image", "command", "args", "env", "resources", "volumeMounts", "ports")
        is_ready = draft.get("backend") != "statefulset"  # which has a probe of kdist's
        for each in container.below():
            kept = each.key not in LEFT or (each.key == "readinessProbe" and is_ready)
            if each and kept and each.key not in done:
                draft.set((*TRAINER, each.key), each.value(), each)
        self._convert_pod()
        self._secure()

    def _choose(self, name: str, of_trainer: str = "") -> InputValue:
        """A field of the TrainJob, or else of the container."""
        own = self._trainer.get(of_trainer or name)
        if own:
            self._container.get(name).leave("the TrainJob replaces it")
        return own or self._container.get(name)

    def _convert_variables(self, variables: list[InputValue]) -> None:
        taken = {each["name"] for each in self._draft.get("env") or ()}
        for each in variables:
            name, value = each.get("name").text, each.get("value")
            secret = each.get("valueFrom.secretKeyRef")
            if name in taken:
                each.leave("the variable is set already, by the command or by the TrainJob")
            elif any(check_variable(name)):
                each.leave("kdist sets it for each rank", needless=True)
            elif secret and not secret.get("optional"):
                found = {part: secret.get(part).text for part in ("name", "key")}
                origins = each.get("name"), secret.get("name"), secret.get("key")
                self._draft.add("env", {"name": name, "secret": found}, *origins)
            elif each.get("valueFrom") or value.below() or _EXPANDED.search(f"{name} {value.text}"):
                self._draft.add((*TRAINER, "env"), each.value(), each)
            else:
                found = {"name": name, "value": value.text}
                self._draft.add("env", found, each.get("name"), value)
            taken.add(name)

    def _convert_resources(self, resources: InputValue) -> None:
        both, of_pod = ("limits", "requests"), (*TRAINER, "resources")
        for name in ("cpu", "memory"):
            limit, request = (resources.get(each).entry(name) for each in both)
            given = limit or request
            if not given:
                resources.change(f"has no {name}: the default of spec.resources.{name} applies")
                continue
            text = given.text if name == "cpu" else _whole_bytes(given)
            self._draft.set(f"resources.{name}", text, given)
            if limit and request and limit.text == request.text:
                request.keep(f"spec.resources.{name}")
            elif limit and request:
                self._draft.set((*of_pod, "requests", name), request.value(), request)
            elif request:
                self._draft.set((*of_pod, "limits", name), None)
                request.change(f"there is no limit of {name}: podTemplate removes kdist's")
        for part in resources.below():
            if part.key not in both:
                self._draft.set((*of_pod, part.key), part.value(), part)
            for each in part.below() if part.key in both else ():
                if each.key == _GPU and str(self._draft.get("resources.gpu")) == each.text:
                    each.keep("spec.resources.gpu")
                elif each.key == _GPU:
                    count = each.number if each.text.isdigit() else each.text
                    self._draft.set("resources.gpu", count, each)
                elif each.key not in ("cpu", "memory"):
                    self._draft.set((*of_pod, part.key, each.key), each.value(), each)

    def _convert_mount(self, mount: InputValue) -> None:
        name, path = mount.get("name").text, mount.get("mountPath").text.rstrip("/")
        volume = self._volumes.get(name)
        if volume is None:
            reason = "each pod has a claim of its own" if name in self._lost else "it is absent"
            mount.leave(f"the volume {name} is not carried over: {reason}")
            return
        claim, empty = volume.get("persistentVolumeClaim"), volume.get("emptyDir")
        flags = mount.get("readOnly"), claim.get("readOnly")
        is_readonly = any(each.text == "true" for each in flags)
        is_plain = {each.key for each in mount.below()} <= {"name", "mountPath", "readOnly"}
        found = {"claim": claim.get("claimName").text}
        origins = claim.get("claimName"), claim.get("readOnly"), volume.get("name"), mount
        if empty and path in _EMPTY_MOUNTS:
            for each in (mount, volume):
                each.keep(f"kdist's own volume at {path}")
            if size := empty.get("sizeLimit"):
                own = {"name": _EMPTY_MOUNTS[path], "emptyDir": {"sizeLimit": size.value()}}
                self._draft.add((*POD, "volumes"), own, size)
            self._placed.add(name)
        elif path == "/checkpoints" and claim and is_plain and not is_readonly:
            self._draft.set("checkpoints", found, *origins)
            self._placed.add(name)
        elif path in OWN_FOLDERS:
            mount.leave(f"kdist mounts a volume of its own at {path}")
            volume.leave("its mount is left out")
            self._placed.add(name)
        elif claim and is_plain and is_readonly and not any(check_mount(path)):
            self._draft.add("data", {**found, "mountPath": path}, *origins)
            self._placed.add(name)
        else:
            self._mounted.add(name)
            value = {**mount.value(), "name": _volume_name(name)}
            self._draft.add((*TRAINER, "volumeMounts"), value, mount)

    def _convert_pod(self) -> None:
        draft = self._draft
        for each in self._pod.below():
            if each.key in _FIELDS and each:
                draft.set(_FIELDS[each.key], each.value(), each)
            elif each.key not in (*_LISTS, *LEFT, "volumes") and each:
                draft.set((*POD, each.key), each.value(), each)
                if each.key == "hostNetwork" and each.value():
                    each.change(f"a node has room for one pod of kdist, by its port {METRICS_PORT}")
            for item in each.below() if each.key in _LISTS else ():
                if each.key == "tolerations":
                    draft.add(each.key, item.value(), item)
                elif each.key == "imagePullSecrets":
                    draft.add(each.key, item.get("name").text, item.get("name"))
                elif each.key == "nodeSelector":
                    draft.set(("spec", each.key, item.key), item.text, item)
                elif item.path != self._container.path and item.get("name"):
                    draft.add((*POD, each.key), self._rename(item.value()), item)
        for name, volume in self._volumes.items():
            if name in self._mounted or (name and name not in self._placed):
                value = {**volume.value(), "name": _volume_name(name)}
                draft.add((*POD, "volumes"), value, volume)

    def _rename(self, container: dict[str, Any]) -> dict[str, Any]:
        """A further container, with the names that it and its volumes have in the job."""
        mounts = container.get("volumeMounts")
        for mount in mounts if isinstance(mounts, list) else ():
            if isinstance(mount, dict) and isinstance(name := mount.get("name"), str):
                self._mounted.add(name)
                mount["name"] = _volume_name(name)
        suffix = "-sidecar" if container["name"] in _TRAINING else ""
        return {**container, "name": f"{container['name']}{suffix}"}

    def _secure(self) -> None:
        """Take back of kdist's restrictions what the template's own ones contradict."""
        own, pod = (*TRAINER, "securityContext"), (*POD, "securityContext")
        contexts = (self._draft.get(own), self._draft.get(pod))
        mine, of_pod = (each if isinstance(each, dict) else {} for each in contexts)
        if 0 in (mine.get("runAsUser"), of_pod.get("runAsUser")):
            self._draft.set((*own, "runAsNonRoot"), False)
            if of_pod is contexts[1] or contexts[1] is None:
                self._draft.set((*pod, "runAsNonRoot"), False)
        if mine.get("privileged") or "SYS_ADMIN" in str(mine.get("capabilities")):
            self._draft.set((*own, "allowPrivilegeEscalation"), True)


def _volume_name(name: str) -> str:
    """The name of a volume in the job, which none of kdist's own has."""
    return f"{name}-volume" if name in OWN_VOLUMES or name.startswith("data-") else name


def _whole_bytes(value: InputValue) -> str:
    """A quantity of bytes as job.yaml writes it, a whole number with a unit; the text itself if it
    is that already, or no quantity.
    """
    number = parse_quantity(value.text)
    if re.fullmatch("[1-9][0-9]*[kKMGTP]i?", value.text) or not number or number > 2**60:
        return value.text
    size, unit = (2**20, "Mi") if number % 2**20 == 0 else (2**10, "Ki")
    if number % size:
        value.change(f"is rounded up to {ceil(number / size)}{unit}")
    return f"{ceil(number / size)}{unit}"

"""Volumes that are still attached to a node that is gone, and how long that keeps the new pods from
starting.

Kubernetes detaches a volume once the kubelet has unmounted it, or by force some minutes after the
pod there has ended. A volume that several nodes may mount keeps nobody waiting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kdist.status import documents
from kdist.status.documents import Document
from kdist.units import seconds

FORCE_DETACH_SECONDS: Final = 360.0
"""After how long Kubernetes detaches a volume by force (`maxWaitForUnmountDuration`)."""
_SINGLE = ("ReadWriteOnce", "ReadWriteOncePod")
_REASON, _WORDS = "FailedAttachVolume", "Multi-Attach error"
_VOLUME = re.compile(r'for volume "(?P<name>[^"]+)"')


@dataclass(frozen=True)
class HeldVolume:
    """A volume that one node at a time can mount, and which is attached to another one than that of
    the pod which needs it.

    Attributes:
        volume: its name.
        claim: name of its claim; empty if unknown.
        node: the node to which it is attached; empty if unknown.
        pod: name of the pod that waits for it; empty if none does yet.
        since: since when it waits, in unix seconds; None if unknown.
    """

    volume: str
    claim: str = ""
    node: str = ""
    pod: str = ""
    since: float | None = None

    def explain(self, now: float | None = None) -> str:
        """A sentence about what waits, and for how long; `now` is in unix seconds."""
        what = f"claim {self.claim}" if self.claim else f"volume {self.volume}"
        where = f"node {self.node}" if self.node else "another node"
        waits = f"{self.pod} waits: " if self.pod else ""
        limit = f"{seconds(FORCE_DETACH_SECONDS)} min after the pod there has ended"
        if now is not None and self.since is not None:
            left = max(0.0, FORCE_DETACH_SECONDS - (now - self.since))
            limit += f", which is in {seconds(left)} at most" if left else ", which is now"
        return f"{waits}{what} is attached to {where}; Kubernetes detaches it by force {limit}"


def find_held_volumes(
    claims: Mapping[str, Document], attachments: Iterable[Document], *, node: str
) -> list[HeldVolume]:
    """Find the volumes of these claims that only one node can mount, and that are attached to a
    node.

    Args:
        claims: claims by name.
        attachments: VolumeAttachments of the cluster.
        node: the node.
    """
    attached = {
        documents.text(each, "spec", "source", "persistentVolumeName")
        for each in attachments
        if documents.text(each, "spec", "nodeName") == node
    } - {""}
    found = []
    for name, claim in claims.items():
        modes = documents.texts(claim, "spec", "accessModes")
        volume = documents.text(claim, "spec", "volumeName")
        if volume in attached and modes and all(mode in _SINGLE for mode in modes):
            found.append(HeldVolume(volume, name, node))
    return found


def find_waiting_pods(events: Iterable[Document], pods: Iterable[str]) -> list[HeldVolume]:
    """Find the pods that wait for a volume which is attached elsewhere, by their events: for those
    who may not read VolumeAttachments.

    Args:
        events: events of the pods' namespace.
        pods: names of pods that do not run yet.
    """
    names, found = set(pods), {}
    for event in events:
        pod = documents.text(event, "involvedObject", "name")
        message = documents.text(event, "message")
        volume = _VOLUME.search(message)
        if (
            pod in names
            and documents.text(event, "reason") == _REASON
            and _WORDS in message
            and volume is not None
        ):
            since = documents.moment(event, "firstTimestamp")
            since = documents.moment(event, "eventTime") if since is None else since
            found[pod, volume["name"]] = HeldVolume(volume["name"], pod=pod, since=since)
    return list(found.values())

"""Volumes that are still attached to a node that is gone, and how long that keeps pods elsewhere
from starting.

Kubernetes detaches a volume when the kubelet has unmounted it, or by force some minutes after the
pod has ended. A volume of several nodes is not attached in this way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kdist.status import documents
from kdist.status.documents import Document
from kdist.units import seconds

FORCE_DETACH_SECONDS: Final = 360.0
"""After how long Kubernetes detaches a volume by force (`maxWaitForUnmountDuration`)."""
MULTI_ATTACH: Final = "FailedAttachVolume"
"""Reason of the event of a pod that waits for a volume."""
_SINGLE = ("ReadWriteOnce", "ReadWriteOncePod")


@dataclass(frozen=True)
class HeldVolume:
    """A volume that one node at a time can mount, and which is attached to one.

    Attributes:
        claim: name of its claim.
        volume: its name.
        node: the node.
    """

    claim: str
    volume: str
    node: str

    def explain(self, *, waiting: float | None = None) -> str:
        """A sentence about what it keeps waiting, and for how long.

        Args:
            waiting: seconds since the pod on the node has ended; None if it has not yet, or it is
                unknown.
        """
        held = f"claim {self.claim} is attached to node {self.node}, and only one node can mount it"
        if waiting is None:
            limit = seconds(FORCE_DETACH_SECONDS)
            return (
                f"{held}: Kubernetes detaches it by force {limit} minutes after its pod has ended"
            )
        left = max(0.0, FORCE_DETACH_SECONDS - waiting)
        return f"{held}: Kubernetes detaches it by force in about {seconds(left)} minutes"


def find_held_volumes(
    claims: Mapping[str, Document], attachments: Iterable[Document], *, node: str
) -> list[HeldVolume]:
    """Find the volumes of these claims that are attached to a node and cannot be mounted elsewhere.

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
            found.append(HeldVolume(name, volume, node))
    return found

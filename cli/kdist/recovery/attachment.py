"""Volumes that are still attached to a node that is gone, and how long that keeps the new pods from
starting.

Kubernetes detaches a volume once the kubelet has unmounted it, or by force some minutes after the
pod there has ended. A volume that several nodes may mount keeps nobody waiting.
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
_SINGLE = ("ReadWriteOnce", "ReadWriteOncePod")


@dataclass(frozen=True)
class HeldVolume:
    """A volume that one node at a time can mount, and which is attached to a node that is gone.

    Attributes:
        volume: its name.
        claim: name of its claim.
        node: the node to which it is attached.
    """

    volume: str
    claim: str
    node: str

    def explain(self) -> str:
        """A sentence about how long pods on other nodes have to wait for it."""
        return (
            f"claim {self.claim} is attached to node {self.node}; Kubernetes detaches it by force "
            f"{seconds(FORCE_DETACH_SECONDS)} min after the pod there has ended"
        )


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

"""A volume that stays attached to a node that is gone is found by its attachment."""

from __future__ import annotations

from typing import Any

import pytest

from kdist.recovery import HeldVolume
from kdist.recovery.decision import find_held_volumes


def claim(*modes: str, volume: str = "pvc-1") -> dict[str, Any]:
    return {"spec": {"accessModes": list(modes), "volumeName": volume}}


def attachment(node: str, volume: str = "pvc-1") -> dict[str, Any]:
    return {"spec": {"nodeName": node, "source": {"persistentVolumeName": volume}}}


@pytest.mark.parametrize("mode", ["ReadWriteOnce", "ReadWriteOncePod"])
def test_a_volume_that_one_node_can_mount_is_held_by_the_node_that_is_gone(mode: str) -> None:
    found = find_held_volumes({"ckpt": claim(mode)}, [attachment("worker-2")], node="worker-2")
    assert found == [HeldVolume("pvc-1", "ckpt", "worker-2")]
    assert found[0].explain() == (
        "claim ckpt is attached to node worker-2; Kubernetes detaches it by force 6:00 min after "
        "the pod there has ended"
    )


@pytest.mark.parametrize(
    ("document", "attached"),
    [
        (claim("ReadWriteMany"), attachment("worker-2")),
        (claim("ReadWriteOnce", "ReadWriteMany"), attachment("worker-2")),
        (claim("ReadWriteOnce"), attachment("worker-1")),
        (claim("ReadWriteOnce"), attachment("worker-2", "pvc-2")),
        (claim("ReadWriteOnce", volume=""), attachment("worker-2", "")),
        ({}, {}),
    ],
)
def test_no_volume_is_held_that_others_can_mount_or_that_is_elsewhere(
    document: dict[str, Any], attached: dict[str, Any]
) -> None:
    assert find_held_volumes({"ckpt": document}, [attached], node="worker-2") == []

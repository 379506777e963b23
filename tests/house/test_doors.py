"""One door of each kind: what changes the objects of a cluster goes through one function, which
checks whose they are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.tree import ROOT, python_files

SENDING = {"send_apply", "send_create", "send_patch", "send_delete"}
DOOR = "cli/kdist/cluster/job_objects.py"
ALLOWED = {
    DOOR: SENDING,
    "cli/kdist/cluster/client.py": {"send_create"},  # reviews of rights, which store nothing
    "cli/kdist/deploy/admission.py": {"send_create"},  # a dry run, of a pod that is no job's
    "cli/kdist/doctor/cluster_checks.py": {"send_create"},  # a dry run, of a pod that is no job's
    "controller/kdist_controller/executor.py": {"send_create"},  # events, which have no owner
    # the controller's own Lease, as it was read
    "controller/kdist_controller/election.py": {"send_create", "send_patch"},
}


def find_senders() -> Iterator[tuple[str, str]]:
    """(File, name) of every use of what sends a change, besides where it is defined."""
    for path in python_files("cli", "controller"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            if isinstance(node, ast.Constant) and node.value in SENDING:
                name = str(node.value)  # getattr
            if name in SENDING:
                yield path.relative_to(ROOT).as_posix(), name


def test_objects_of_a_cluster_are_changed_through_the_door_that_checks_them() -> None:
    past = {(path, name) for path, name in find_senders() if name not in ALLOWED.get(path, set())}
    assert past == set(), f"{past}: use JobObjects of {DOOR}"


def test_every_exemption_is_used() -> None:
    used = set(find_senders())
    assert {(path, name) for path, names in ALLOWED.items() for name in names} == used


def test_the_executor_creates_nothing_but_events_past_the_door() -> None:
    path = "controller/kdist_controller/executor.py"
    assert [each for each in find_senders() if each[0] == path] == [(path, "send_create")]


def test_only_the_package_of_the_client_sends_requests() -> None:
    """`_transport` and `_request` lead past everything."""
    room = ROOT / "cli/kdist/cluster"
    past = {
        path.relative_to(ROOT).as_posix()
        for path in python_files("cli", "controller")
        if not path.is_relative_to(room)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("_transport", "_request", "_ask")
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }
    assert past == set()

"""Whoever opens a listening socket through one of the doors is in the table of the page about
security. `rules.py` finds what listens next to the doors.
"""

from __future__ import annotations

import ast

from tests.house.tree import ROOT, python_files

OPENING = {"BoundedServer", "serve_pages", "HostedStore", "TCPStore"}
DECLARED = {
    "kdist_trainer.metrics.exporter": "exporter",
    "kdist_trainer.rendezvous.exchange": "exchange of the agents of a round",
    "kdist_controller.metrics": "controller",
    "kdist_trainer.distributed.world": "torch's TCPStore of a group",
    "kdist_trainer.rendezvous.stores": "torch's TCPStore of the rendezvous",
}
"""The beginning of the row of each module in docs/explanation/security.md."""
DOORS = {
    "kdist_trainer.network.pages": "the one server, for pages",
    "kdist_trainer.distributed.hosted_store": "the one host of torch's stores",
    "kdist_trainer.rendezvous.store_process": "hosts the store that tcp_store asks for",
}


def opens(source: str) -> bool:
    """Whether a module serves through one of the doors."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in OPENING:
            hosts = [each.value for each in node.keywords if each.arg == "is_master"]
            if not any(isinstance(each, ast.Constant) and not each.value for each in hosts):
                return True
    return False


def test_whoever_serves_is_declared_and_every_declaration_serves() -> None:
    declared = DECLARED.keys()
    page = (ROOT / "docs" / "explanation" / "security.md").read_text()
    assert [row for row in DECLARED.values() if f"\n| {row}" not in page] == []
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])
        for path in python_files("cli", "controller", "trainer")
        if opens(path.read_text())
    }
    assert found - declared <= DOORS.keys(), (
        "give it a row in docs/explanation/security.md, and declare it here"
    )
    # it asks for the process that serves
    assert declared - found <= {"kdist_trainer.rendezvous.stores"}


def test_a_host_is_told_from_a_client() -> None:
    assert opens("TCPStore(host, port, 2, is_master=mine)")
    assert opens("serving.BoundedServer('x', addresses, 0)")
    assert not opens("TCPStore(host, 1, 2, is_master=False)")

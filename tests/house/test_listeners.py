"""Whoever opens a listening socket through one of the doors is declared, so that the page about
security has it. `rules.py` finds what listens next to the doors.
"""

from __future__ import annotations

import ast

from kdist_trainer.config.listeners import LISTENERS
from tests.house.tree import ROOT, python_files

OPENING = {"BoundedServer", "serve_pages", "HostedStore", "TCPStore"}
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
    declared = {module for each in LISTENERS for module in each.modules}
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])
        for path in python_files("cli", "controller", "trainer")
        if opens(path.read_text())
    }
    assert found - declared <= DOORS.keys(), "declare it in kdist_trainer/config/listeners.py"
    # it asks for the process that serves
    assert declared - found <= {"kdist_trainer.rendezvous.stores"}


def test_a_host_is_told_from_a_client() -> None:
    assert opens("TCPStore(host, port, 2, is_master=mine)")
    assert opens("serving.BoundedServer('x', addresses, 0)")
    assert not opens("TCPStore(host, 1, 2, is_master=False)")

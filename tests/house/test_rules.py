"""Every Python file keeps the rules of the house, and every rule notices when one does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.house import rules
from tests.house.tree import ROOT, Rule, broken, python_files

PRODUCT = python_files("cli", "controller", "trainer", "tools")
TESTS = tuple(path for path in python_files("tests") if path.name.startswith("test_"))
SHOWN = (*PRODUCT, *python_files("examples", "bench", "docs"))

# Files for whose purpose a rule makes no sense, and why.
EXEMPT: dict[Rule, dict[str, str]] = {
    rules.no_print: {
        "cli/kdist/deploy/receive_code.py": "it runs alone in a pod, and answers there",
        "cli/kdist/console.py": "it is the one that prints",
        "cli/kdist/cluster/kubeconfig.py": "the user's own plugin asks on her terminal",
        "cli/kdist/terminal/drawing.py": "it draws for console, and makes visible what it draws",
        "trainer/kdist_trainer/checkpoint/__main__.py": "it is a command whose answer goes to "
        "standard output",
        "trainer/kdist_trainer/fetch/upload.py": "it is one too",
        "trainer/kdist_trainer/profiling/__main__.py": "it is one too",
        "trainer/kdist_trainer/tensorboard/__main__.py": "it is one too",
        "trainer/kdist_trainer/tracker/__main__.py": "it tells its agent the address of the run",
        "trainer/kdist_trainer/run_script.py": "it stands in for the interpreter, whose last "
        "words go to standard error",
    },
    rules.one_style: {
        "cli/kdist/terminal/__init__.py": "it is the one that styles",
        "cli/kdist/console.py": "it hands styled text to rich, above a live view",
        "cli/kdist/views/frame.py": "it hands the colours of prints to rich, and nothing else",
    },
    rules.one_reader: {
        "trainer/kdist_trainer/formats/untrusted_text.py": "it is the reader of JSON",
        "cli/kdist/yaml_text.py": "it is the reader of YAML",
        "cli/kdist/render/text.py": "it composes YAML that it has just written, for positions",
    },
    rules.no_dangerous_calls: {
        "trainer/kdist_trainer/run_script.py": "it runs the user's script, as "
        "`python script.py` would"
    },
    rules.unpickles_nowhere_else: {
        "trainer/kdist_trainer/formats/allow_list.py": "it is the one that unpickles"
    },
    rules.no_bare_threads: {
        "cli/kdist/threads.py": "it is the one that starts threads",
        "trainer/kdist_trainer/processes/threads.py": "the trainer's own, without kdist",
    },
    rules.no_second_listener: {
        "cli/kdist/cluster/streams.py": "a forwarded port of the user's own machine, on loopback",
        "trainer/kdist_trainer/ipc/control.py": "a Unix socket in a folder of this user's alone",
        "trainer/kdist_trainer/distributed/hosted_store.py": "torch's stores listen there",
        "trainer/kdist_trainer/rendezvous/handler.py": "it tries whether a port is free",
        "trainer/kdist_trainer/network/server.py": "it opens the sockets of the one server",
    },
    rules.no_second_store: {
        "trainer/kdist_trainer/distributed/hosted_store.py": "it is the one that hosts stores",
        "trainer/kdist_trainer/rendezvous/store_process.py": "its agent has bound the listener",
    },
    rules.no_second_client: {
        "trainer/kdist_trainer/network/deadline_http.py": "it is the one that makes connections",
        "trainer/kdist_trainer/fetch/web.py": "its opener follows redirects over them",
        "cli/kdist/cluster/kubeconfig.py": "it has urllib3 and websockets use them, and asks "
        "requests which hosts need no proxy",
    },
    rules.no_module_state: {
        "trainer/kdist_trainer/agent/preload.py": "the forkserver imports it for its effect alone",
        "trainer/kdist_trainer/checkpoint/writer.py": "torch warns on the writing thread, "
        "where a filter for a while is not safe",
    },
}

EVERYWHERE: dict[Rule, Sequence[Path]] = {
    rules.short_file: python_files(),
    rules.opens_with_a_docstring: python_files(),
    rules.no_dangerous_calls: SHOWN,
    rules.unpickles_nowhere_else: SHOWN,
    rules.no_print: PRODUCT,
    rules.one_style: [path for path in PRODUCT if path.is_relative_to(ROOT / "cli")],
    rules.one_reader: [path for path in PRODUCT if not path.is_relative_to(ROOT / "tools")],
    rules.one_writer: [path for path in PRODUCT if not path.is_relative_to(ROOT / "tools")],
    rules.no_bare_threads: PRODUCT,
    rules.no_second_listener: PRODUCT,
    rules.no_second_store: PRODUCT,
    rules.no_second_client: python_files("cli", "controller", "trainer"),
    rules.no_module_state: PRODUCT,
    rules.public_things_are_explained: PRODUCT,
    rules.package_says_what_belongs_in_it: [path for path in PRODUCT if path.name == "__init__.py"],
    rules.tests_are_named_as_sentences: TESTS,
    rules.tests_can_fail: TESTS,
    rules.tests_are_not_switched_off: TESTS,
}

BAD = [
    (rules.short_file, "x = 1\n" * 901),
    (rules.opens_with_a_docstring, "import os\n"),
    (rules.package_says_what_belongs_in_it, '"""The parts."""\n'),
    (rules.no_print, "print('x')\n"),
    (rules.no_print, "import sys\nsys.stdout.write('x')\n"),
    (rules.no_print, "import os\nos.write(2, data)\n"),
    (rules.no_print, "from rich.console import Console\nConsole()\n"),
    (rules.one_style, "import click\nclick.style('x', fg='red')\n"),
    (rules.one_style, "x = '\\x1b[31m'\n"),
    (rules.one_writer, "import json\njson.dumps(x)\n"),
    (rules.one_writer, "import json\nwrite = json.dump\n"),
    (rules.one_writer, "from json import dumps\n"),
    (rules.one_writer, "import json\njson.dumps(x, allow_nan=True)\n"),
    (rules.one_reader, "import json\njson.loads('1')\n"),
    (rules.one_reader, "import json\nread = json.load\n"),
    (rules.one_reader, "from json import loads\n"),
    (rules.one_reader, "import yaml\nyaml.safe_load('1')\n"),
    (rules.one_reader, "Model.model_validate_json(text)\n"),
    (rules.no_dangerous_calls, "import os\nos.system('ls')\n"),
    (rules.no_dangerous_calls, "import subprocess\nsubprocess.run('ls', shell=True)\n"),
    (rules.no_dangerous_calls, "import yaml\nyaml.load(text)\n"),
    (rules.no_dangerous_calls, "import torch\ntorch.load(path)\n"),
    (rules.no_dangerous_calls, "import torch\ntorch.load(path, weights_only=False)\n"),
    (rules.unpickles_nowhere_else, "import pickle\npickle.loads(data)\n"),
    (rules.unpickles_nowhere_else, "import pickle\nread = pickle.load\n"),
    (rules.unpickles_nowhere_else, "from pickle import loads as read\n"),
    (rules.unpickles_nowhere_else, "import pickle\nclass U(pickle.Unpickler):\n    pass\n"),
    (rules.unpickles_nowhere_else, "import marshal\n"),
    (rules.no_dangerous_calls, "eval('1')\n"),
    (rules.no_bare_threads, "import threading\nthreading.Thread(target=f).start()\n"),
    (rules.no_bare_threads, "from threading import Timer\nTimer(1, f).start()\n"),
    (rules.no_bare_threads, "import _thread\n_thread.start_new_thread(f, ())\n"),
    (rules.no_bare_threads, "class C(threading.Thread):\n    x = 1\n"),
    (rules.no_second_listener, "import socketserver\n"),
    (rules.no_second_listener, "from http.server import ThreadingHTTPServer\n"),
    (rules.no_second_listener, "import asyncio\nasyncio.start_server(f)\n"),
    (rules.no_second_listener, "import socket\ns = socket.socket()\ns.listen(5)\n"),
    (rules.no_second_listener, "import socket\nsocket.create_server(('', 0))\n"),
    (rules.no_second_store, "TCPStore(host, port, is_master=True, master_listen_fd=fd)\n"),
    (rules.no_second_store, "dist.TCPStore(host, port, 2, rank == 0)\n"),
    (rules.no_second_client, "import http.client\nhttp.client.HTTPConnection(host)\n"),
    (rules.no_second_client, "from urllib.request import urlopen\nurlopen(url)\n"),
    (rules.no_second_client, "import requests\n"),
    (rules.no_second_client, "class C(HTTPSConnection):\n    x = 1\n"),
    (rules.no_module_state, "start()\n"),
    (rules.no_module_state, "for x in range(3):\n    pass\n"),
    (rules.public_things_are_explained, "def f():\n    return 1\n"),
    (rules.public_things_are_explained, "class C:\n    x = 1\n"),
    (rules.tests_are_named_as_sentences, "def test_it():\n    assert f()\n"),
    (rules.tests_can_fail, "def test_that_nothing_is_checked():\n    f()\n"),
    (rules.tests_are_not_switched_off, "@pytest.mark.skip\ndef test_x():\n    assert f()\n"),
    (
        rules.tests_are_not_switched_off,
        "@pytest.mark.xfail(reason='later')\ndef test_x():\n    assert f()\n",
    ),
]

GOOD = [
    (rules.no_second_store, "TCPStore(host, port, is_master=False, wait_for_workers=False)\n"),
    (rules.short_file, "x = 1\n" * 900),
    (rules.opens_with_a_docstring, ""),
    (rules.no_print, "console.table(rows)\n"),
    (rules.one_style, "console.style('x', 'red')\n"),
    (rules.one_reader, "json.dumps(x)\nparse_json(y)\nimport yaml\nyaml.dump(z)\n"),
    (rules.one_writer, "encode_json(x)\njson.dumps(x, allow_nan=False)\n"),
    (
        rules.no_dangerous_calls,
        (
            "yaml.load(text, Loader=yaml.CSafeLoader)\nmodel.eval()\ntorch.load(p, "
            "weights_only=True)\n"
        ),
    ),
    (rules.unpickles_nowhere_else, "import json\nimport pickle\npickle.dumps(json.loads(x))\n"),
    (rules.no_bare_threads, "start_thread(f, name='x', on_error=OnError.EXIT)\n"),
    (rules.no_bare_threads, "def f(thread: threading.Thread) -> None:\n    thread.join()\n"),
    (rules.no_second_listener, "self._checkpoints.listen()\nimport http\n"),
    (rules.no_second_client, "import http.client\nDeadlineConnection(host, timeout=1.0)\n"),
    (rules.no_module_state, "'''Doc.'''\nimport os\nif TYPE_CHECKING:\n    import torch\n"),
    (rules.public_things_are_explained, "def _f():\n    return 1\n"),
    (rules.tests_can_fail, "def test_that_a_check_is_called():\n    check_ledger(path)\n"),
    (
        rules.tests_are_not_switched_off,
        "@pytest.mark.skipif(not CUDA, reason='needs a GPU')\ndef test_x():\n    assert f()\n",
    ),
]


def test_every_file_keeps_its_rules() -> None:
    exempt = {(rule, ROOT / name) for rule, names in EXEMPT.items() for name in names}
    kept = {(rule, path) for rule, paths in EVERYWHERE.items() for path in paths} - exempt
    found = [
        f"{rule.__name__}: {each}"
        for path in python_files()
        for rule in EVERYWHERE
        if (rule, path) in kept
        for each in broken(rule, [path])
    ]
    assert found == []


@pytest.mark.parametrize(("rule", "source"), BAD, ids=lambda part: getattr(part, "__name__", ""))
def test_a_rule_notices_a_file_that_breaks_it(rule: Rule, source: str) -> None:
    assert list(rule(source)) != []


@pytest.mark.parametrize(("rule", "source"), GOOD, ids=lambda part: getattr(part, "__name__", ""))
def test_a_rule_leaves_a_good_file_alone(rule: Rule, source: str) -> None:
    assert list(rule(source)) == []


@pytest.mark.parametrize(
    ("rule", "name"), [(rule, name) for rule, names in EXEMPT.items() for name in names]
)
def test_an_exemption_is_still_needed(rule: Rule, name: str) -> None:
    assert broken(rule, [ROOT / name]) != []


def test_every_rule_has_a_sample_that_breaks_it() -> None:
    assert {rule for rule, _ in BAD} == set(EVERYWHERE)


def test_no_module_is_named_for_being_unsorted() -> None:
    unsorted = {"utils", "util", "common", "helpers", "helper", "manager", "misc", "base_utils"}
    assert [path for path in python_files() if path.stem in unsorted] == []

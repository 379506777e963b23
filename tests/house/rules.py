"""The rules of the house that can be read off a Python file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache

LONGEST_FILE = 900

Function = ast.FunctionDef | ast.AsyncFunctionDef


@lru_cache(maxsize=1)  # one file is read by all rules, then the next
def parse(source: str) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(source)


@lru_cache(maxsize=1)
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(parse(source)))


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or an attribute; what is computed before a dot is `()`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "()"


def short_file(source: str) -> Iterator[str]:
    """A file has at most 900 lines: nobody decides on a 2,000-line file, it grows."""
    lines = source.count("\n")
    if lines > LONGEST_FILE:
        yield f"{lines}: {lines} lines, at most {LONGEST_FILE}"


def opens_with_a_docstring(source: str) -> Iterator[str]:
    """A file says what it is for in its first lines; an empty one has nothing to say."""
    tree = parse(source)
    if tree.body and not ast.get_docstring(tree):
        yield "1: no docstring says what this file is for"


PRINTERS = {
    "print",
    "click.echo",
    "click.secho",
    "click.confirm",
    "click.prompt",
    "input",
    "sys.stdout.write",
    "sys.stdout.buffer.write",
    "sys.stderr.write",
    "rich.print",
    "Console",
}
_STYLERS = {"click.style", "click.unstyle", "Text.from_markup", "Text.from_ansi"}


def no_print(source: str) -> Iterator[str]:
    """Only `console` prints; the trainer's words go through `log`."""
    for node in nodes(source):
        if isinstance(node, ast.Call) and (
            dotted(node.func) in PRINTERS
            or (dotted(node.func) == "os.write" and ast.unparse(node.args[0]) in {"1", "2"})
        ):
            yield (
                f"{node.lineno}: prints; that is for console.py (command line) and log.py (trainer)"
            )


def one_style(source: str) -> Iterator[str]:
    """Only `terminal` makes escape sequences, so that all others in a text are foreign."""
    for node in nodes(source):
        if isinstance(node, ast.Call) and dotted(node.func) in _STYLERS:
            yield f"{node.lineno}: {dotted(node.func)}; console.style styles a text"
        elif isinstance(node, ast.Constant) and "\x1b[" in str(node.value):
            yield f"{node.lineno}: an escape sequence; console.style styles a text"


_PARSERS = {
    "json.loads",
    "json.load",
    "json.JSONDecoder",
    "from_json",
    "pydantic_core.from_json",
    *(f"msgspec.json.{name}" for name in ("decode", "Decoder")),
    *(f"yaml.{name}" for name in ("load", "load_all", "safe_load", "safe_load_all", "full_load")),
    *(f"yaml.{name}" for name in ("parse", "scan", "compose", "compose_all", "unsafe_load")),
}
_PARSING_MODULES = {"json", "yaml", "pydantic_core", "msgspec.json"}
_PARSING_METHODS = {"model_validate_json", "validate_json", "parse_raw", "raw_decode"}


def one_reader(source: str) -> Iterator[str]:
    """JSON and YAML are read by one reader each, which bounds size and depth and raises one error:
    `kdist_trainer.formats.untrusted_text` and `kdist.yaml_text`.
    """
    for node in nodes(source):
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and node.module in _PARSING_MODULES:
            if found := {f"{node.module}.{name}" for name in names} & _PARSERS:
                yield f"{node.lineno}: imports {', '.join(sorted(found))}"
        elif isinstance(node, ast.Attribute) and (
            dotted(node) in _PARSERS or node.attr in _PARSING_METHODS
        ):
            yield f"{node.lineno}: {ast.unparse(node)}; parse_json and parse_yaml read text"


_WRITERS = {"json.dumps", "json.dump", "json.JSONEncoder"}


def one_writer(source: str) -> Iterator[str]:
    """JSON has no NaN: `formats.json_text` writes it, or `json.dumps` that refuses NaN."""
    strict = {
        id(node.func)
        for node in nodes(source)
        if isinstance(node, ast.Call)
        and any(
            each.arg == "allow_nan"
            and isinstance(each.value, ast.Constant)
            and each.value.value is False
            for each in node.keywords
        )
    }
    for node in nodes(source):
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and node.module == "json":
            if found := {f"json.{name}" for name in names} & _WRITERS:
                yield f"{node.lineno}: imports {', '.join(sorted(found))}"
        elif (
            isinstance(node, ast.Attribute) and dotted(node) in _WRITERS and id(node) not in strict
        ):
            yield f"{node.lineno}: {ast.unparse(node)}; encode_json writes JSON"


def no_dangerous_calls(source: str) -> Iterator[str]:
    """Nothing in a file that was read may be executed, and no shell reads a string of ours."""
    for node in nodes(source):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        keywords = {
            keyword.arg: ast.unparse(keyword.value)
            for keyword in node.keywords
            if keyword.arg in {"shell", "weights_only"}
        }
        if name in {
            "os.system",
            "os.popen",
            "eval",
            "exec",
            "yaml.unsafe_load",
        }:
            yield f"{node.lineno}: {name}"
        elif name == "yaml.load" and "Safe" not in ast.unparse(node):
            yield f"{node.lineno}: yaml.load without a safe loader"
        elif name == "torch.load" and keywords.get("weights_only") != "True":
            yield f"{node.lineno}: torch.load without weights_only=True"
        elif keywords.get("shell") == "True":
            yield f"{node.lineno}: shell=True"


UNPICKLERS = {
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "load",
    "loads",
    "marshal",
    "pickle.Unpickler",
    "pickle._Unpickler",
    "pickle.load",
    "pickle.loads",
    "shelve",
    "Unpickler",
    "_Unpickler",
}


def unpickles_nowhere_else(source: str) -> Iterator[str]:
    """A pickle is a program: only `kdist_trainer.formats.allow_list` unpickles."""
    for node in nodes(source):
        names: list[str] = []
        if isinstance(node, ast.Import) or (
            isinstance(node, ast.ImportFrom) and node.module in {"pickle", "_pickle"}
        ):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and dotted(node.value) == "pickle":
            names = [ast.unparse(node)]
        for name in names:
            if name in UNPICKLERS or name == "_pickle":
                yield f"{getattr(node, 'lineno', 0)}: {name}; allow_list.py reads pickles"


THREADS = {"Thread", "Timer", "start_new_thread"}


def no_bare_threads(source: str) -> Iterator[str]:
    """A thread is started by `threads.start_thread`, which logs what ends it."""
    for node in nodes(source):
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in THREADS:
            yield f"{node.lineno}: {dotted(node.func)}; threads.start_thread starts threads"
        elif isinstance(node, ast.ClassDef):
            bases = {dotted(base).split(".")[-1] for base in node.bases}
            if bases & THREADS:
                yield f"{node.lineno}: {node.name} is a thread; threads.start_thread starts them"


def no_second_store(source: str) -> Iterator[str]:
    """A store of torch's is hosted where its listener is bound and closed."""
    for node in nodes(source):
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "TCPStore":
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if keywords.get("is_master") != "False":
                yield f"{node.lineno}: hosts a TCPStore; hosted_store.py hosts them"


SERVERS = {"socketserver", "http.server", "wsgiref", "xmlrpc.server"}
LISTENERS = {"create_server", "start_server", "serve_forever"}


def no_second_listener(source: str) -> Iterator[str]:
    """Connections from outside are taken by the one bounded server of `kdist_trainer.network`."""
    imported = {
        f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in nodes(source)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for name in sorted(imported):
        if any(f"{name}.".startswith(f"{server}.") for server in SERVERS):
            yield f"1: imports {name}; kdist_trainer.network serves"
    for node in nodes(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name in LISTENERS or (name == "listen" and "socket" in imported):
                yield f"{node.lineno}: {dotted(node.func)}; kdist_trainer.network listens"


CLIENTS = {
    *("HTTPConnection", "HTTPSConnection", "HTTPConnectionPool", "HTTPSConnectionPool"),
    *("PoolManager", "ProxyManager", "urlopen", "urlretrieve", "build_opener", "OpenerDirector"),
    *("WebSocket", "connection_from_url"),
}
PACKAGES = {"requests", "httpx", "aiohttp", "http2", "ftplib", "smtplib"}


def no_second_client(source: str) -> Iterator[str]:
    """A connection is made by `deadline_http`, which bounds the time and the size of answers."""
    for node in nodes(source):
        if isinstance(node, ast.Call):
            made = {dotted(node.func).split(".")[-1]} & CLIENTS
        elif isinstance(node, ast.ClassDef):
            made = {dotted(base).split(".")[-1] for base in node.bases} & CLIENTS
        elif isinstance(node, ast.Import):
            made = {alias.name.split(".")[0] for alias in node.names} & PACKAGES
        elif isinstance(node, ast.ImportFrom):
            made = {(node.module or "").split(".")[0]} & PACKAGES
        else:
            continue
        for name in made:
            yield f"{node.lineno}: {name}; deadline_http.py makes connections"


def no_module_state(source: str) -> Iterator[str]:
    """Importing a file does nothing: no statement at the top calls for its effect alone."""
    for node in parse(source).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield (f"{node.lineno}: {dotted(node.value.func)} is called when the file is imported")
        elif isinstance(node, ast.For | ast.While | ast.With):
            yield f"{node.lineno}: a statement that runs when the file is imported"


def public_things_are_explained(source: str) -> Iterator[str]:
    """A public function or class of a product file says in a sentence what it does."""
    for node in parse(source).body:
        if (
            isinstance(node, Function | ast.ClassDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ):
            yield f"{node.lineno}: {node.name} is public and has no docstring"


def package_says_what_belongs_in_it(source: str) -> Iterator[str]:
    """A package's docstring has 5 to 15 lines: what belongs here, what does not, what to read."""
    lines = len((ast.get_docstring(parse(source)) or "").splitlines())
    if not 5 <= lines <= 15:
        yield f"1: the package's docstring has {lines} lines, 5 to 15 say what belongs in it"


def tests_are_named_as_sentences(source: str) -> Iterator[str]:
    """A test's name says what holds: at least three words."""
    for test in _tests(source):
        if len(test.name.split("_")) < 4:
            yield f"{test.lineno}: {test.name} is no sentence"


def tests_can_fail(source: str) -> Iterator[str]:
    """A test asserts, expects an error, hands over to what is named for checking, or says that
    something raises nothing.
    """
    for test in _tests(source):
        nodes = list(ast.walk(test))
        calls = [dotted(node.func).split(".")[-1] for node in nodes if isinstance(node, ast.Call)]
        checks = [
            name
            for name in calls
            if name.lstrip("_").split("_")[0] in {"raises", "fail", "assert", "check", "expect"}
        ]
        says_so = test.name.endswith("_raises_nothing")
        if not checks and not says_so and not any(isinstance(node, ast.Assert) for node in nodes):
            yield f"{test.lineno}: {test.name} cannot fail"


def tests_are_not_switched_off(source: str) -> Iterator[str]:
    """No test is skipped without a condition, and none is expected to fail."""
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and dotted(node) in {
            "pytest.mark.skip",
            "pytest.mark.xfail",
            "pytest.xfail",
        }:
            yield f"{node.lineno}: {ast.unparse(node)}"


def _tests(source: str) -> Iterator[Function]:
    for node in nodes(source):
        if isinstance(node, Function) and node.name.startswith("test_"):
            yield node

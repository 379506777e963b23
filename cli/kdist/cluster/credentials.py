"""Sources of credentials: the kubeconfig itself, a token file, an exec plugin, or the official
client.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kdist.errors import Code, KdistError
from kdist.threads import OnError, start_thread
from kdist_trainer.json_text import encode_json
from kdist_trainer.untrusted_text import parse_json

EARLY_SECONDS = 10.0
"""Seconds before their expiry at which credentials of a plugin are renewed."""
_SHOWN_LINES = 20
_MOST_BYTES = 1 << 20


class Credential(NamedTuple):
    """An `Authorization` header, a client certificate with its key (PEM text), or both."""

    authorization: str = ""
    certificate: str = ""
    key: str = ""


def bearer(token: str) -> Credential:
    """The credential that sends a token. Raises `ValueError`, without the token, for one that no
    header can hold.
    """
    if not (token.isascii() and token.isprintable()):
        raise ValueError("the token has characters that no header can hold, such as a line end")
    return Credential(f"Bearer {token}" if token else "")


def read_small_file(file: Path) -> str:
    """A token, certificate or key. Raises `OSError`, and `ValueError` for what is none: no regular
    file, larger than a mebibyte, or no text.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would be waited for
    with os.fdopen(os.open(file, flags), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise ValueError(f"{file} is no regular file")
        data = opened.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{file} is larger than {_MOST_BYTES >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no text") from None


class CredentialSource(Protocol):
    """Provides valid credentials."""

    def get(self) -> Credential:
        """The credentials. Raises `KdistError` with code UNREACHABLE if there are none."""
        ...

    def forget(self) -> bool:
        """Drop credentials that the server rejected; whether `get` can return others."""
        ...


class Fixed(NamedTuple):
    """Credentials from the kubeconfig, or the `Authorization` header that `ask` returns."""

    credential: Credential = Credential()
    ask: Callable[[], str] | None = None

    def get(self) -> Credential:
        """The credentials, with the current `Authorization` header."""
        return self.credential if self.ask is None else Credential(self.ask())

    def forget(self) -> bool:
        """There are no others."""
        return False


@dataclass(frozen=True)
class TokenFile:
    """A token in a file, which is replaced before the token expires, so it is read each time."""

    file: Path

    def get(self) -> Credential:
        """The current token."""
        try:
            return bearer(read_small_file(self.file).strip())
        except (OSError, ValueError) as error:
            raise KdistError(f"the token cannot be read: {error}", code=Code.UNREACHABLE) from error

    def forget(self) -> bool:
        """There are no others: the file was just read."""
        return False


class Plugin:
    """A program that prints credentials (`users[].user.exec`). It runs when they are first needed,
    and again before they expire.
    """

    def __init__(
        self, settings: Mapping[str, Any], *, folder: Path, cluster: Mapping[str, Any]
    ) -> None:
        command = settings.get("command")
        if (
            not isinstance(command, str)
            or not command
            or not isinstance(settings.get("apiVersion"), str)
        ):
            raise ValueError("exec needs `command` and `apiVersion`")
        # As in kubectl: a path is relative to the kubeconfig, a bare name is searched in PATH.
        path = str(folder / command) if os.sep in command else command
        self._argv = [path, *(str(each) for each in settings.get("args") or [])]
        self._version = str(settings["apiVersion"])
        self._hint = str(settings.get("installHint") or "").strip()
        self._env = {str(each["name"]): str(each["value"]) for each in settings.get("env") or []}
        self._mode = settings.get("interactiveMode") or "IfAvailable"
        self._cluster = cluster if settings.get("provideClusterInfo") else None
        self._lock = threading.Lock()
        self._found: Credential | None = None
        self._until = float("inf")

    def get(self) -> Credential:
        """The credentials of the last run while they are valid, else of a new run."""
        with self._lock:
            if self._found is None or time.time() > self._until - EARLY_SECONDS:
                self._found, self._until = self._read(self._run())
            return self._found

    def forget(self) -> bool:
        """The next `get` runs the plugin again."""
        with self._lock:
            self._found = None
        return True

    def _run(self) -> str:
        """Run the plugin; its stdout. In a terminal its stderr is forwarded, because a login may
        prompt.
        """
        import subprocess  # most credentials come from no plugin

        interactive = self._mode != "Never" and sys.stdin is not None and sys.stdin.isatty()
        if self._mode == "Always" and not interactive:
            raise self._fail("it needs a terminal (interactiveMode: Always), and there is none")
        spec = {
            "interactive": interactive,
            **({"cluster": self._cluster} if self._cluster is not None else {}),
        }
        request = {"apiVersion": self._version, "kind": "ExecCredential", "spec": spec}
        env = {**os.environ, **self._env, "KUBERNETES_EXEC_INFO": encode_json(request)}
        stdin = None if interactive else subprocess.DEVNULL
        try:
            process = subprocess.Popen(
                self._argv, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
            )
        except OSError as error:
            raise self._fail(f"it cannot be started: {error.strerror or error}") from error
        stderr = bytearray()
        listener = start_thread(
            partial(_collect, process.stderr, stderr, interactive),
            name="credential plugin",
            on_error=OnError.REPORT,  # only the plugin's words are missing
        )
        with process:
            out = process.stdout.read() if process.stdout else b""
            listener.join()
        if process.returncode:
            raise self._fail(
                f"it ended with code {process.returncode}", stderr.decode(errors="replace")
            )
        return out.decode(errors="replace")

    def _read(self, text: str) -> tuple[Credential, float]:
        """The credentials in the plugin's output, and the unix time at which they expire."""
        try:
            answer = parse_json(text)
            status = answer["status"]
            token, certificate = (
                status.get("token") or "",
                status.get("clientCertificateData") or "",
            )
            key, end = status.get("clientKeyData") or "", status.get("expirationTimestamp")
            until = datetime.fromisoformat(end).timestamp() if end else float("inf")
            authorization = bearer(str(token)).authorization
            if answer.get("apiVersion") != self._version:
                raise ValueError(
                    f"it answers in {answer.get('apiVersion')}, not in {self._version}"
                )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._fail(f"it does not answer with an ExecCredential ({error})") from error
        if not token and not (certificate and key):
            raise self._fail("its answer holds neither a token nor a certificate with its key")
        return Credential(authorization, certificate, key), until

    def _fail(self, why: str, stderr: str = "") -> KdistError:
        lines = stderr.strip().splitlines()[-_SHOWN_LINES:]
        message = "\n  ".join(
            [
                f"no credentials: the plugin `{' '.join(self._argv)}` of the kubeconfig: {why}",
                *lines,
            ]
        )
        hint = self._hint or "run it by itself, or log in to the cluster again"
        return KdistError(message, hint=hint, code=Code.UNREACHABLE)


def _collect(stream: Any, collected: bytearray, live: bool) -> None:
    """Collect what a program prints; with `live`, forward it to stderr at once."""
    while chunk := os.read(stream.fileno(), 2**16):
        collected.extend(chunk)
        if live:
            os.write(2, chunk)

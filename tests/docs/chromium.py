"""One headless Chromium that opens pages one after the other, driven by its DevTools protocol."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from types import TracebackType
from typing import Any

import websocket

ANSWER_SECONDS = 60


class Chromium:
    """A page of a Chromium of its own.

    Attributes:
        problems: what the console of the pages has said as an error since it was last emptied.
    """

    def __init__(self, program: str) -> None:
        """Start Chromium and open an empty page.

        Args:
            program: path of Chromium.
        """
        self.problems: list[str] = []
        self._seen: set[str] = set()
        self._last = 0
        self._session = ""
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [
                program,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--remote-debugging-port=0",
                f"--user-data-dir={self._folder.name}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        said = ""
        for line in self._process.stderr:
            said += line
            if found := re.search(r"DevTools listening on (ws://\S+)", line):
                break
        else:
            raise AssertionError(f"Chromium did not start: {said}")
        self._socket = websocket.create_connection(
            found[1], timeout=ANSWER_SECONDS, suppress_origin=True
        )
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
        self._process.terminate()
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._process.wait(timeout=ANSWER_SECONDS)
        self._folder.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while (answer := self._receive()).get("id") != self._last:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self._seen.discard("Page.loadEventFired")
        self.call("Page.navigate", url=url)
        while "Page.loadEventFired" not in self._seen:
            self._receive()

    def resize(self, width: int, height: int) -> None:
        """Give the page another size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, of a promise what it resolves to."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv())
        method, params = message.get("method", ""), message.get("params", {})
        self._seen.add(method)
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.problems.append(str(params["args"]))
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("http://127.0.0.1:", "data:", "about:", "blob:")):
                self.problems.append(f"asks the network for {url}")
        return message

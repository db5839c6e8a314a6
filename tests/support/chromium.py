"""Headless Chromium, driven through its own pipes by the DevTools protocol: needs the browser and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.patience import HANG_S

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
"""None where there is no such browser."""


class BrowserTab:
    """One tab.

    Attributes:
        requests: address of all that it has asked for.
        complaints: errors that no code has caught, and what the browser has refused or written to the console.
    """

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = os.fdopen(send, "wb", buffering=0), os.fdopen(receive, "rb")
        self._session: str | None = None
        self._num_calls = 0
        self._rest = b""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._num_calls += 1
        message = {"id": self._num_calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._send.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._num_calls:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript, that of a promise once it is there."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        """Return the value of an expression once it is true in the sense of JavaScript."""
        return self.run(
            f"""new Promise((found, failed) => {{
                const end = Date.now() + {HANG_S * 1000};
                const look = () => {{
                    const value = {condition};
                    if (value) found(value);
                    else if (Date.now() > end) failed(new Error("waited too long"));
                    else setTimeout(look, 5);
                }};
                look();
            }})"""
        )

    def open(self, url: str) -> None:
        """Load a page, and return when its script has run."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] != "verbose":
                self.complaints.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] != "debug":
                self.complaints.append(json.dumps(params["args"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = self._receive.read1(1 << 16)
            assert chunk, "the browser has ended"
            self._rest += chunk
        content, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(content)
        return message


@contextmanager
def browser_tab(profile: Path) -> Iterator[BrowserTab]:
    """Start a browser with an empty tab.

    Args:
        profile: folder for what it writes.
    """
    assert PROGRAM is not None
    (to_read, to_send), (from_read, from_send) = os.pipe(), os.pipe()
    options = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--remote-debugging-pipe", f"--user-data-dir={profile}"),
    )
    # It reads from file 3 and writes to file 4. Other shells than bash know files below 10 only.
    command = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{from_send}', "bash", PROGRAM, *options]
    process = subprocess.Popen(
        command, pass_fds=(to_read, from_send), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(to_read)
    os.close(from_send)
    tab = BrowserTab(to_send, from_read)
    try:
        yield tab
    finally:
        with suppress(AssertionError, OSError):
            tab._session = None
            tab.call("Browser.close")
        process.wait(HANG_S)

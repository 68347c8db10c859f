"""A page in headless Chromium, driven through its DevTools pipe: no port, no library, no network.

    with chromium(tmp_path) as browser:
        browser.open(page)
        browser.evaluate("document.title")

Messages are JSON objects ended by a zero byte, on file descriptors 3 (to the browser) and 4 (from it).
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_S = 60.0


def executable() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page. `problems` has errors of its scripts and console; `requests` all addresses that it asked for."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a DevTools command. Raises `RuntimeError` with what the browser says."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._from, 1 << 20) if ready else b""
            if not part:
                raise RuntimeError("the browser did not answer" if not ready else "the browser has ended")
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"])[:2000])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(params["args"])[:2000])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(json.dumps(params["entry"])[:2000])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case _:
                pass

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Loads the page anew and waits until it says that it is ready."""
        self.problems, self.requests = [], []
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.as_uri())
        self.wait_for("document.documentElement?.dataset.ready !== undefined")

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, promises awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Until an expression is true, which is asked every 20 ms."""
        deadline = time.monotonic() + WAIT_S
        while not self.evaluate(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{condition} did not become true; problems: {self.problems}")
            time.sleep(0.02)

    def screenshot(self, path: Path, *, full: bool = False) -> None:
        parameters: dict[str, Any] = {"captureBeyondViewport": full}
        if full:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            parameters["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **parameters)["data"]))


@contextlib.contextmanager
def chromium(profile: Path) -> Generator[Browser]:
    """A browser with a profile of its own in a session of its own, ended with all its processes."""
    program = executable()
    assert program is not None, f"none of {', '.join(NAMES)} is on PATH"
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"]
    with contextlib.ExitStack() as stack:
        ends = [_high(end) for pipe in (os.pipe(), os.pipe()) for end in pipe]
        read_by_browser, to_browser, from_browser, written_by_browser = ends
        for end in (to_browser, from_browser):
            stack.callback(os.close, end)
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        pipes = [(os.POSIX_SPAWN_DUP2, read_by_browser, 3), (os.POSIX_SPAWN_DUP2, written_by_browser, 4)]
        words = [program, "--remote-debugging-pipe", *flags, "about:blank"]
        pid = os.posix_spawn(program, words, os.environ, file_actions=[*quiet, *pipes], setsid=True)
        stack.callback(_end, pid)
        for end in (read_by_browser, written_by_browser):
            os.close(end)
        yield Browser(to_browser, from_browser)


def _high(descriptor: int) -> int:
    """The same file under a number that is not one of the browser's."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100)
    os.close(descriptor)
    return high


def _end(pid: int) -> None:
    """The browser leads a session of its own: all of its processes end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

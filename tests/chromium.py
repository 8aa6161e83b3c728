# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium for tests: opens a page, presses keys, points, asks, takes its picture.

Spoken to in the DevTools protocol over --remote-debugging-pipe, JSON between zero bytes on its file
descriptors 3 and 4. That is real keys and a real pointer, with nothing to install beside the
browser: no driver, no websocket, no port that another test could meet.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
PATIENCE = 60.0  # seconds for one answer, on a busy machine
CODES = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27, "Tab": 9}


def find_chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """The browser. Closed by close() or the end of its `with`."""

    def __init__(self, program: str, profile: Path) -> None:
        here_read, there_write = os.pipe()
        there_read, here_write = os.pipe()
        # Beyond 3 and 4, so that taking their places overwrites neither.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (there_read, there_write)]

        def place() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        flags = (*FLAGS, f"--user-data-dir={profile}")
        if os.geteuid() == 0:
            flags += ("--no-sandbox",)  # it refuses to run as root with it
        self._process = subprocess.Popen(
            [program, *flags, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place,
            pass_fds=(3, 4),
            cwd=profile,
        )
        for fd in (there_read, there_write, *high):
            os.close(fd)
        self._read, self._write = here_read, here_write
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            self.call("Browser.close")
        for fd in (self._read, self._write):
            os.close(fd)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of a command; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self._write, text) :]
        while (answer := self._next(method)).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self, waited_for: str) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError(f"{waited_for}: no answer from Chromium in {PATIENCE:g} s")
            some = os.read(self._read, 1 << 16)
            if not some:
                raise RuntimeError(f"{waited_for}: Chromium ended")
            self._buffer += some
        text, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def open(
        self, address: str, *, width: int = 1200, height: int = 850, dark: bool = False
    ) -> Page:
        return Page(self, address, width, height, dark)


class Page:
    """A tab."""

    def __init__(
        self, browser: Chromium, address: str, width: int, height: int, dark: bool
    ) -> None:
        self._browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def resize(self, width: int, height: int, ratio: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=ratio, mobile=width < 600,
        )  # fmt: skip

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, or of the promise that it gives."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        until = time.monotonic() + PATIENCE
        while not self.evaluate(condition):
            if time.monotonic() > until:
                raise TimeoutError(f"{condition}: not so in {PATIENCE:g} s; {self.complaints()}")
            time.sleep(0.02)

    def press(self, key: str, *, shift: bool = False) -> None:
        event: dict[str, Any] = {"key": key, "modifiers": 8 if shift else 0}
        if key in CODES:
            event |= {"code": key, "windowsVirtualKeyCode": CODES[key]}
        if len(key) == 1:
            event["text"] = key
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def point(self, x: float, y: float, *, click: bool = False) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self) -> bytes:
        """A PNG of what is seen."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def frames(self, count: int) -> list[Frame]:
        """The frames inside, once there are as many, whether or not they have a process of their
        own."""
        self.call(
            "Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=False, flatten=True
        )
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            self.evaluate("0")
            found = self._frames()
            if len(found) == count:
                return found
            time.sleep(0.02)
        raise TimeoutError(f"{count} frames: not there in {PATIENCE:g} s")

    def _frames(self) -> list[Frame]:
        main = self.call("Page.getFrameTree")["frameTree"]["frame"]["id"]
        found: dict[str, Frame] = {}
        for event in self._browser.events:
            parameters = event.get("params", {})
            if event["method"] == "Target.attachedToTarget":
                target = parameters["targetInfo"]
                if target["type"] == "iframe" and event.get("sessionId") == self._session:
                    session = parameters["sessionId"]
                    found[target["targetId"]] = Frame(self._browser, session, None)
            elif event["method"] == "Runtime.executionContextCreated":
                context = parameters["context"]
                frame = context["auxData"]["frameId"]
                if event.get("sessionId") == self._session and frame != main:
                    found.setdefault(frame, Frame(self._browser, self._session, context["id"]))
        return list(found.values())

    def complaints(self) -> list[str]:
        """What the console got that is an error or a warning, and what was thrown."""
        self.evaluate("0")  # everything before is here now
        found = []
        for event in self._browser.events:
            parameters = event.get("params", {})
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded":
                found.append(str(parameters["entry"]))
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(str(parameters["args"]))
        return found

    def requests(self) -> list[str]:
        """The addresses that the page asked for."""
        self.evaluate("0")
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self._session
            and event["method"] == "Network.requestWillBeSent"
        ]


class Frame:
    """A frame inside a page."""

    def __init__(self, browser: Chromium, session: str, context: int | None) -> None:
        self._browser, self._session = browser, session
        self._context = {} if context is None else {"contextId": context}

    def evaluate(self, expression: str) -> Any:
        answer = self._browser.call(
            "Runtime.evaluate",
            self._session,
            expression=expression, returnByValue=True, awaitPromise=True, **self._context,
        )  # fmt: skip
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        until = time.monotonic() + PATIENCE
        while not self.evaluate(condition):
            if time.monotonic() > until:
                raise TimeoutError(f"{condition}: not so in {PATIENCE:g} s")
            time.sleep(0.02)

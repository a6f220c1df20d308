"""Drives a headless Chromium over its debugging pipe: for tests of the page of a run, and for pictures of it.

Chromium reads commands on descriptor 3 and writes answers and events to descriptor 4: JSON, each ended by a
zero byte (the DevTools protocol). No package is needed.
"""

import base64
import json
import os
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

# On a busy machine Chromium takes tens of seconds to start. Tests wait for conditions, not for times.
LIMIT_SECONDS = 180

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# CI's setup installs Chromium, so there the tests fail without it.
in_chromium = pytest.mark.skipif(
    CHROMIUM is None and "CI" not in os.environ, reason="no Chromium: apt-get install chromium"
)
# Connections that the server ended: a test ends it before the browser, and the page reconnects.
LOST = re.compile(
    r"net::ERR_(CONNECTION_\w+|EMPTY_RESPONSE|INCOMPLETE_CHUNKED_ENCODING|SOCKET_NOT_CONNECTED)"
)


class Browser:
    """One page. Use it as a context manager. `profile` is a folder for the browser's files."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        to_browser, from_browser = os.pipe(), os.pipe()
        arguments = [
            CHROMIUM,
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ]
        # The shell puts the pipes at descriptors 3 and 4, whatever numbers they have here.
        script = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", *arguments],
            pass_fds=(to_browser[0], from_browser[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        self.writer, self.reader = to_browser[1], from_browser[0]
        self.buffer = b""
        self.number = 0
        self.events: list[dict] = []
        self.session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.enable")
        self.send("Runtime.enable")
        self.send("Log.enable")
        self.resize(width, height)
        self.set_dark(dark)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.writer)
        os.close(self.reader)

    def _message(self, deadline: float) -> dict:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.reader], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium did not answer")
            part = os.read(self.reader, 1 << 20)
            if not part:
                raise ConnectionError("Chromium ended")
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(line)

    def send(self, method: str, **parameters: object) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.writer, data) :]
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            answer = self._message(deadline)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def resize(self, width: int, height: int) -> None:
        mobile = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def set_dark(self, dark: bool) -> None:
        value = "dark" if dark else "light"
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def run(self, expression: str) -> object:
        """The value of a JavaScript expression, which may be a promise."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait_for(self, expression: str, seconds: float = LIMIT_SECONDS) -> object:
        """Waits until the expression has a true value, and returns it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if value := self.run(expression):
                    return value
            except RuntimeError:
                pass  # the page is not there yet
            time.sleep(0.1)
        raise TimeoutError(
            f"never true: {expression}; page: {self.run('document.body.innerText.slice(0, 2000)')}"
        )

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, path: Path, whole: bool = True) -> None:
        data = self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def errors(self) -> list[str]:
        """Exceptions of the page, failed requests, and what its Content-Security-Policy refused."""
        self.run("0")  # takes the events that have arrived
        out = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                out.append(details.get("exception", {}).get("description") or details["text"])
            if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                entry = event["params"]["entry"]
                if "favicon" not in entry.get("url", "") and not LOST.search(entry["text"]):
                    out.append(f"{entry['text']} {entry.get('url', '')}")
        return out

"""A headless Chromium, driven through its debugging pipe: load a page, measure it, take pictures of it.

The DevTools protocol's messages are JSON ended by a zero byte, written to the browser's file descriptor 3 and read from
its 4: no port, no driver, no library. Debian's package is `chromium`.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
TIMEOUT_S = 60.0


def find_chromium() -> str | None:
    """Path of the browser, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name)) is not None), None)


class View(NamedTuple):
    """How a page is seen."""

    width: int
    height: int
    scale: float = 1.0
    mobile: bool = False
    dark: bool = False


class Chromium:
    """A running browser with one page; a context manager."""

    def __init__(self, binary: str) -> None:
        # Its helper processes may still write there for a moment after they were killed.
        self.profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        # Numbers above 4, so that moving the ends to 3 and 4 overwrites none of them.
        to_browser, self._write = _pipe()
        self._read, from_browser = _pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        flags += ["--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}"]
        # Offline for good: any name resolves to nothing.
        flags += ["--host-resolver-rules=MAP * ~NOTFOUND", "about:blank"]

        def place_ends() -> None:
            os.dup2(to_browser, 3)
            os.dup2(from_browser, 4)

        self._process = subprocess.Popen(
            [binary, *flags],
            preexec_fn=place_ends,  # noqa: PLW1509 (two dup2 calls, no threads involved)
            close_fds=False,
            start_new_session=True,
            env={**os.environ, "TMPDIR": self.profile.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._next = 0
        self._buffer = b""
        self._session = ""
        self.events: list[dict[str, Any]] = []
        (page,) = [t for t in self._send("Target.getTargets")["targetInfos"] if t["type"] == "page"][:1]
        self._session = self._send("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self.profile.cleanup()

    def open(self, path: Path, view: View) -> None:
        """Load a file as `view` sees it; what it says on the console or asks of the network is in `events`."""
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=view.width,
            height=view.height,
            deviceScaleFactor=view.scale,
            mobile=view.mobile,
        )
        scheme = "dark" if view.dark else "light"
        self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self._send("Page.navigate", url=path.resolve().as_uri())
        self._wait_for("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """Evaluate JavaScript in the page."""
        answer = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, *, whole: bool = False, clip: dict[str, float] | None = None, scale: float = 1.0) -> bytes:
        """Take a PNG of what is seen, of the whole page, or of a part of it; `scale` shrinks a part."""
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole or clip is not None}
        if whole:
            size = self._send("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 8000)}
        if clip is not None:
            options["clip"] = {**clip, "scale": scale}
        return base64.b64decode(self._send("Page.captureScreenshot", **options)["data"])

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if self._session and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._next:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._receive())

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer in {TIMEOUT_S} s"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, f"the browser ended with {self._process.wait()}"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


def _pipe() -> tuple[int, int]:
    """Make a pipe whose ends have numbers above 9."""
    ends = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return read, write


def pixels(png: bytes) -> np.ndarray:
    """Decode a PNG as browsers write them (8 bits, RGB or RGBA, not interlaced): (height, width, 3) bytes."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    position, data = 8, b""
    width = height = channels = 0
    while position < len(png):
        (length,) = struct.unpack(">I", png[position : position + 4])
        kind, body = png[position + 4 : position + 8], png[position + 8 : position + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlace = struct.unpack(">2I5B", body)
            assert (depth, interlace) == (8, 0)
            channels = {2: 3, 6: 4}[colour]
        elif kind == b"IDAT":
            data += body
        position += 12 + length
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * channels)
    image = np.zeros((height, width, channels), np.int32)
    above = np.zeros((width, channels), np.int32)
    for number, row in enumerate(rows):
        line = row[1:].reshape(width, channels).astype(np.int32)
        image[number] = above = _unfilter(int(row[0]), line, above)
    return image[:, :, :3].astype(np.uint8)


def _unfilter(kind: int, line: np.ndarray, above: np.ndarray) -> np.ndarray:
    """Undo one row's filter (PNG specification, 9.2)."""
    if kind == 0:
        return line
    if kind == 1:
        return np.cumsum(line, axis=0) % 256
    if kind == 2:
        return (line + above) % 256
    out = np.zeros_like(line)
    left = np.zeros(line.shape[1], np.int32)
    corner = np.zeros(line.shape[1], np.int32)
    for x in range(line.shape[0]):
        if kind == 3:
            guess = (left + above[x]) // 2
        else:
            estimate = left + above[x] - corner
            a, b, c = abs(estimate - left), abs(estimate - above[x]), abs(estimate - corner)
            guess = np.where((a <= b) & (a <= c), left, np.where(b <= c, above[x], corner))
        left = out[x] = (line[x] + guess) % 256
        corner = above[x]
    return out

"""A headless Chromium driven through a pipe of its own (DevTools protocol, no network)."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def found() -> str | None:
    """A browser on the PATH."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in a browser.

    Args:
      program: the browser.
      folder: an empty folder for its profile.
    """

    def __init__(self, program: str, folder: Path):
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--remote-debugging-pipe", "--window-size=1300,850",
            f"--user-data-dir={folder}",
        ]  # fmt: skip
        # The protocol is spoken on the descriptors 3 and 4.
        script = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, program, *flags, "about:blank"],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._buffer, self._count, self._session = b"", 0, None
        self.logged: list[str] = []
        page = next(
            each for each in self.send("Target.getTargets")["targetInfos"] if each["type"] == "page"
        )
        attached = self.send("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            while b"\0" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                    raise TimeoutError(method)
                read = os.read(self._answers, 1 << 20)
                if not read:
                    raise ConnectionError("the browser has gone")
                self._buffer += read
            raw, _, self._buffer = self._buffer.partition(b"\0")
            heard = json.loads(raw)
            if heard.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.logged.append(raw.decode())
            if heard.get("id") == self._count:
                assert "error" not in heard, heard
                return heard["result"]

    def run(self, expression: str) -> Any:
        """What an expression comes to in the page; promises are waited for."""
        got = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def wait(self, expression: str, seconds: float = 30) -> Any:
        """The expression's value as soon as it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(expression)):
            assert time.monotonic() < deadline, expression
            time.sleep(0.02)
        return value

    def key(self, name: str) -> None:
        """Presses a key."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def mouse(self, selector: str, click: bool = False) -> None:
        """Moves the mouse onto the first element of a selector; and clicks."""
        x, y = self.run(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)})"
            ".getClientRects()[0]; return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        kinds = ["mouseMoved", *(["mousePressed", "mouseReleased"] if click else [])]
        for kind in kinds:
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._commands)
        os.close(self._answers)

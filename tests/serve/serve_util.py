"""A served model for tests: `bough serve` as a separate process, and functions that observe it from
outside."""

import json
import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

# Passes are short here, so one thread is faster.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class Served:
    """`bough serve` with a model directory at a free port or at `port`. A context manager that ends the
    server by SIGTERM."""

    def __init__(
        self, program: Path, model: Path, *settings: str, env: dict[str, str] | None = None, port: int = 0
    ):
        self.log = model.parent / f"serve-{os.getpid()}-{id(self)}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [str(program), "serve", "--model", str(model), "--port", str(port), "--json", *settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **ENVIRONMENT, **(env or {})},
            )
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise RuntimeError(f"bough serve did not listen:\n{self.log.read_text()}")
        self.url: str = json.loads(line)["url"]
        self.name = model.name

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stops the server. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self.process.stdout.close()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rsplit(":", 1)[1])

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as answer:
            text = answer.read().decode()
        return {m[1]: float(m[2]) for m in re.finditer(r"^bough_serve_(\S+) (\S+)$", text, re.M)}

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

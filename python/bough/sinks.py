"""Sends the metrics of a run to wandb or trackio, while the run works or afterwards (docs/metrics.md):

    python -m bough.sinks runs/sums/grpo --wandb my-project --trackio my-project

The process reads the files of the run's folder. A step is sent once: the process may be stopped, killed and
started again. sinks.json in the folder has the names of the runs at the services. Each service knows the last
step that it has stored. No torch is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib
import json
import math
import os
import re
import secrets
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

_POLL_SECONDS = 1.0
VERSIONS = {"wandb": "0.31.0", "trackio": "0.43.0"}  # those of the tests (requirements-sinks.txt)


class SinkError(Exception):
    """Wrong use, a damaged file, or a service that refuses the run."""


class MetricsFile:
    """The complete lines of metrics.jsonl. The file stays open, so a file that replaces it has another
    inode."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def poll(self) -> tuple[list[bytes], bool]:
        """The lines that are new since the last call, and whether they begin at the file's start: at the
        first call, and after the run was resumed, which cuts the file to a checkpoint."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return [], False
        if self._file is not None:
            inode = os.fstat(self._file.fileno()).st_ino
            if inode != status.st_ino or status.st_size < self._file.tell():
                self._file.close()
                self._file = None
        from_start = self._file is None
        if self._file is None:
            self._file = self._path.open("rb")
        position = self._file.tell()
        data = self._file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._file.seek(position + len(complete))
        return complete.splitlines(), from_start


class Sink:
    """One project of one service. The run is opened there with its first step.

    A run is known by the first line of its metrics.jsonl. If that line is another one, the run began anew in
    the same folder, without a checkpoint, and gets a new run in the project."""

    def __init__(self, service: str, project: str, folder: Path, name: str, saved: dict[str, Any]) -> None:
        self._service, self._project, self._folder, self._name = service, project, folder, name
        self._saved = saved
        self._entry: dict[str, str] = saved.get(f"{service}/{project}", {})
        self._run: Any = None
        self.last_step = -1
        load(service)

    def send(self, lines: list[bytes], from_start: bool) -> None:
        if not lines:
            return
        if from_start:
            self._open(hashlib.sha256(lines[0]).hexdigest())
        last = self.last_step
        for line in lines:
            step, values = parse(line, self._folder)
            if step > self.last_step:
                self._log(values, step)
                self.last_step = step
        if from_start and step < last:
            say(
                f"{self._service}: the run went back to step {step}. Steps up to {last} were sent before and "
                "keep the values that were sent"
            )

    def _open(self, first_line: str) -> None:
        if self._entry.get("first_line") != first_line:
            self.finish(0)
            words = re.sub(r"[^\w.-]+", "-", "-".join(self._folder.parts[-2:]))[-80:]
            self._entry = {"run": f"{words}-{secrets.token_hex(4)}", "first_line": first_line}
            self._saved[f"{self._service}/{self._project}"] = self._entry
            write_saved(self._folder, self._saved)
        if self._run is None:
            config = read_config(self._folder)
            arguments = (self._project, self._entry["run"], self._name, config, self._folder)
            self._run, self._log, self.last_step = SERVICES[self._service](*arguments)
            named = f"project {self._project}, run {self._entry['run']}"
            say(f"{self._service}: {named}, after step {self.last_step}")

    def finish(self, code: int) -> None:
        """Waits until everything is stored. code: 0, or 1 if the run failed."""
        if self._run is not None:
            self._run.finish(**({"exit_code": code} if self._service == "wandb" else {}))
            self._run = None


# A run of a service, the function that sends the values of a step, and the last step that is stored, or -1.
Opened = tuple[Any, Callable[[dict[str, float], int], None], int]


def open_wandb(project: str, run_id: str, name: str, config: dict[str, Any], folder: Path) -> Opened:
    wandb = load("wandb")
    parent = Path(os.environ.get("WANDB_DIR", folder))
    stored = [stored_step(path) for path in parent.glob(f"wandb/offline-run-*-{run_id}/*.wandb")]
    try:
        run = wandb.init(
            project=project,
            id=run_id,
            name=os.environ.get("WANDB_NAME", name),
            config=config,
            resume="allow",
            dir=parent,
            settings=wandb.Settings(console="off"),
        )
    except wandb.errors.Error as error:
        raise SinkError(
            f"wandb refuses the run: {error}; `wandb login` stores a key, WANDB_MODE=offline needs none and "
            "writes files for `wandb sync`"
        ) from error
    if (folder / "log.txt").exists():
        run.save(str(folder / "log.txt"), base_path=str(folder), policy="live")

    def log(values: dict[str, float], step: int) -> None:
        run.log(values, step=step, commit=True)  # without commit, wandb waits for more values of the step

    return run, log, max([run.starting_step - 1, *stored])


def stored_step(path: Path) -> int:
    """The last step in an offline file, or -1. wandb writes it with delay, and not at all if it is killed."""
    steps = [record.history.step.num for record in read_wandb(path) if record.HasField("history")]
    return max([-1, *steps])


def read_wandb(path: Path) -> Iterator[Any]:
    """The records of an offline file. It has leveldb's log format: after 7 bytes, blocks of 32 KiB with
    records or parts of records, each with a header of 7 bytes (checksum, length, kind)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, whole = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:  # zeros
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += 7 + length
        if position > len(data):  # cut off
            return
        whole += data[position - length : position]
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


def open_trackio(project: str, run_id: str, name: str, config: dict[str, Any], folder: Path) -> Opened:
    # trackio finds a run by its name, so the name must be unique.
    config = {"name": name, "folder": str(folder), **config}
    run = load("trackio").init(project=project, name=run_id, config=config, resume="allow", embed=False)
    return run, run.log, run._next_step - 1


SERVICES = {"wandb": open_wandb, "trackio": open_trackio}


def load(service: str) -> Any:
    try:
        return importlib.import_module(service)
    except ModuleNotFoundError as error:
        if error.name != service:
            raise
        raise SinkError(
            f"{service} is not installed in {sys.executable}; install it: "
            f"{sys.executable} -m pip install {service}=={VERSIONS[service]}"
        ) from None


def parse(line: bytes, folder: Path) -> tuple[int, dict[str, float]]:
    """A line of metrics.jsonl: the step and its values. null is a number that is not finite."""
    try:
        record = json.loads(line)
        step = record.pop("step")
        return int(step), {key: math.nan if value is None else value for key, value in record.items()}
    except (ValueError, AttributeError, KeyError, TypeError):
        raise SinkError(
            f'{folder / "metrics.jsonl"}: expected lines that are objects with a "step", got '
            f"{line[:80].decode(errors='replace')!r}: the file is damaged"
        ) from None


def read_config(folder: Path) -> dict[str, Any]:
    import yaml  # a dependency of both services

    return yaml.safe_load((folder / "config.yaml").read_text())


def is_running(folder: Path) -> bool:
    """Whether a process works on the run. Its name is in the lock file as long as it holds the lock; a
    process that was killed leaves it there."""
    try:
        words = (folder / ".lock").read_text().split()  # process PID on HOST
    except FileNotFoundError:
        return False
    if len(words) != 4:
        return False
    if words[3] != socket.gethostname():
        return read_progress(folder).get("state") == "running"
    return Path("/proc", words[1]).exists()


def read_progress(folder: Path) -> dict[str, Any]:
    """progress.json, {} if the run writes none or is writing it."""
    try:
        progress = json.loads((folder / "progress.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return progress if isinstance(progress, dict) else {}


def read_saved(folder: Path) -> dict[str, Any]:
    path = folder / "sinks.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SinkError(
            f"{path}: {error}: the file is damaged; without it the run is sent again, as a new run"
        ) from None


def write_saved(folder: Path, saved: dict[str, Any]) -> None:
    new = folder / "sinks.json.new"
    new.write_text(json.dumps(saved, indent=1) + "\n")
    new.replace(folder / "sinks.json")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Two processes would send each step twice."""
    with (folder / "sinks.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SinkError(
                f"another process sends the run {folder}; give all services to one process: "
                "--wandb PROJECT --trackio PROJECT"
            ) from None
        yield


def say(text: str) -> None:
    print(f"bough.sinks: {text}", file=sys.stderr, flush=True)


def follow(folder: Path, sinks: list[Sink], stop: threading.Event, until_stopped: bool) -> None:
    metrics = MetricsFile(folder / "metrics.jsonl")
    while True:
        goes_on = not stop.is_set() and (until_stopped or is_running(folder))
        lines, from_start = metrics.poll()  # after the question whether the run goes on: nothing is missed
        for sink in sinks:
            sink.send(lines, from_start)
        if not goes_on:
            return
        stop.wait(_POLL_SECONDS)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bough.sinks",
        description="Sends the metrics of a run to wandb or trackio, while the run works or afterwards.",
        epilog="The environment variables of wandb and trackio count, such as WANDB_MODE=offline, "
        "WANDB_ENTITY, TRACKIO_DIR, TRACKIO_SPACE_ID.",
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--wandb", metavar="PROJECT", help="send to this project of wandb")
    parser.add_argument("--trackio", metavar="PROJECT", help="send to this project of trackio")
    parser.add_argument("--name", help="name of the run (default: EXPERIMENT/TRIAL, as in the folder)")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="wait for a run that has not begun or is resumed later; Ctrl-C or SIGTERM ends the process",
    )
    arguments = parser.parse_args()
    projects = [(service, getattr(arguments, service)) for service in VERSIONS]
    if not any(project for _, project in projects):
        parser.error("where to? Give --wandb PROJECT, --trackio PROJECT or both")
    stop = threading.Event()

    def end(number: int, frame: Any) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)  # a second one does not wait for the services

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        return send_run(arguments, projects, stop)
    except SinkError as error:
        say(str(error))
        return 2


def send_run(arguments: argparse.Namespace, projects: list[tuple[str, str]], stop: threading.Event) -> int:
    folder = Path(os.path.abspath(arguments.run))
    while arguments.follow and not (folder / "config.yaml").exists() and not stop.wait(_POLL_SECONDS):
        pass
    if not (folder / "config.yaml").exists():
        raise SinkError(f"{folder} is not a run's folder: it has no config.yaml; --follow waits for a run")
    name = arguments.name or "/".join(folder.parts[-2:])
    with locked(folder):
        saved = read_saved(folder)
        sinks = [Sink(service, project, folder, name, saved) for service, project in projects if project]
        code = 1
        try:
            follow(folder, sinks, stop, arguments.follow)
            is_over = not stop.is_set() and read_progress(folder).get("state") in ("failed", "running")
            code = 1 if is_over else 0
        finally:
            for sink in sinks:
                sink.finish(code)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The program from Python: train, rollout and serve. They start `bough` as a process of its own, so a run has
its memory and threads for itself, and return objects. No torch is imported."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bough.program import environment, program

_POLL_SECONDS = 0.2


class ProgramError(RuntimeError):
    """The program ended with an error. code: its exit code (2 bad input, 3 a failure, 130 interrupted)."""

    def __init__(self, command: str, code: int, errors: str) -> None:
        self.code, self.errors = code, errors
        last = (errors.strip().splitlines() or ["no message"])[-1].removeprefix(f"bough {command}: ")
        super().__init__(f"bough {command}: exit code {code}: {last}")


@dataclass(frozen=True)
class TrainResult:
    """folder: the run's folder (docs/formats.md). summary: the program's JSON summary. metrics: one object a
    step."""

    folder: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]] = field(repr=False)

    @property
    def model(self) -> Path:
        """The trained model, a Hugging Face directory. A run that on_step ended has only checkpoints."""
        if "model" not in self.summary:
            raise ValueError(f"the run ended before its last step; its checkpoints are in {self.folder}")
        return Path(self.summary["model"])


def train(
    config: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | Iterable[str] = (),
    *,
    on_step: Callable[[dict[str, Any]], Any] | None = None,
    reward: Callable[..., float] | None = None,
    quiet: bool = False,
) -> TrainResult:
    """`bough train`. Blocks until the run ends. A run that was interrupted goes on where it stopped.

    Args:
        config: the YAML file of a run, or its settings as a mapping.
        overrides: settings that override the file, {"actor.optimizer.lr": 1e-4} or
            ["actor.optimizer.lr=1e-4"].
        on_step: called with the metrics of each step, in this process, while the run goes on; of a run that
            is resumed, with those of its earlier steps first. If it returns False or raises, the run writes a
            checkpoint and ends.
        reward: a function of this process: reward(prompt, completion, answer, **fields) returns a number. It
            gets the arguments that it names. Calls come from several threads.
        quiet: True: the program's log is not shown.

    Raises:
        ProgramError: the program failed. An exception of `reward` or `on_step` is raised unchanged.
    """
    with tempfile.TemporaryDirectory() as scratch, _callable_reward(reward) as endpoint:
        if isinstance(config, Mapping):
            path = Path(scratch) / "config.yaml"
            path.write_text(json.dumps(config))  # JSON is YAML
        else:
            path = Path(config)
        words = ["train", str(path), "--json", *_override_words(overrides)]
        if endpoint:
            words.append(f"reward={endpoint.url}")
        process = _Program(words, quiet)
        watch = _MetricsFile(on_step)
        try:
            while process.running(_POLL_SECONDS):
                if endpoint and endpoint.error is not None:
                    process.stop()
                    raise endpoint.error
                if watch.poll(process.first_object("folder")) is False:
                    process.stop()
        except BaseException:
            process.stop()
            raise
        if endpoint and endpoint.error is not None:
            raise endpoint.error
        if process.code != 0 and not (process.stopped and process.code == 130):
            raise ProgramError("train", process.code, process.errors)
        folder = process.first_object("folder")
        watch.poll(folder)
        return TrainResult(Path(folder), process.last_object(), watch.metrics)


def rollout(
    model: str | Path, prompts: Iterable[Any] | str | Path, *, quiet: bool = True, **options: Any
) -> list[dict[str, Any]]:
    """`bough rollout`: samples responses.

    Args:
        model: a Hugging Face directory.
        prompts: a file, or a list of texts, lists of token ids, or mappings such as {"messages": [...]}.
        options: the program's options: n_samples=8, max_new_tokens=64, temperature=0.7, device="cuda", ...

    Returns:
        The lines of the rollout file: input_ids, loss_mask, logprobs, completion, ... (docs/formats.md).

    Raises:
        ProgramError: the program failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        if isinstance(prompts, (str, Path)):
            file = Path(prompts)
        else:
            file = Path(scratch) / "prompts.jsonl"
            file.write_text("".join(json.dumps(_prompt_line(prompt)) + "\n" for prompt in prompts))
        out = Path(scratch) / "rollouts.jsonl"
        words = ["rollout", "--model", str(model), "--prompts", str(file), "--out", str(out)]
        process = _Program([*words, *_option_words(options), "--json"], quiet)
        process.wait()
        if process.code != 0:
            raise ProgramError("rollout", process.code, process.errors)
        return [json.loads(line) for line in out.read_text().splitlines()]


class Server:
    """A running `bough serve`. Close it, or use it in a `with` statement. url: of OpenAI's API, without
    /v1."""

    def __init__(self, process: _Program, url: str) -> None:
        self._process, self.url = process, url

    def close(self) -> None:
        self._process.stop()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(model: str | Path, *, port: int = 0, quiet: bool = True, **options: Any) -> Server:
    """`bough serve`: OpenAI's and Anthropic's HTTP APIs over a model. Returns when the server accepts
    connections.

    Args:
        model: a Hugging Face directory.
        port: 0: any free port.
        options: the program's options, such as device="cuda", threads=4.

    Raises:
        ProgramError: the server did not start.
    """
    words = ["serve", "--model", str(model), "--port", str(port), "--json", *_option_words(options)]
    process = _Program(words, quiet)
    while process.running(_POLL_SECONDS):
        if url := process.first_object("url"):
            return Server(process, url)
    raise ProgramError("serve", process.code, process.errors)


def run_for_json(words: list[str]) -> dict[str, Any]:
    """Runs the program and returns the JSON object that is its last line of stdout."""
    process = _Program(words, quiet=True)
    process.wait()
    if process.code != 0:
        raise ProgramError(words[0], process.code, process.errors)
    return process.last_object()


class _Program:
    """The program as a child process. Threads read its output."""

    def __init__(self, words: list[str], quiet: bool) -> None:
        self.stopped = False
        self.output = self.errors = ""
        self._quiet = quiet
        self._process = subprocess.Popen(
            [str(program()), *words],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._readers = [
            threading.Thread(target=self._read, args=(name,), daemon=True) for name in ("output", "errors")
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        stream = self._process.stdout if name == "output" else self._process.stderr
        for line in stream:
            setattr(self, name, getattr(self, name) + line)
            if name == "errors" and not self._quiet:
                os.write(2, line.encode())

    def running(self, seconds: float) -> bool:
        """Waits at most this long. False once the process has ended and its output is read."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        for reader in self._readers:
            reader.join()
        return False

    def wait(self) -> None:
        try:
            while self.running(3600):
                pass
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """As Ctrl-C: the program ends in order. Kills it if it takes a minute."""
        self.stopped = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        while self.running(1):
            pass

    @property
    def code(self) -> int:
        return self._process.returncode

    def _objects(self) -> Iterator[dict[str, Any]]:
        for line in self.output.splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n"):
                yield json.loads(line)

    def first_object(self, key: str) -> Any:
        """The value of the first line of stdout that is an object with this key, or None."""
        return next((each[key] for each in self._objects() if key in each), None)

    def last_object(self) -> dict[str, Any]:
        return [{}, *self._objects()][-1]


class _MetricsFile:
    """Reads metrics.jsonl while the run writes it."""

    def __init__(self, on_step: Callable[[dict[str, Any]], Any] | None) -> None:
        self.metrics: list[dict[str, Any]] = []
        self._on_step = on_step
        self._position = 0  # number of steps that on_step has seen
        self._state: tuple[int, int] | None = None  # size and time of change of the file when it was read

    def poll(self, folder: str | None) -> Any:
        """Returns False if on_step did."""
        if folder is None:
            return None
        path = Path(folder) / "metrics.jsonl"
        if not path.exists():
            return None
        status = path.stat()
        state = (status.st_size, status.st_mtime_ns)
        if state == self._state:
            return None
        self._state = state
        text = path.read_bytes()
        self.metrics = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
        # A run that is resumed removes the steps after its checkpoint, and computes them again.
        self._position = min(self._position, len(self.metrics))
        while self._on_step and self._position < len(self.metrics):
            self._position += 1
            if self._on_step(self.metrics[self._position - 1]) is False:
                self._on_step = None
                return False
        return None


class _Endpoint:
    url: str
    error: BaseException | None = None


@contextmanager
def _callable_reward(reward: Callable[..., float] | None) -> Iterator[_Endpoint | None]:
    """A local HTTP endpoint (docs/add_a_reward.md) that calls the function."""
    if reward is None:
        yield None
        return
    endpoint = _Endpoint()
    parameters = inspect.signature(reward).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}

    class Score(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known = {key: request[key] for key in ("prompt", "completion", "answer")}
            arguments = {**request.get("fields", {}), **known}
            try:
                value = reward(**{k: v for k, v in arguments.items() if takes_all or k in names})
                status, reply = 200, {"reward": float(value)}
            except BaseException as error:  # raised again by train()
                endpoint.error = endpoint.error or error
                status, reply = 400, {"error": repr(error)}
            body = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Score)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint.url = f"http://127.0.0.1:{server.server_port}/reward"
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()


def _override_words(overrides: Mapping[str, Any] | Iterable[str]) -> list[str]:
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in overrides.items()
    ]


def _option_words(options: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value is not False and value is not None:
            words += [option, str(value)]
    return words


def _prompt_line(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return dict(prompt) if isinstance(prompt, Mapping) else {"input_ids": [int(token) for token in prompt]}

"""The program from Python: train, rollout and serve. They start `bough` as a process of its own, so a run has
its memory and threads for itself, and return objects. No torch is imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bough.callables import Endpoint, serving
from bough.program import environment as program_environment
from bough.program import program

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
    environment: Callable[[], Any] | None = None,
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
        environment: a class with reset and step (docs/add_an_environment.md), or a function that makes such
            an object; each conversation has one, which one thread at a time uses. Several conversations run
            at once, at most `environment.workers`. The other settings of `environment` count.
        quiet: True: the program's log is not shown.

    Raises:
        ProgramError: the program failed. An exception of `reward`, `environment` or `on_step` ends the run
            and is raised unchanged.
    """
    with tempfile.TemporaryDirectory() as scratch, serving(reward, environment) as endpoint:
        if isinstance(config, Mapping):
            path = Path(scratch) / "config.yaml"
            path.write_text(json.dumps(config))  # JSON is YAML
        else:
            path = Path(config)
        words = ["train", str(path), "--json", *_override_words(overrides)]
        if reward is not None:
            words.append(f"reward={endpoint.url}/reward")
        if environment is not None:
            words += ["environment.type=http", f"environment.url={endpoint.url}/environment"]
        process = _Program(words, quiet)
        watch = _MetricsFile(on_step)

        def call_on_step() -> None:
            if watch.poll(process.first_object("folder")) is False:
                process.stop()

        process.wait(endpoint, call_on_step)
        if process.code != 0 and not (process.stopped and process.code == 130):
            raise ProgramError("train", process.code, process.errors)
        folder = process.first_object("folder")
        watch.poll(folder)
        return TrainResult(Path(folder), process.last_object(), watch.metrics)


def rollout(
    model: str | Path,
    prompts: Iterable[Any] | str | Path,
    *,
    environment: Callable[[], Any] | str | None = None,
    environment_settings: Mapping[str, Any] | None = None,
    quiet: bool = True,
    **options: Any,
) -> list[dict[str, Any]]:
    """`bough rollout`: samples responses, or conversations with an environment.

    Args:
        model: a Hugging Face directory.
        prompts: a file, or a list of texts, lists of token ids, or mappings such as {"messages": [...]}. With
            an environment: its problems.
        environment: as in train(), or a type of environment: "calculator", "python", ...
        environment_settings: settings under `environment`: {"max_turns": 4}.
        options: the program's options: n_samples=8, max_new_tokens=64, temperature=0.7, device="cuda", ...

    Returns:
        The lines of the rollout file: input_ids, loss_mask, logprobs, completion, ... (docs/formats.md).

    Raises:
        ProgramError: the program failed. An exception of `environment` ends it and is raised unchanged.
    """
    kind = environment if isinstance(environment, str) else None
    with (
        tempfile.TemporaryDirectory() as scratch,
        serving(environment=None if kind else environment) as endpoint,
    ):
        if isinstance(prompts, (str, Path)):
            file = Path(prompts)
        else:
            file = Path(scratch) / "prompts.jsonl"
            file.write_text("".join(json.dumps(_prompt_line(prompt)) + "\n" for prompt in prompts))
        out = Path(scratch) / "rollouts.jsonl"
        words = ["rollout", "--model", str(model), "--prompts", str(file), "--out", str(out)]
        if environment is not None:
            words += ["--environment", kind or "http", *_override_words(environment_settings or {})]
            words += [] if kind else [f"url={endpoint.url}/environment"]
        process = _Program([*words, *_option_words(options), "--json"], quiet)
        process.wait(endpoint)
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
            env=program_environment(),
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

    def wait(self, endpoint: Endpoint | None = None, poll: Callable[[], None] = lambda: None) -> None:
        """Waits until the process has ended. Raises the exceptions of the endpoint's functions and of
        `poll`, which is called now and then; they end the process."""
        try:
            while self.running(_POLL_SECONDS):
                if endpoint is not None:
                    endpoint.raise_error()
                poll()
        except BaseException:
            self.stop()
            raise
        if endpoint is not None:
            endpoint.raise_error()

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

"""Rewards and environments that are functions of this process. The program calls them through a local HTTP
endpoint (docs/add_a_reward.md, docs/add_an_environment.md)."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from reprlib import repr as shortened
from typing import Any

Handler = Callable[[dict[str, Any]], dict[str, Any]]
_STEP_KEYS = ("messages", "reward", "done", "rewards", "invalid_calls")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # connections that wait: the program opens one for each conversation


class Endpoint:
    """url: of this machine; the last part of a request's path is the name of its handler. error: the first
    exception of a handler. Each connection has a thread."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self.error: BaseException | None = None
        endpoint = self

        class Answer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    reply = handlers[self.path.lstrip("/")](request)
                    status, body = 200, json.dumps(reply, default=repr).encode()
                except BaseException as error:  # raise_error() raises it
                    endpoint.error = endpoint.error or error
                    status, body = 400, json.dumps({"error": repr(error)}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(
    reward: Callable[..., float] | None = None, environment: Callable[[], Any] | None = None
) -> Iterator[Endpoint]:
    """An endpoint with the handlers "reward" and "environment"."""
    with ExitStack() as stack:
        handlers: dict[str, Handler] = {}
        if reward is not None:
            handlers["reward"] = _reward_handler(reward)
        if environment is not None:
            conversations = stack.enter_context(Conversations(environment))
            handlers["environment"] = conversations.answer
        endpoint = Endpoint(handlers)
        stack.callback(endpoint.close)
        yield endpoint


def _finite(value: Any, where: str) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__") or not math.isfinite(float(value)):
        raise TypeError(f"{where}: got {shortened(value)}, expected a finite number")
    return float(value)


def _reward_handler(reward: Callable[..., float]) -> Handler:
    parameters = inspect.signature(reward).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}
    where = getattr(reward, "__name__", "reward")

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        known = {key: request[key] for key in ("prompt", "completion", "answer")}
        arguments = {**request.get("fields", {}), **known}
        value = reward(**{k: v for k, v in arguments.items() if takes_all or k in names})
        return {"reward": _finite(value, f"result of {where}")}

    return answer


@dataclass
class _Conversation:
    """One thread at a time uses the environment: a step may still run when its time is over."""

    environment: Any
    lock: threading.Lock = field(default_factory=threading.Lock)


class Conversations:
    """The open conversations, each with an environment of its own. Thread-safe. The coroutines of all
    environments run in one event loop, so they can share clients."""

    def __init__(self, make: Callable[[], Any]) -> None:
        if inspect.isclass(make):
            _check_methods(make)
        elif not callable(make) or hasattr(make, "step"):
            raise TypeError(
                f"environment: got {shortened(make)}, expected a class with reset and step, or a function "
                "that makes such an object for each conversation"
            )
        self._make = make
        self._open: dict[str, _Conversation] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request of the program (src/env/environment_protocol.h)."""
        episode, method = request["episode"], request["method"]
        if method != "step":  # `reset` comes again if its connection broke
            self._end(self._open.pop(episode, None))
        if method == "close":
            return {}
        if method == "reset":
            environment = self._make()
            _check_methods(environment)
            conversation = self._open[episode] = _Conversation(environment)
            call, arguments = environment.reset, (request["problem"], request["seed"])
        else:
            conversation = self._open[episode]
            call, arguments = conversation.environment.step, (request["action"],)
        with conversation.lock:
            return _reply(self._run(call, *arguments), method, getattr(call, "__qualname__", method))

    def __enter__(self) -> Conversations:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Ends the conversations that the program has not. One whose step still runs is left alone. All are
        ended, whatever they raise; `error` came before."""
        errors = []
        for conversation in list(self._open.values()):
            if not conversation.lock.locked():
                try:
                    self._end(conversation)
                except BaseException as raised:
                    errors.append(raised)
        self._loop.call_soon_threadsafe(self._loop.stop)
        if error is None and errors:
            raise errors[0]

    def _end(self, conversation: _Conversation | None) -> None:
        if conversation is not None and hasattr(conversation.environment, "close"):
            with conversation.lock:
                self._run(conversation.environment.close)

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        result = function(*arguments)
        if inspect.iscoroutine(result):
            return asyncio.run_coroutine_threadsafe(result, self._loop).result()
        return result


def _check_methods(environment: Any) -> None:
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise TypeError(f"environment: {shortened(environment)} has no method {method!r}")


def _reply(result: Any, method: str, where: str) -> dict[str, Any]:
    """A method's result as the program expects it. Raises TypeError that names the wrong part."""
    keys = ("messages", "tools") if method == "reset" else _STEP_KEYS
    expected = f"expected a dict with some of {', '.join(keys)}"
    if isinstance(result, tuple) and len(result) <= 3:
        result = dict(zip(("messages", "reward", "done"), result, strict=False))
    elif isinstance(result, (str, list)):
        result = {"messages": result}
    elif result is None:
        result = {}
    if not isinstance(result, dict):
        raise TypeError(f"{where}: got {shortened(result)}, {expected}")
    if unknown := sorted(map(str, set(result) - set(keys))):
        raise TypeError(f"{where}: got the key {unknown[0]!r}, {expected}")
    reply = {key: value for key, value in result.items() if value is not None}
    _check_types(reply, where, {"messages": (str, list), "tools": list, "done": bool, "rewards": dict})
    for key in ("reward", "invalid_calls"):
        if key in reply:
            reply[key] = _finite(reply[key], f"{where}: {key}")
    if "rewards" in reply:
        reply["rewards"] = {k: _finite(v, f"{where}: rewards[{k!r}]") for k, v in reply["rewards"].items()}
    return reply


def _check_types(reply: dict[str, Any], where: str, types: Mapping[str, Any]) -> None:
    for key, kind in types.items():
        if key in reply and not isinstance(reply[key], kind):
            names = [each.__name__ for each in (kind if isinstance(kind, Iterable) else (kind,))]
            raise TypeError(f"{where}: {key}: got {shortened(reply[key])}, expected {' or '.join(names)}")

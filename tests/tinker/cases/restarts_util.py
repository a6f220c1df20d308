"""A service that is killed and started again, and clients that send requests again, in another order, twice,
and leave connections."""

import contextlib
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from serve_util import Served
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker_util import VOCABULARY, as_json, datum

from tinker import types

PATIENCE = 120  # seconds until a request must have its answer
# Not smaller, because Adam's update of a gradient near eps amplifies rounding errors.
ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-4)


class Killable:
    """A service that starts again at the same port, with the same folder, after it was killed."""

    def __init__(self, program: Path, model: Path, folder: Path, *settings: str):
        self.folder = folder / "tinker"
        self.model = model
        self.arguments = (program, model, "--train", f"folder={self.folder}", "max_models=64", *settings)
        self.served = Served(*self.arguments)
        self.address = self.served.address
        self.url = self.served.url
        self.lock = threading.Lock()

    def kill(self) -> None:
        with self.lock:
            self.served.process.kill()
            self.served.process.wait()
            self.served.stop()
            self.start()

    def start(self) -> None:
        self.served = Served(*self.arguments, port=self.address[1])

    def tensors(self, path: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / path.removeprefix("tinker://") / "adapter_model.safetensors")

    def states(self) -> list[Path]:
        """The folders of steps that the journal has, also of one that is being written."""
        return [*self.folder.glob(".state/*/*/step-*"), *self.folder.glob(".state/*/*/.step")]


@dataclass
class Call:
    """A request of a model, without its model's id."""

    seq_id: int
    kind: str  # forward_backward, forward, optim_step or save_weights
    batch: list[types.Datum] | None = None
    loss: str = "cross_entropy"
    is_json: bool = False

    def message(self, model: str) -> tuple[str, bytes, str]:
        """Route, body and content type."""
        body: Any = {"model_id": model, "seq_id": self.seq_id}
        if self.kind == "optim_step":
            body["adam_params"] = ADAM.model_dump()
        elif self.kind == "save_weights":
            body["path"] = f"at-{self.seq_id}"
        else:
            request = types.ForwardBackwardRequest(
                forward_backward_input=types.ForwardBackwardInput(data=self.batch, loss_fn=self.loss),
                **body,
            )
            if not self.is_json:
                message = forward_backward_request_to_proto(request)
                return self.kind, message.SerializeToString(), "application/x-protobuf"
            body = as_json(request)
        return self.kind, json.dumps(body).encode(), "application/json"


def make_program(seed: int) -> list[Call]:
    """Some steps of training, each with its gradients in pieces, and the weights saved after it."""
    rng = random.Random(seed)
    calls: list[Call] = []

    def add(kind: str, **settings: Any) -> None:
        calls.append(Call(len(calls) + 1, kind, **settings))

    def batch(loss: str) -> list[types.Datum]:
        data = []
        prompt = [rng.randrange(3, VOCABULARY) for _ in range(5)]
        for _ in range(rng.randint(1, 3)):
            tokens = prompt + [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(2, 6))]
            inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
            if loss != "cross_entropy":
                inputs["logprobs"] = [rng.uniform(-6, -5) for _ in tokens[1:]]
                inputs["advantages"] = [rng.uniform(-1, 1) for _ in tokens[1:]]
            data.append(datum(tokens[:-1], **inputs))
        return data

    for _ in range(rng.randint(4, 6)):
        for _ in range(rng.randint(1, 3)):
            loss = rng.choice(["cross_entropy", "importance_sampling"])
            add("forward_backward", batch=batch(loss), loss=loss, is_json=rng.random() < 0.5)
            if rng.random() < 0.3:
                add("forward", batch=batch("cross_entropy"), is_json=True)
        add("optim_step")
        add("save_weights")
    return calls


class Lost(Exception):
    """The connection ended before the answer."""


def send(address: tuple[str, int], route: str, body: bytes, content_type: str, mishap: str = "") -> Any:
    """Posts a request as raw HTTP. mishap: half, the connection ends within the body; lost, the answer is
    not read. Returns the answer's JSON, or None if the service asks to try again. Throws Lost."""
    head = f"POST /api/v1/{route} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        with socket.create_connection(address, timeout=5) as connection:
            if mishap == "half":
                connection.sendall(head.encode() + body[: len(body) // 2])
                raise Lost
            connection.sendall(head.encode() + body)
            if mishap == "lost":
                raise Lost
            answer = b""
            while part := connection.recv(1 << 16):
                answer += part
    except OSError as error:
        raise Lost from error
    header, end, content = answer.partition(b"\r\n\r\n")
    if not end or b"content-length: %d\r\n" % len(content) not in header.lower() + b"\r\n":
        raise Lost
    status = int(header.split()[1])
    if status == 429 or status >= 500:
        return None
    assert status == 200, answer
    return json.loads(content)


class Client:
    """A client of one model to which everything happens that can happen. Without `rng`: nothing does."""

    def __init__(self, service: Any, rng: random.Random | None = None):
        self.service = service
        self.rng = rng
        self.model = ""
        self.results: dict[str, Any] = {}

    def post(self, route: str, body: bytes, content_type: str = "application/json") -> Any:
        """The answer of a request that is sent until there is one."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            mishap = self.rng.choice(["half", "lost"]) if self.rng and self.rng.random() < 0.25 else ""
            with contextlib.suppress(Lost):
                answer = send(self.service.address, route, body, content_type, mishap)
                if answer is not None:
                    return answer
            if not mishap:
                time.sleep(0.05)
        raise TimeoutError(route)

    def post_json(self, route: str, body: Any) -> Any:
        return self.post(route, json.dumps(body).encode())

    def submit(self, call: Call) -> None:
        """Sends the call, sometimes twice."""
        for _ in range(2 if self.rng and self.rng.random() < 0.2 else 1):
            answer = self.post(*call.message(self.model))
            assert answer["request_id"] == f"{self.model}/{call.seq_id}"

    def fetch(self, request: str) -> Any:
        """A result. If it was fetched before, it must be the same but for rounding."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            answer = self.post_json("retrieve_future", {"request_id": request})
            if answer.get("type") != "try_again":
                assert "error" not in answer, answer
                if request in self.results:
                    assert_same_result(answer, self.results[request])
                self.results[request] = answer
                return answer
        raise TimeoutError(request)

    def begin(self) -> None:
        self.session = self.post_json("create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": self.service.model.name}
        request = self.post_json("create_model", {**body, "lora_config": {"rank": 2, "seed": 3}})
        self.model = request["model_id"]
        self.fetch(request["request_id"])

    def finish(self) -> None:
        self.post_json(f"sessions/{self.session}/finish", {})


def assert_same_result(answer: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert answer.keys() == wanted.keys()
        for key in wanted:
            assert_same_result(answer[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(answer) == len(wanted)
        for left, right in zip(answer, wanted, strict=True):
            assert_same_result(left, right)
    elif isinstance(wanted, float):
        assert answer == pytest.approx(wanted, rel=1e-6, abs=1e-9)  # log-probabilities are fp32
    else:
        assert answer == wanted


def undisturbed(service: Any, program: list[Call]) -> tuple[list[Any], list[dict[str, torch.Tensor]]]:
    """The results of a program, and the weights that it saves."""
    client = Client(service)
    client.begin()
    results = []
    for call in program:
        client.submit(call)
        results.append(client.fetch(f"{client.model}/{call.seq_id}"))
    weights = [service.tensors(result["path"]) for result in results if "path" in result]
    client.finish()
    return results, weights


def kill_later(service: Killable, rng: random.Random) -> threading.Thread:
    """Kills the service at a random moment, or while it writes a step."""
    known, wait = set(service.states()), rng.random() < 0.5
    delay = rng.uniform(0, 0.3)

    def work() -> None:
        end = time.monotonic() + (3 if wait else 0)
        while time.monotonic() < end and set(service.states()) <= known:
            time.sleep(0.0002)
        time.sleep(delay if not wait else delay / 100)
        service.kill()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def check_schedule(service: Killable, calm: Any, seed: int) -> None:
    """Runs a random program under a random schedule."""
    program = make_program(seed)
    results, weights = undisturbed(calm, program)
    rng = random.Random(1000 + seed)
    client = Client(service, rng)
    client.begin()
    begin, kills = 0, 0
    with ThreadPoolExecutor(6) as pool:
        while begin < len(program):
            window = program[begin : begin + rng.randint(1, 6)]
            begin += len(window)
            killer = None
            is_last = begin == len(program)
            if (rng.random() < 0.45 and kills < 3) or (is_last and kills == 0):
                kills += 1
                killer = kill_later(service, rng)
            again = rng.sample(program[: begin - len(window)], min(2, begin - len(window)))
            order = rng.sample(window + again, len(window + again))
            submitted = list(pool.map(client.submit, order))
            assert len(submitted) == len(order)
            wanted = [call for call in order if rng.random() < 0.7]
            list(pool.map(client.fetch, [f"{client.model}/{call.seq_id}" for call in wanted]))
            if killer:
                killer.join()
            elif rng.random() < 0.15:  # between two requests, when nothing runs
                service.kill()
    for call, result in zip(program, results, strict=True):
        found = json.dumps(client.fetch(f"{client.model}/{call.seq_id}"))
        assert_same_result(json.loads(found.replace(client.model, "M")), anonymous(result))
    saved = [
        client.results[f"{client.model}/{call.seq_id}"] for call in program if call.kind == "save_weights"
    ]
    for step, (result, wanted) in enumerate(zip(saved, weights, strict=True)):
        found = service.tensors(result["path"])
        for name in wanted:
            torch.testing.assert_close(
                found[name], wanted[name], rtol=0, atol=1e-10, msg=f"seed {seed}, step {step}: {name}"
            )
    client.finish()


def anonymous(result: Any) -> Any:
    """A result with M in place of its model's id."""
    text = json.dumps(result)
    if "path" in result:
        text = text.replace(result["path"].split("/")[2], "M")
    return json.loads(text)

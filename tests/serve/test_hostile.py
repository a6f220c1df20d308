"""Adversarial and careless clients, beside clients that want answers."""

import asyncio
import json
import signal
import time
from pathlib import Path

import pytest
from serve_util import Served

PROMPTS = ["The thing", "12 00", "in the end", "ü"]


def request(body: dict | bytes, path: str = "/v1/completions") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def greedy(prompt: str, tokens: int = 30) -> dict:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


class Client:
    def __init__(self, served: Served):
        self.address = served.address

    async def __aenter__(self) -> "Client":
        self.reader, self.writer = await asyncio.open_connection(*self.address)
        return self

    async def __aexit__(self, *_) -> None:
        self.writer.close()

    async def ask(self, data: bytes) -> tuple[int, bytes]:
        """Returns status and body."""
        self.writer.write(data)
        head, _, body = (await asyncio.wait_for(self.reader.read(), 120)).partition(b"\r\n\r\n")
        return (int(head.split()[1]) if head else 0), body


async def complete(served: Served, prompt: str) -> str:
    async with Client(served) as client:
        status, body = await client.ask(request(greedy(prompt)))
    assert status == 200, body
    return json.loads(body)["choices"][0]["text"]


async def disconnect_midway(served: Served) -> None:
    async with Client(served) as client:
        client.writer.write(request({**greedy("on and on", 1500), "stream": True, "n": 2}))
        await client.reader.readuntil(b"data: ")


async def disconnect_at_once(served: Served) -> None:
    async with Client(served) as client:
        client.writer.write(request(greedy("on and on", 1500)))
        await client.writer.drain()


async def send_garbage(served: Served) -> None:
    for data in (b"\x16\x03\x01\x00\xa5\x01\x00" * 9, b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 40000):
        async with Client(served) as client:
            status, _ = await client.ask(data)
            assert status in (0, 400, 408, 431)
    for body in (b"{", b"\xff" * 99, b"[" * 99999, b'{"prompt": [1e99]}', b'{"prompt": {"a": 1}}', b"null"):
        async with Client(served) as client:
            status, answer = await client.ask(request(body))
            assert status == 400, answer
            assert json.loads(answer)["error"]["message"]


async def send_long_prompt(served: Served) -> None:
    async with Client(served) as client:
        status, body = await client.ask(request({"prompt": "the " * 2_500_000}))
    assert (status, json.loads(body)["error"]["code"]) == (400, "context_length_exceeded")


async def send_endless_chunks(served: Served) -> None:
    sent = 0
    async with Client(served) as client:
        client.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            while sent < 1 << 30:
                client.writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                sent += 65536
                await client.writer.drain()
        except ConnectionError:
            pass
    assert sent < 200 << 20


async def read_nothing(served: Served) -> None:
    async with Client(served) as client:
        client.writer.write(request({**greedy("on and on", 1500), "stream": True}))
        await asyncio.sleep(2)


async def stay_half_open(served: Served) -> None:
    async with Client(served) as client:
        client.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
        await asyncio.sleep(2)


ADVERSARIAL = [
    disconnect_midway,
    disconnect_at_once,
    send_garbage,
    send_long_prompt,
    send_endless_chunks,
    read_nothing,
    stay_half_open,
]


async def storm(served: Served, clients: int, adversarial: int) -> list[str]:
    answers = [complete(served, PROMPTS[i % len(PROMPTS)]) for i in range(clients)]
    harm = [ADVERSARIAL[i % len(ADVERSARIAL)](served) for i in range(adversarial)]
    done = await asyncio.gather(*harm, *answers)
    return done[adversarial:]


def wait_until_quiet(served: Served) -> dict[str, float]:
    deadline = time.monotonic() + 30
    while True:
        metrics = served.metrics()
        # The remaining connection is the one that requests the metrics.
        if metrics["requests_in_flight"] == 0 and metrics["connections"] == 1:
            return metrics
        assert time.monotonic() < deadline, metrics
        time.sleep(0.1)


def descriptors_at_rest(served: Served) -> int:
    """Returns the smallest count within a second, since the server may not have closed the last connection
    yet."""
    counts = []
    for _ in range(10):
        counts.append(served.descriptors())
        time.sleep(0.1)
    return min(counts)


@pytest.fixture(scope="module")
def attacked(bough_program: Path, tiny_models):
    settings = ["http.header_timeout_seconds=60", "log_requests=false", "rollout.kv_memory=16MiB"]
    with Served(bough_program, tiny_models("qwen3"), *settings) as served:
        yield served


def test_adversarial_clients_do_not_disturb_others(attacked: Served):
    expected = [asyncio.run(complete(attacked, prompt)) for prompt in PROMPTS]
    assert len(set(expected)) == len(PROMPTS)
    descriptors = descriptors_at_rest(attacked)
    sizes = []
    for _ in range(3):
        answers = asyncio.run(storm(attacked, clients=40, adversarial=14))
        assert answers == [expected[i % len(PROMPTS)] for i in range(40)]
        wait_until_quiet(attacked)
        assert descriptors_at_rest(attacked) == descriptors
        sizes.append(attacked.resident_bytes())
    assert attacked.process.poll() is None
    assert sizes[2] < sizes[1] + (64 << 20), "memory is left"


@pytest.mark.slow
def test_two_hundred_clients_of_which_a_tenth_are_adversarial(attacked: Served):
    expected = [asyncio.run(complete(attacked, prompt)) for prompt in PROMPTS]
    descriptors = descriptors_at_rest(attacked)
    for _ in range(5):
        answers = asyncio.run(storm(attacked, clients=180, adversarial=20))
        assert answers == [expected[i % len(PROMPTS)] for i in range(180)]
        wait_until_quiet(attacked)
    assert descriptors_at_rest(attacked) == descriptors


def test_generation_stops_for_disconnected_clients(attacked: Served):
    before = wait_until_quiet(attacked)["engine_new_tokens_total"]

    async def leave() -> None:
        await asyncio.gather(*[disconnect_midway(attacked) for _ in range(10)])

    asyncio.run(leave())
    generated = wait_until_quiet(attacked)["engine_new_tokens_total"] - before
    assert generated < 10 * 2 * 1500 / 2


def test_pages_of_disconnected_clients_are_freed(bough_program: Path, tiny_models):
    """The budget holds one long sample. Pages that were not freed would leave no room for the next sample."""
    settings = ["rollout.kv_memory=2400KiB", "log_requests=false"]
    with Served(bough_program, tiny_models("qwen3"), *settings) as served:
        for _ in range(8):
            asyncio.run(disconnect_midway(served))
        wait_until_quiet(served)
        status, body = asyncio.run(ask_once(served, greedy("on and on", 1500)))
        assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 1500)
        assert served.metrics()["engine_preemptions_total"] == 0


async def ask_once(served: Served, body: dict) -> tuple[int, bytes]:
    async with Client(served) as client:
        return await client.ask(request(body))


def test_streams_do_not_wait_for_each_other(attacked: Served):
    async def times() -> tuple[float, float]:
        async with Client(attacked) as client:
            client.writer.write(request({**greedy("go", 400), "stream": True}))
            await client.reader.readuntil(b"data: ")
            begun = time.monotonic()
            assert (await client.reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            return begun, time.monotonic()

    async def all_of_them() -> list[tuple[float, float]]:
        return await asyncio.gather(*[times() for _ in range(64)])

    done = asyncio.run(all_of_them())
    assert max(begun for begun, _ in done) < min(ended for _, ended in done)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_when_streams_are_done(bough_program: Path, tiny_models, number: int):
    async def stream(served: Served) -> bytes:
        async with Client(served) as client:
            client.writer.write(request({**greedy("go", 300), "stream": True}))
            await client.reader.readuntil(b"data: ")
            served.process.send_signal(number)
            return await client.reader.read()

    with Served(bough_program, tiny_models("qwen3")) as served:
        assert asyncio.run(stream(served)).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert served.process.wait(30) == 0
        assert "stopping; 1 requests" in served.log.read_text()
        assert len(served.process.stdout.read()) == 0  # stdout had one line of JSON only

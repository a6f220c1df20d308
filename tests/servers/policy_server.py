"""A small server with the parts of vLLM's and of SGLang's API that `rollout.backend` uses: a fixture.

The server is neither vLLM nor SGLang. transformers computes one token after the other, and other requests
make a request no faster. The server follows the real ones in its answers, the end of a generation, and its
handling of weights. Real vLLM runs in tests/runs/test_slow_vllm.py.

Prints the line {"url": ...} once it listens."""

import argparse
import base64
import io
import json
import threading
import zlib
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache


class Policy:
    """The model, and the state that every request checks: whether it is aborted, and whether the server
    dies."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.lock = threading.Lock()  # protects the model
        self.epoch = 0  # requests of an earlier epoch are aborted
        self.paused = threading.Event()
        self.running = 0
        self.drawn = 0
        self.loads = []
        self.experts = {}  # by layer: [T, K], the experts of the tokens of the last pass
        self.expert_random = torch.Generator().manual_seed(1)
        self.ids = []  # the tokens of the pass and those before them
        self.load(arguments.model)

    def load(self, path):
        if not (Path(path) / "model.safetensors").exists():
            raise FileNotFoundError(path)
        with self.lock:
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            self.loads.append(str(path))
            for number, layer in enumerate(self.model.model.layers):
                if hasattr(layer.mlp, "gate") and hasattr(layer.mlp, "experts"):
                    layer.mlp.gate.forward = partial(self.route, layer.mlp.gate, number)

    def route(self, router, layer, x):
        """A router's forward pass that records its choice, which --random-experts replaces."""
        logits_TE = torch.nn.functional.linear(x.reshape(-1, router.hidden_dim), router.weight)
        scores_TE = logits_TE
        if self.arguments.random_experts == "request":
            scores_TE = torch.rand(logits_TE.shape, generator=self.expert_random)
        if self.arguments.random_experts == "prefix":
            seeds = [zlib.crc32(repr((layer, self.ids[: i + 1])).encode()) for i in range(len(self.ids))]
            of_token = [torch.Generator().manual_seed(seed) for seed in seeds[-len(logits_TE) :]]
            scores_TE = torch.stack([torch.rand(logits_TE.shape[1], generator=each) for each in of_token])
        experts_TK = scores_TE.topk(router.top_k).indices
        weights_TK = logits_TE.softmax(-1).gather(1, experts_TK)
        if getattr(router, "norm_topk_prob", True):  # Mixtral's class always does
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        self.experts[layer] = experts_TK
        return logits_TE, weights_TK, experts_TK

    def rows(self):
        """[T, layers, K] of the last pass, 0 in layers without experts, as the real servers."""
        [shape] = {experts.shape for experts in self.experts.values()} or {(0, 0)}
        layers = range(self.model.config.num_hidden_layers + self.arguments.more_layers)
        return torch.stack([self.experts.get(i, torch.zeros(shape, dtype=int)) for i in layers], 1).numpy()

    def abort(self):
        self.epoch += 1

    @torch.no_grad()
    def generate(self, ids, count, temperature, top, stops, request):
        """Yields (token, log-probability, [(log-probability, token), ...], finish_reason or None, experts).

        experts: with a finish reason those of all tokens of prompt and response but the last, else None."""
        while self.paused.is_set():
            threading.Event().wait(0.01)
        epoch, cache = self.epoch, DynamicCache()
        random = torch.Generator().manual_seed(int.from_bytes(request.encode()[-7:], "big"))
        inputs, rows, ids = torch.tensor([ids]), [], list(ids)
        with self.lock:
            self.running += 1
        try:
            for number in range(count):
                with self.lock:
                    if epoch != self.epoch:
                        yield None, None, None, "abort", np.concatenate(rows) if rows else None
                        return
                    self.ids = ids
                    logits_V = self.model(inputs, past_key_values=cache).logits[0, -1].double()
                    rows.append(self.rows())
                    self.drawn += 1
                if self.arguments.die_after and self.drawn >= self.arguments.die_after:
                    import os

                    os._exit(1)
                log_probs_V = torch.log_softmax(logits_V / (temperature or 1), -1)
                if temperature == 0:
                    token = int(logits_V.argmax())
                else:
                    token = int(torch.multinomial(log_probs_V.exp(), 1, generator=random))
                if self.arguments.raw_logprobs:
                    log_probs_V = torch.log_softmax(logits_V, -1)
                best = log_probs_V.topk(top) if top else None
                entries = list(zip(best.values.tolist(), best.indices.tolist(), strict=True)) if top else []
                reason = "stop" if token in stops else "length" if number + 1 == count else None
                experts = np.concatenate(rows) if reason else None
                yield token, float(log_probs_V[token]), entries, reason, experts
                if reason:
                    return
                inputs = torch.tensor([[token]])
                ids.append(token)
        finally:
            with self.lock:
                self.running -= 1


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    policy: Policy

    def log_message(self, *_):
        pass

    def answer(self, value, status=200):
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def event(self, text):
        data = f"data: {text}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def begin_stream(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def may(self):
        key = self.policy.arguments.api_key
        if not key or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self.answer({"error": "Unauthorized"}, 401)
        return False

    def do_GET(self):
        path = str(Path(self.policy.arguments.model))
        if self.path == "/loads":
            return self.answer(self.policy.loads)
        if not self.may():
            return None
        if self.policy.arguments.api == "vllm" and self.path == "/v1/models":
            model = {"id": "policy", "object": "model", "max_model_len": self.policy.arguments.max_length}
            return self.answer({"object": "list", "data": [model]})
        if self.policy.arguments.api == "sglang" and self.path == "/get_model_info":
            return self.answer({"model_path": path, "tokenizer_path": path, "is_generation": True})
        return self.answer({"detail": "Not Found"}, 404)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = json.loads(body) if body else {}
        if self.path == "/configure":  # only in this fixture: the options of the command line
            vars(self.policy.arguments).update(asked)
            self.policy.loads.clear()
            return self.answer({})
        routes = self.vllm_routes() if self.policy.arguments.api == "vllm" else self.sglang_routes()
        route = routes.get(self.path.split("?")[0])
        if not self.may():
            return None
        if route is None:
            return self.answer({"detail": "Not Found"}, 404)
        try:
            route(asked)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except FileNotFoundError as error:
            self.answer({"error": {"message": f"no model in {error}"}}, 500)
        return None

    # vLLM.

    def vllm_routes(self):
        return {
            "/v1/completions": self.complete,
            **({"/inference/v1/generate": self.generate_tokens} if self.policy.arguments.experts else {}),
            "/pause": lambda _: self.pause(),
            "/resume": lambda _: self.resume(),
            "/collective_rpc": self.call_workers,
            "/reset_prefix_cache": lambda _: self.answer({"success": self.policy.running == 0}),
        }

    def complete(self, asked):
        assert asked["stream"] and asked["return_token_ids"] and asked["return_tokens_as_token_ids"]
        assert asked["top_p"] == 1 and asked["top_k"] == 0 and asked["repetition_penalty"] == 1
        self.begin_stream()
        stops = [] if asked["ignore_eos"] else asked["stop_token_ids"]
        top = asked["logprobs"]
        drawn = self.policy.generate(
            asked["prompt"], asked["max_tokens"], asked["temperature"], top, stops, asked["request_id"]
        )
        for token, logprob, best, reason, _ in drawn:
            choice = {"index": 0, "text": "", "finish_reason": reason, "token_ids": [], "logprobs": None}
            if token is not None:
                named = {f"token_id:{token}": logprob} | {f"token_id:{t}": p for p, t in best}
                choice |= {"token_ids": [token]}
                choice["logprobs"] = {"token_logprobs": [logprob], "top_logprobs": [named]}
            self.event(json.dumps({"object": "text_completion", "choices": [choice]}))
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    # With the server's options --enable-scale-out and --enable-return-routed-experts.
    def generate_tokens(self, asked):
        sampling = asked["sampling_params"]
        assert asked["stream"] and sampling["top_p"] == 1 and sampling["top_k"] == 0
        self.begin_stream()
        stops = [] if sampling["ignore_eos"] else sampling["stop_token_ids"]
        drawn = self.policy.generate(
            asked["token_ids"],
            sampling["max_tokens"],
            sampling["temperature"],
            sampling["logprobs"],
            stops,
            asked["request_id"],
        )
        for token, logprob, best, reason, experts in drawn:
            choice = {"index": 0, "finish_reason": reason, "stop_reason": None, "token_ids": []}
            choice |= {"logprobs": {"content": []}, "routed_experts": None}
            if token is not None:
                choice["token_ids"] = [token]
                named = {token: logprob} | {t: p for p, t in best}
                top = [{"token_id": t, "logprob": p, "rank": None} for t, p in named.items()]
                # vLLM 0.32 counts the sampled token among the most likely ones that were asked for.
                top = top[: max(1, sampling["logprobs"])]
                entry = {"token_id": token, "logprob": logprob, "rank": None, "top_logprobs": top}
                choice["logprobs"] = {"content": [entry]}
            if reason and experts is not None:
                file = io.BytesIO()
                np.save(file, experts.astype(np.uint8), allow_pickle=False)
                choice["routed_experts"] = base64.b64encode(file.getbuffer()).decode()
            self.event(json.dumps({"request_id": asked["request_id"], "choices": [choice]}))
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def pause(self):
        self.policy.paused.set()
        self.policy.abort()
        self.answer({"status": "paused"})

    def resume(self):
        self.policy.paused.clear()
        self.answer({"status": "resumed"})

    def call_workers(self, asked):
        assert asked["method"] == "reload_weights"
        self.policy.load(asked["kwargs"]["weights_path"])
        self.answer({"results": [None]})

    # SGLang.

    def sglang_routes(self):
        return {
            "/generate": self.generate,
            "/pause_generation": lambda _: self.pause(),
            "/continue_generation": lambda _: self.resume(),
            "/update_weights_from_disk": self.update_weights,
            "/flush_cache": lambda _: self.answer("Cache flushed.\n"),
        }

    def generate(self, asked):
        sampling, top = asked["sampling_params"], asked["top_logprobs_num"]
        assert asked["stream"] and asked["return_logprob"]
        assert sampling["top_p"] == 1 and sampling["top_k"] == -1
        self.begin_stream()
        listed, best_of = [], []
        stops = [] if sampling["ignore_eos"] else sampling["stop_token_ids"]
        drawn = self.policy.generate(
            asked["input_ids"], sampling["max_new_tokens"], sampling["temperature"], top, stops, asked["rid"]
        )
        total = 0
        for token, logprob, best, reason, experts in drawn:
            if self.policy.arguments.incremental:
                listed, best_of = [], []
            if token is not None:
                total += 1
                listed.append([logprob, token, None])
                best_of.append([[p, t, None] for p, t in best])
            meta = {"id": asked["rid"], "finish_reason": None, "completion_tokens": total}
            meta |= {"output_token_logprobs": listed, "output_top_logprobs": best_of}
            if reason:
                meta["finish_reason"] = {"type": reason}
                if self.policy.arguments.experts and asked.get("return_routed_experts"):
                    flat = experts.astype(np.int32).tobytes()
                    meta["routed_experts"] = base64.b64encode(flat).decode()
            self.event(json.dumps({"text": "", "output_ids": [], "meta_info": meta}))
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def update_weights(self, asked):
        try:
            self.policy.load(asked["model_path"])
            self.answer({"success": True, "message": "Succeeded to update model weights."})
        except FileNotFoundError as error:
            self.answer({"success": False, "message": f"no model in {error}"}, 400)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--api", choices=["vllm", "sglang"], required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--max-length", type=int, default=1 << 20)
    parser.add_argument("--raw-logprobs", action="store_true", help="of temperature 1, whatever is asked")
    parser.add_argument("--incremental", action="store_true", help="SGLang: lists are of the event's tokens")
    parser.add_argument("--experts", action="store_true", help="returns the experts of a mixture")
    chances = "chosen by chance, anew for each request, or the same for the same prefix (a prefix cache)"
    parser.add_argument("--random-experts", choices=["", "request", "prefix"], default="", help=chances)
    parser.add_argument("--more-layers", type=int, default=0, help="in the experts, beyond the model's")
    parser.add_argument("--die-after", type=int, default=0, help="tokens")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    Handler.policy = Policy(arguments)
    server = ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler)
    server.daemon_threads = True
    print(json.dumps({"url": f"http://127.0.0.1:{server.server_address[1]}"}), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

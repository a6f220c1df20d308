"""A training service for tests, its clients, and the same model in PEFT."""

import http.client
import json
import os
import threading
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file
from serve_util import Served
from tinker.proto.request_conv import forward_backward_request_to_proto
from transformers import AutoModelForCausalLM

import tinker
from tinker import types

VOCABULARY = 311  # of the tiny models
PREFIX = "base_model.model."


def paths_in(folder):
    """All files and folders. Unlike rglob, a walk bears that the service removes a folder meanwhile."""
    walk = os.walk(folder)
    return {Path(place) / name for place, folders, files in walk for name in [*folders, *files]}


class Service(Served):
    """`bough serve --train` with its folder of checkpoints, and one session of Tinker's SDK."""

    def __init__(self, program: Path, model: Path, folder: Path, *settings: str, env: Any = None):
        self.folder = folder / "tinker"
        self.model = model
        super().__init__(program, model, "--train", f"folder={self.folder}", *settings, env=env)
        self.client = tinker.ServiceClient(base_url=self.url)

    def train(self, rank: int = 4, **settings: Any) -> tinker.TrainingClient:
        return self.client.create_lora_training_client(
            base_model=self.model.name, rank=rank, **settings
        ).result()

    def checkpoint(self, path: str) -> Path:
        """The folder of a tinker:// path."""
        return self.folder / path.removeprefix("tinker://")

    def weights(self, client: tinker.TrainingClient) -> dict[str, torch.Tensor]:
        """The adapter's tensors as they are now."""
        return self.tensors(client.save_state("now", overwrite=True).result().path)

    def tensors(self, path: str) -> dict[str, torch.Tensor]:
        return load_file(self.checkpoint(path) / "adapter_model.safetensors")

    def train_random(self, name: str, **settings: Any) -> tuple[tinker.TrainingClient, str]:
        """A client whose adapter has random A and B, and the path of its checkpoint."""
        client = self.train(**settings)
        path = client.save_state(name).result().path
        file = self.checkpoint(path) / "adapter_model.safetensors"
        generator = torch.Generator().manual_seed(5)
        tensors = {
            key: (0.2 * torch.randn(value.shape, generator=generator)).to(value.dtype)
            for key, value in load_file(file).items()
        }
        save_file(tensors, file)
        client.load_state(path).result()
        return client, path


def peft_model(base: Path, adapter: Path, dtype: torch.dtype):
    """The model with the adapter of a checkpoint, as PEFT loads it, and its trained tensors by their names in
    the file."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    tensors = load_file(adapter / "adapter_model.safetensors")
    parameters = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            key = name.replace(".default", "")
            parameter.data = tensors[key].to(dtype).clone()
            parameters[key] = parameter
    assert parameters.keys() == tensors.keys()
    return model, parameters


def log_probs(model, tokens: list[int], targets: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of targets [T] or [T, K] at the positions of the tokens."""
    values = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    ids = targets if targets.dim() == 2 else targets.unsqueeze(1)
    return values.gather(1, ids).reshape(targets.shape)


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


class HttpError(Exception):
    """An answer other than 2xx."""

    def __init__(self, status: int, body: str):
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


class RawClient:
    """Requests as raw HTTP, for tests of what the SDK would not send."""

    def __init__(self, service: Service, key: str = "tml-dummy"):
        self.service = service
        self.key = key

    def send(self, route: str, body: bytes, content_type: str = "application/json", **headers: str) -> bytes:
        """Throws HttpError unless the answer is 2xx."""
        connection = http.client.HTTPConnection(*self.service.address, timeout=60)
        try:
            headers = {
                "Content-Type": content_type,
                "X-API-Key": self.key,
                **{k.replace("_", "-"): v for k, v in headers.items()},
            }
            connection.request("POST", f"/api/v1/{route}", body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status // 100 != 2:
            raise HttpError(answer.status, content.decode(errors="replace"))
        return content

    def post(self, route: str, body: Any) -> Any:
        return json.loads(self.send(route, json.dumps(body).encode()))

    def result(
        self, request: Any, timeout: float = 60, protobuf: bool = False, may_fail: bool = False
    ) -> Any:
        """The result of a request, given as its answer or id. Throws TimeoutError if it takes longer."""
        request_id = request if isinstance(request, str) else request["request_id"]
        body = json.dumps({"request_id": request_id, "allow_metadata_only": False}).encode()
        answers: list[bytes] = []
        headers = {"Accept": "application/x-protobuf" if protobuf else "application/json"}
        thread = threading.Thread(
            target=lambda: answers.append(self.send("retrieve_future", body, **headers)), daemon=True
        )
        thread.start()
        thread.join(timeout)
        if not answers:
            raise TimeoutError(request_id)
        if protobuf:
            return answers[0]
        answer = json.loads(answers[0])
        if "error" in answer and not may_fail:
            raise RuntimeError(answer["error"])
        return answer

    def session(self) -> str:
        return self.post("create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]

    def create(self, session: str, number: int = 0) -> str:
        """Creates a model and returns its id."""
        body = {"session_id": session, "model_seq_id": number, "base_model": self.service.model.name}
        return self.result(self.post("create_model", {**body, "lora_config": {"rank": 2}}))["model_id"]

    def create_from(self, session: str, path: str, number: int = 0) -> str:
        body = {"session_id": session, "model_seq_id": number, "path": path, "optimizer": False}
        return self.result(self.post("load_weights", body))["model_id"]

    def forward_backward(self, model: str, seq_id: int, data: list[types.Datum], encoding: str) -> str:
        """Returns the request's id."""
        request = types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn="cross_entropy"),
            model_id=model,
            seq_id=seq_id,
        )
        message = forward_backward_request_to_proto(request)
        if encoding == "protobuf":
            body, content_type = message.SerializeToString(), "application/x-protobuf"
        else:
            body, content_type = json.dumps(as_json(request)).encode(), "application/json"
        return json.loads(self.send("forward_backward", body, content_type))["request_id"]


def as_json(request: types.ForwardBackwardRequest) -> dict[str, Any]:
    """The body that SDKs before 0.25 sent."""
    data = []
    for each in request.forward_backward_input.data:
        inputs = {
            name: {"data": value.data, "dtype": value.dtype, "shape": value.shape}
            for name, value in each.loss_fn_inputs.items()
        }
        chunks = [{"type": "encoded_text", "tokens": each.model_input.to_ints()}]
        data.append({"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs})
    loss = request.forward_backward_input.loss_fn
    return {
        "forward_backward_input": {"data": data, "loss_fn": loss},
        "model_id": request.model_id,
        "seq_id": request.seq_id,
    }

"""Adversarial requests: each gets a 4xx whose message names the field, and the service goes on working."""

import copy
import json

import numpy as np
import pytest
import zstandard
from tinker.proto import tinker_public_pb2 as public_pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker_util import HttpError, RawClient, as_json, datum, paths_in

from tinker import types

TOKENS = [20, 31, 42, 53]


@pytest.fixture(scope="module")
def raw(service):
    return RawClient(service)


@pytest.fixture(scope="module")
def model(raw):
    return raw.create(raw.session())


@pytest.fixture(scope="module")
def sampler(raw, service):
    body = {"session_id": raw.session(), "sampling_session_seq_id": 0, "base_model": service.model.name}
    return raw.post("create_sampling_session", body)["sampling_session_id"]


def request(model: str) -> types.ForwardBackwardRequest:
    fields = {"target_tokens": TOKENS, "logprobs": [-1.0] * 4, "advantages": [1.0] * 4}
    return types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=[datum(TOKENS, **fields)], loss_fn="ppo"),
        model_id=model,
        seq_id=1,
    )


def refused(raw, route: str, body: bytes, content_type: str = "application/json") -> HttpError:
    with pytest.raises(HttpError) as caught:
        raw.send(route, body, content_type)
    return caught.value


def expect(error: HttpError, *words: str) -> None:
    assert 400 <= error.status < 500, error
    for word in words:
        assert word in json.loads(error.body)["detail"], error


@pytest.fixture(autouse=True)
def goes_on(raw, model):
    """After each test the service computes as before."""
    yield
    assert raw.service.process.poll() is None
    session = raw.session()
    other = raw.create(session)
    result = raw.result(raw.forward_backward(other, 1, [datum(TOKENS, target_tokens=TOKENS)], "protobuf"))
    assert len(result["loss_fn_outputs"]) == 1
    raw.post(f"sessions/{session}/finish", {})


def change(path: str, value):
    """Sets an entry of a JSON body. `path` is separated by points."""

    def apply(body):
        at = body
        *steps, last = path.split(".")
        for step in steps:
            at = at[int(step) if step.isdigit() else step]
        if value is KeyError:
            del at[last]
        else:
            at[int(last) if last.isdigit() else last] = value

    return apply


INPUT = "forward_backward_input"
FIRST = f"{INPUT}.data.0"
FIELDS = f"{FIRST}.loss_fn_inputs"
SPARSE = {"data": [1], "shape": [4, 1], "sparse_crow_indices": [0, 1, 1, 1, 1], "sparse_col_indices": [0]}
HOSTILE_JSON = [
    (change("model_id", 7), "model_id"),
    (change("model_id", "../../etc:train:0"), "model_id"),
    (change("seq_id", "one"), "seq_id"),
    (change("seq_id", -1), "seq_id"),
    (change("seq_id", 2**63), "seq_id"),
    (change(INPUT, [1]), INPUT),
    (change(f"{INPUT}.data", []), "data"),
    (change(f"{INPUT}.data", {}), "data"),
    (change(f"{INPUT}.loss_fn", "reinforce"), "loss_fn"),
    (change(f"{INPUT}.loss_fn", "stable_reinforce"), "loss_fn"),
    (change(f"{INPUT}.loss_fn_config", {"clip": 1.0}), "loss_fn_config.clip"),
    (change(f"{INPUT}.loss_fn_config", {"clip_low_threshold": "low"}), "loss_fn_config.clip_low_threshold"),
    (change(f"{INPUT}.loss_fn_config", ["clip_low_threshold"]), "loss_fn_config"),
    (change(f"{FIRST}.model_input", {"chunks": [{"type": "image", "data": "AAAA"}]}), "data[0].model_input"),
    (change(f"{FIRST}.model_input", {"chunks": [{"tokens": [1, -2, 3, 4]}]}), "data[0].model_input"),
    (change(f"{FIRST}.model_input", {"chunks": [{"tokens": [1, 2, 3, 99999]}]}), "data[0].model_input"),
    (change(f"{FIRST}.model_input", {"chunks": [{"tokens": [1, 2, 3, 2**70]}]}), "64 bits"),
    (change("forward_onyl", True), "forward_onyl"),
    (change(f"{INPUT}.loss_fn_confg", {"beta": 1.0}), "'loss_fn_confg' is an unknown field"),
    (change(f"{INPUT}.loss_fn_config_v2", {}), "'loss_fn_config_v2' is an unknown field"),
    (change(f"{FIRST}.weight", 2.0), "data[0].'weight' is an unknown field"),
    (change(f"{FIRST}.model_input.chunk", []), "data[0].model_input.'chunk' is an unknown field"),
    (
        change(f"{FIRST}.model_input.chunks.0.token", 1),
        "data[0].model_input.chunks.'token' is an unknown field",
    ),
    (change(f"{FIELDS}.target_tokens.shap", [4]), "target_tokens.'shap' is an unknown field"),
    (change(f"{FIELDS}.target_tokens.data", [1, 2, 3, 4.5]), "target_tokens"),
    (change(f"{FIELDS}.target_tokens.data", [1, 2, 3, -4]), "target_tokens"),
    (change(f"{FIELDS}.target_tokens.data", [1, 2, 3]), "target_tokens"),
    (change(f"{FIELDS}.target_tokens", KeyError), "target_tokens"),
    (change(f"{FIELDS}.target_tokens.shape", [2**40, 2**40]), "target_tokens.shape"),
    (change(f"{FIELDS}.target_tokens.shape", [-4]), "target_tokens.shape"),
    (change(f"{FIELDS}.target_tokens.shape", [2, 2, 1]), "target_tokens.shape"),
    (change(f"{FIELDS}.advantages.data", ["1", "1", "1", "1"]), "advantages"),
    (change(f"{FIELDS}.advantages.data", [None, 1, 1, 1]), "advantages"),
    (change(f"{FIELDS}.logprobs", [1, 2, 3, 4]), "logprobs"),
    (change(f"{FIELDS}.rewards", {"data": [1, 1, 1, 1], "dtype": "float32"}), "rewards"),
    (
        change(f"{FIELDS}.target_tokens", {**SPARSE, "shape": [4, 2**28]}),
        "target_tokens",
    ),
    (
        change(f"{FIELDS}.target_tokens", {**SPARSE, "sparse_col_indices": [-1]}),
        "target_tokens",
    ),
]


@pytest.mark.parametrize("case", range(len(HOSTILE_JSON)))
def test_a_bad_body_in_json_is_refused(raw, model, case):
    apply, word = HOSTILE_JSON[case]
    body = copy.deepcopy(as_json(request(model)))
    apply(body)
    expect(refused(raw, "forward_backward", json.dumps(body).encode()), word)


BROKEN = [b"{", b"[]", b"null", b'"text"', b"\xff\xfe{}", b'{"model_id":', b"[" * 100_000, b'{"a":' * 50_000]


@pytest.mark.parametrize("body", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("route", ["forward_backward", "asample", "create_model", "retrieve_future"])
def test_a_body_that_is_no_json_object_is_refused(raw, route, body):
    expect(refused(raw, route, body), "body")


def numbers(values, dtype) -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()


def tensor(message, name: str) -> public_pb.Tensor:
    return message.data[0].loss_fn_inputs[name]


def sparse(message, rows, columns, shape, values=(1,)) -> None:
    target = tensor(message, "target_tokens")
    target.sparse_csr.values = numbers(values, np.int64)
    target.sparse_csr.crow_indices = numbers(rows, np.int64)
    target.sparse_csr.col_indices = numbers(columns, np.int64)
    del target.shape[:]
    target.shape.extend(shape)


def set_dense(message, name, values, dtype) -> None:
    tensor(message, name).dense = numbers(values, dtype)


def set_shape(message, name, shape) -> None:
    del tensor(message, name).shape[:]
    tensor(message, name).shape.extend(shape)


def set_tokens(message, content: bytes) -> None:
    message.data[0].model_input[0].encoded_text.tokens = content


def set_image(message) -> None:
    message.data[0].model_input[0].image.data = b"\x89PNG"


def use_cross_entropy(message) -> None:
    message.loss_fn = "cross_entropy"
    for name in ("logprobs", "advantages"):
        del message.data[0].loss_fn_inputs[name]


HOSTILE_PROTOBUF = [
    (lambda m: setattr(m, "model_id", "nobody:train:0"), "model_id"),
    (lambda m: setattr(m, "seq_id", -5), "seq_id"),
    (lambda m: setattr(m, "seq_id", 0), "seq_id"),
    (lambda m: setattr(m, "loss_fn", ""), "loss_fn"),
    (lambda m: m.ClearField("data"), "data"),
    (lambda m: m.data.add(), "data[1]"),
    (lambda m: m.loss_fn_config.update({"beta": 1.0}), "loss_fn_config.beta"),
    (
        lambda m: m.loss_fn_config.update({"clip_low_threshold": float("nan")}),
        "loss_fn_config.clip_low_threshold",
    ),
    (lambda m: setattr(m.loss_fn_config_v2["clip_high_threshold"], "text", "high"), "clip_high_threshold"),
    (lambda m: set_tokens(m, b"\x01\x00\x00"), "data[0].model_input"),
    (lambda m: set_tokens(m, numbers([1, 2, 3, -1], np.int32)), "data[0].model_input"),
    (lambda m: set_tokens(m, b""), "data[0].model_input"),
    (set_image, "data[0].model_input"),
    (lambda m: set_dense(m, "advantages", [1, float("inf"), 1, 1], np.float32), "advantages"),
    (lambda m: set_dense(m, "logprobs", [float("nan")] * 4, np.float32), "logprobs"),
    (lambda m: set_dense(m, "logprobs", [1.0] * 3, np.float32), "logprobs"),
    (lambda m: set_dense(m, "target_tokens", [2**62] * 4, np.int64), "target_tokens"),
    (lambda m: set_dense(m, "target_tokens", [1, 2, 3], np.int32), "target_tokens"),
    (lambda m: setattr(tensor(m, "advantages"), "dtype", 0), "advantages.dtype"),
    (lambda m: setattr(tensor(m, "advantages"), "dtype", 99), "advantages.dtype"),
    (lambda m: set_shape(m, "advantages", [2**62, 4]), "advantages.shape"),
    (lambda m: set_shape(m, "advantages", [-1, -4]), "advantages.shape"),
    (lambda m: set_shape(m, "advantages", [4, 0]), "advantages"),
    (lambda m: set_shape(m, "advantages", [2, 2]), "advantages"),
    (lambda m: (use_cross_entropy(m), sparse(m, [0, 1], [0], [2**33, 2**33])), "target_tokens.shape"),
    (lambda m: (use_cross_entropy(m), sparse(m, [0, 1, 1, 1, 1], [9], [4, 2])), "target_tokens.col_indices"),
    (lambda m: (use_cross_entropy(m), sparse(m, [0, 5, 1, 1, 1], [0], [4, 2])), "target_tokens.crow_indices"),
    (lambda m: (use_cross_entropy(m), sparse(m, [0, 1, 1, 1, 1], [0], [4])), "target_tokens.shape"),
    (lambda m: (use_cross_entropy(m), sparse(m, [], [], [0, 2], [])), "target_tokens"),
    (lambda m: setattr(m.data[0].loss_fn_inputs["pixels"], "dtype", 1), "pixels"),
]


@pytest.mark.parametrize("case", range(len(HOSTILE_PROTOBUF)))
def test_a_bad_body_in_protobuf_is_refused(raw, model, case):
    apply, word = HOSTILE_PROTOBUF[case]
    message = forward_backward_request_to_proto(request(model))
    apply(message)
    expect(refused(raw, "forward_backward", message.SerializeToString(), "application/x-protobuf"), word)


def test_a_compressed_body_is_read_and_a_damaged_one_refused(raw, model):
    message = forward_backward_request_to_proto(request(raw.create(raw.session()))).SerializeToString()
    headers = {"content_type": "application/x-protobuf", "Content_Encoding": "zstd"}
    raw.result(json.loads(raw.send("forward_backward", zstandard.compress(message), **headers)))
    bomb = zstandard.compress(bytes(300 << 20))
    assert len(bomb) < 20_000
    for body, status in (
        (zstandard.compress(message)[:-1], 400),
        (message, 400),
        (b"", 400),
        (zstandard.compress(b"\xff\xff"), 400),
        (bomb, 413),
    ):
        with pytest.raises(HttpError) as caught:
            raw.send("forward_backward", body, **headers)
        assert caught.value.status == status
    for route, encoding in (("forward_backward", "gzip"), ("retrieve_future", "zstd")):
        with pytest.raises(HttpError) as caught:
            raw.send(route, zstandard.compress(message), Content_Encoding=encoding)
        assert caught.value.status == 415


def test_a_truncated_protobuf_is_refused_at_every_length(raw, model):
    whole = forward_backward_request_to_proto(request(model)).SerializeToString()
    for length in range(0, len(whole), 7):
        error = refused(raw, "forward_backward", whole[:length], "application/x-protobuf")
        assert 400 <= error.status < 500, (length, error)


NAMES = [
    "..",
    "../../../escape",
    "a/b",
    "/etc/passwd",
    ".hidden",
    "a\0b",
    "",
    "x" * 400,
    "a\\b",
    "%2e%2e",
    "~",
    "a\nb",
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_name_that_leaves_the_folder_is_refused(raw, service, model, name):
    for route in ("save_weights", "save_weights_for_sampler"):
        body = {"model_id": model, "seq_id": 900, "path": name}
        expect(refused(raw, route, json.dumps(body).encode()), "path")
    configs = [path for path in paths_in(service.folder) if path.name == "adapter_config.json"]
    saved = [path for path in configs if ".state" not in path.parts]
    inside = {path.parent.parent.name for path in saved}
    assert inside <= {"weights", "sampler_weights"}


PATHS = [
    "tinker://{model}/weights/../../{model}/weights/none",
    "tinker://../weights/none",
    "tinker://{model}/weights/none",
    "tinker://{model}/../etc/none",
    "tinker:///weights/none",
    "tinker://{model}/weights/",
    "tinker://{model}/weights",
    "tinker://",
    "/etc/passwd",
    "file:///etc/passwd",
    "tinker://{model}/optimizer/none",
    "tinker://{model}/weights/a/b",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_is_no_checkpoint_is_refused(raw, service, model, path):
    path = path.format(model=model)
    session = raw.session()
    load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
    expect(refused(raw, "load_weights", json.dumps(load).encode()), "path")
    create = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    expect(refused(raw, "create_sampling_session", json.dumps(create).encode()), "path")


SAMPLES = [
    ({"sampling_session_id": "other"}, "sampling_session_id"),
    ({"sampling_session_id": 3}, "sampling_session_id"),
    ({"seq_id": None}, "seq_id"),
    ({"seq_id": -3}, "seq_id"),
    ({"num_samples": 0}, "num_samples"),
    ({"num_samples": 10**9}, "num_samples"),
    ({"num_samples": "two"}, "num_samples"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"chunks": []}}, "prompt"),
    ({"prompt": {"chunks": [{"tokens": [-1]}]}}, "prompt"),
    ({"prompt": {"chunks": [{"tokens": [311]}]}}, "prompt"),
    ({"prompt": {"chunks": [{"tokens": [7] * 5000}]}}, "prompt"),
    ({"prompt": {"chunks": [{"tokens": "text"}]}}, "prompt"),
    ({"sampling_params": [1]}, "sampling_params"),
    ({"sampling_params": {"temperature": -1}}, "temperature"),
    ({"sampling_params": {"top_p": 1.5}}, "top_p"),
    ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
    ({"sampling_params": {"max_tokens": 2.5}}, "max_tokens"),
    ({"sampling_params": {"stop": [1.5]}}, "stop"),
    ({"sampling_params": {"stop": {"text": "a"}}}, "stop"),
    ({"sampling_params": {"stop": [-5]}}, "stop"),
    ({"sampling_params": {"stop": [2**63]}}, "stop"),
    ({"sampling_params": {"stop": [""]}}, "stop"),
    ({"sampling_params": {"seed": "x"}}, "seed"),
    ({"sampling_params": {"seed": 1.5}}, "seed"),
    ({"sampling_params": {"best_of": 4}}, "best_of"),
    ({"topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs"),
    ({"prompt_logprobs": True, "prompt_logprobs_last_n": 4}, "prompt_logprobs_last_n"),
    ({"record_stability_info": True}, "record_stability_info"),
    ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
    ({"target_prompt_logprobs": [1]}, "target_prompt_logprobs"),
    ({"target_prompt_logprobs": {"data": [1, 2, 3]}}, "target_prompt_logprobs"),
    ({"target_prompt_logprobs": {"data": [1, 2, 3], "shape": [3]}}, "target_prompt_logprobs"),
    ({"target_prompt_logprobs": {"data": [1, 2], "shape": [2, 1]}}, "target_prompt_logprobs"),
    ({"target_prompt_logprobs": {"data": [1, 2, 3, 4], "shape": [4, 1]}}, "target_prompt_logprobs"),
    ({"target_prompt_logprobs": {"data": [1, 2, 311], "shape": [3, 1]}}, "target_prompt_logprobs"),
    ({"target_prompt_logprobs": {"data": [1, 2, -2], "shape": [3, 1]}}, "target_prompt_logprobs"),
    ({"target_prompt_logprobs": {"data": [1, 2, 1.5], "shape": [3, 1]}}, "target_prompt_logprobs"),
    ({"target_prompt_logprobs": {**SPARSE, "shape": [3, 2**30]}}, "target_prompt_logprobs"),
    ({"target_prompt_logprobs": {**SPARSE, "shape": [2**40, 2]}}, "target_prompt_logprobs"),
]


@pytest.mark.parametrize("case", range(len(SAMPLES)))
def test_a_bad_request_for_samples_is_refused(raw, sampler, case):
    changes, word = SAMPLES[case]
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]},
        "sampling_params": {"max_tokens": 2},
    }
    expect(refused(raw, "asample", json.dumps({**body, **changes}).encode()), word)


BAD_MODELS = [
    ({"lora_config": None}, "lora_config"),
    ({"lora_config": {"rank": 0}}, "rank"),
    ({"lora_config": {"rank": 10**9}}, "rank"),
    ({"lora_config": {"rank": "4"}}, "rank"),
    ({"lora_config": {"rank": 2, "seed": -1}}, "seed"),
    ({"lora_config": {"rank": 2, "train_attn": 1}}, "train_attn"),
    (
        {"lora_config": {"rank": 2, "train_attn": False, "train_mlp": False, "train_unembed": False}},
        "lora_config",
    ),
    ({"base_model": "meta-llama/Llama-3.1-8B"}, "base_model"),
    ({"base_model": None}, "base_model"),
    ({"session_id": "session-0-0"}, "session_id"),
    ({"model_seq_id": -1}, "model_seq_id"),
    ({"optimizer_config": {"type": "dimuon"}}, "optimizer_config.type"),
    ({"optimizer_config": {"type": 3}}, "optimizer_config.type"),
]


@pytest.mark.parametrize("case", range(len(BAD_MODELS)))
def test_a_model_that_cannot_be_is_refused(raw, service, case):
    changes, word = BAD_MODELS[case]
    body = {"session_id": raw.session(), "model_seq_id": 0, "base_model": service.model.name}
    body = {**body, "lora_config": {"rank": 2}, **changes}
    expect(refused(raw, "create_model", json.dumps(body).encode()), word)


STEPS = [
    ({"adam_params": None}, "adam_params"),
    ({"adam_params": {"learning_rate": -1}}, "learning_rate"),
    ({"adam_params": {"learning_rate": "fast"}}, "learning_rate"),
    ({"adam_params": {"beta2": 1.0}}, "beta2"),
    ({"adam_params": {"eps": 0}}, "eps"),
    ({"adam_params": {"momentum": 0.9}}, "momentum"),
    ({"adam_params": None, "optimizer_params": {"type": "dimuon"}}, "dimuon"),
    ({"adam_params": None, "optimizer_params": {"type": 7}}, "adam_params"),
    ({"seq_id": 0}, "seq_id"),
    ({"model_id": None}, "model_id"),
]


@pytest.mark.parametrize("case", range(len(STEPS)))
def test_a_bad_optimizer_step_is_refused(raw, model, case):
    changes, word = STEPS[case]
    body = {"model_id": model, "seq_id": 1, "adam_params": {}, **changes}
    expect(refused(raw, "optim_step", json.dumps(body).encode()), word)


def test_weights_info_refuses_unknown_fields(raw, model):
    path = raw.result(raw.post("save_weights", {"model_id": model, "seq_id": 1, "path": "info"}))["path"]
    assert raw.post("weights_info", {"tinker_path": path})["lora_rank"] == 2
    expect(refused(raw, "weights_info", json.dumps({"tinker_path": path, "rank": 2}).encode()), "rank")


def test_unknown_futures_and_sessions_are_refused(raw):
    for body in ({"request_id": "future-999999999"}, {"request_id": "../x"}, {"request_id": 5}, {}):
        expect(refused(raw, "retrieve_future", json.dumps(body).encode()), "request_id")
    expect(refused(raw, "session_heartbeat", b'{"session_id": "gone"}'), "session")
    expect(refused(raw, "no_such_route", b"{}"), "path")

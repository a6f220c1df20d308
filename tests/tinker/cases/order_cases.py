"""The order of requests, sums of gradients, and checkpoints. Requests that no client would send are sent as
raw HTTP."""

import threading
import time

import pytest
import torch
from tinker.proto import tinker_public_pb2 as public_pb
from tinker_util import VOCABULARY, RawClient, datum

from tinker import types

STEP = types.AdamParams(learning_rate=1e-2, eps=1e-8)


def batches(count: int, seed: int = 0) -> list[list[types.Datum]]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda length: torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()  # noqa: E731
    prompt = draw(6)
    made = []
    for _ in range(count):
        sequences = [prompt + draw(4), prompt + draw(5)]
        made.append([datum(tokens[:-1], target_tokens=tokens[1:]) for tokens in sequences])
    return made


def assert_same(left, right, tolerance=0.0):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=tolerance, msg=name)


def assert_differ(left, right):
    assert any((left[name] - right[name]).abs().max() > 1e-4 for name in left)


@pytest.fixture(scope="module")
def trained(service):
    client, path = service.train_random("order", rank=2)
    return service, client, path


def weights_after(trained, submit):
    """The weights after submit(client) and one step, from the same start."""
    service, client, path = trained
    client.load_state(path).result()
    submit(client)
    client.optim_step(STEP).result()
    return service.weights(client)


def test_a_forward_adds_no_gradient(trained):
    one, two = batches(2)
    alone = weights_after(trained, lambda client: client.forward_backward(one, "cross_entropy"))
    results = []

    def with_forward(client):
        results.append(client.forward(two, "cross_entropy"))
        client.forward_backward(one, "cross_entropy")
        results.append(client.forward(one, "cross_entropy"))

    assert_same(weights_after(trained, with_forward), alone)
    first = results[0].result()
    assert len(first.loss_fn_outputs) == 2
    total = -sum(float(output["logprobs"].to_torch().sum()) for output in first.loss_fn_outputs)
    assert first.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


def test_gradients_are_sums_until_the_step(trained):
    service, client, path = trained
    one, two = batches(2)
    both = weights_after(trained, lambda client: client.forward_backward(one + two, "cross_entropy"))
    outputs = []

    def in_turn(client):
        for batch in (one, two):
            outputs.append(client.forward_backward(batch, "cross_entropy").result())

    def queued(client):
        futures = [client.forward_backward(batch, "cross_entropy") for batch in (one, two)]
        outputs.extend(future.result() for future in futures)

    assert_same(weights_after(trained, in_turn), both, 1e-5)
    assert_same(weights_after(trained, queued), both, 1e-5)
    for left, right in ((outputs[0], outputs[2]), (outputs[1], outputs[3])):
        assert left.metrics["loss:sum"] == pytest.approx(right.metrics["loss:sum"], rel=1e-6)
        for a, b in zip(left.loss_fn_outputs, right.loss_fn_outputs, strict=True):
            torch.testing.assert_close(
                a["logprobs"].to_torch(), b["logprobs"].to_torch(), rtol=1e-5, atol=1e-5
            )
    # The step has cleared the gradients: the next one moves by momentum only.
    alone = weights_after(trained, lambda client: client.forward_backward(two, "cross_entropy"))
    assert_differ(alone, both)


@pytest.mark.parametrize("encoding", ["json", "protobuf"])
def test_requests_run_in_the_order_of_their_numbers(service, trained, encoding):
    """Chunks arrive in any order, and a step that arrives before them waits."""
    raw = RawClient(service)
    one, two = batches(2)
    session = raw.session()
    model = raw.create_from(session, trained[2])
    late = raw.post("optim_step", {"model_id": model, "seq_id": 3, "adam_params": STEP.model_dump()})
    second = raw.forward_backward(model, 2, two, encoding)
    with pytest.raises(TimeoutError):
        raw.result(late, timeout=1.0)
    first = raw.forward_backward(model, 1, one, encoding)
    wanted = weights_after(trained, lambda client: client.forward_backward(one + two, "cross_entropy"))
    assert raw.result(late)["metrics"]["skipped"] == 0
    saved = raw.result(raw.post("save_weights", {"model_id": model, "seq_id": 4, "path": "mine"}))
    assert_same(service.tensors(saved["path"]), wanted, 1e-5)
    for request, batch in ((first, one), (second, two)):
        outputs = raw.result(request)["loss_fn_outputs"]
        assert [len(output["logprobs"]["data"]) for output in outputs] == [
            each.model_input.length for each in batch
        ]


def test_a_request_that_is_sent_again_is_not_computed_again(service, trained):
    raw = RawClient(service)
    (one,) = batches(1)
    session = raw.session()
    model = raw.create_from(session, trained[2])
    wanted = weights_after(trained, lambda client: client.forward_backward(one, "cross_entropy"))
    step = {"model_id": model, "seq_id": 2, "adam_params": STEP.model_dump()}
    ids = [raw.forward_backward(model, 1, one, "protobuf") for _ in range(2)]
    ids += [raw.forward_backward(model, 1, one, "json")]
    assert len(set(ids)) == 1
    results = [raw.result(ids[0]) for _ in range(2)]
    assert results[0] == results[1]
    steps = [raw.post("optim_step", step) for _ in range(2)]
    raw.result(steps[0])
    steps.append(raw.post("optim_step", step))
    assert len({each["request_id"] for each in steps}) == 1
    again = raw.forward_backward(model, 1, one, "protobuf")
    assert again == ids[0]
    saved = raw.result(raw.post("save_weights", {"model_id": model, "seq_id": 3, "path": "mine"}))
    assert_same(service.tensors(saved["path"]), wanted)


def test_a_result_in_protobuf_is_that_in_json(service, trained):
    raw = RawClient(service)
    data = batches(1)[0]
    generator = torch.Generator().manual_seed(1)
    wide = torch.randint(0, VOCABULARY, (data[0].model_input.length, 3), generator=generator)
    data.append(types.Datum(model_input=data[0].model_input, loss_fn_inputs={"target_tokens": wide}))
    session = raw.session()
    model = raw.create_from(session, trained[2])
    request = raw.forward_backward(model, 1, data, "protobuf")
    plain = raw.result(request)
    message = public_pb.ForwardBackwardOutput.FromString(raw.result(request, protobuf=True))
    assert dict(message.metrics) == plain["metrics"]
    found = []
    for record in message.loss_fn_outputs:
        assert list(record.fields) == ["logprobs"]
        tensor = record.fields["logprobs"]
        values = torch.frombuffer(bytearray(tensor.data), dtype=torch.float32)
        offsets = torch.frombuffer(bytearray(tensor.offsets), dtype=torch.int64).tolist()
        assert len(offsets) == record.num_datums + 1
        found += [
            values[begin // 4 : end // 4].reshape(-1, *tensor.trailing_shape).tolist()
            for begin, end in zip(offsets, offsets[1:], strict=False)
        ]
    for value, output in zip(found, plain["loss_fn_outputs"], strict=True):
        wanted = torch.tensor(output["logprobs"]["data"]).reshape(output["logprobs"]["shape"])
        torch.testing.assert_close(torch.tensor(value), wanted)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_checkpoint_continues_bit_for_bit(service, with_optimizer):
    client, _ = service.train_random(f"continue-{with_optimizer}", rank=2)
    one, two = batches(2)
    for batch in (one, two):
        client.forward_backward(batch, "cross_entropy")
        client.optim_step(STEP)
    path = client.save_state("middle").result().path
    saved = service.tensors(path)
    create = (
        service.client.create_training_client_from_state_with_optimizer
        if with_optimizer
        else service.client.create_training_client_from_state
    )
    other = create(path).result()
    assert_same(service.weights(other), saved)

    def next_step(of):
        of.forward_backward(one, "cross_entropy")
        of.optim_step(STEP).result()
        return service.weights(of)

    straight, continued = next_step(client), next_step(other)
    if with_optimizer:
        assert_same(continued, straight)
    else:
        assert_differ(continued, straight)
    # The same through load_state of a client that goes on.
    (client.load_state_with_optimizer if with_optimizer else client.load_state)(path).result()
    assert_same(next_step(client), continued)


def test_a_load_drops_gradients_that_no_step_has_used(trained):
    service, client, path = trained
    one, two = batches(2)
    alone = weights_after(trained, lambda client: client.forward_backward(one, "cross_entropy"))
    client.forward_backward(two, "cross_entropy").result()
    assert_same(weights_after(trained, lambda client: client.forward_backward(one, "cross_entropy")), alone)


def test_a_name_is_used_once_unless_it_is_overwritten(service):
    client = service.train(rank=2)
    client.save_state("name").result()
    client.save_state("name", overwrite=True).result()
    with pytest.raises(Exception, match="name.*exists"):
        client.save_state("name").result()


def test_a_waiting_gap_ends_with_its_session(service):
    raw = RawClient(service)
    session = raw.session()
    model = raw.create(session)
    request = raw.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": STEP.model_dump()})
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(raw.result(request, may_fail=True)))
    waiter.start()
    time.sleep(0.3)
    raw.post(f"sessions/{session}/finish", {})
    waiter.join(30)
    assert answers and answers[0]["category"] == "user" and "session has ended" in answers[0]["error"]

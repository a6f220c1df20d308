"""Full fine-tuning: one model of which all weights are trained."""

import pytest
import torch
from order_cases import STEP, assert_same, batches
from safetensors.torch import load_file
from tinker_util import RawClient, Service, log_probs
from transformers import AutoModelForCausalLM

import tinker
from tinker import types

STEPS = 8
PROMPT = [20, 31, 42, 53, 64]


class WholeService(Service):
    def tensors(self, path):
        return load_file(self.checkpoint(path) / "model.safetensors")


@pytest.fixture(scope="module")
def whole(program, models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with WholeService(program, models("qwen3"), folder, "--dtype", "fp32", "full_fine_tuning=true") as one:
        yield one


@pytest.fixture
def client(whole):
    """A client in a session of its own, since one model at a time can be trained."""
    whole.client = tinker.ServiceClient(base_url=whole.url)
    training = whole.train()
    yield training
    finish(whole, training)


def finish(service, client):
    session = client.model_id.split(":train:")[0]
    RawClient(service).post(f"sessions/{session}/finish", {})


def step(client, batch, parameters=STEP):
    client.forward_backward(batch, "cross_entropy")
    client.optim_step(parameters).result()


def test_steps_of_all_weights_are_those_of_torch(whole, client):
    assert client.get_info().is_lora is False
    model = AutoModelForCausalLM.from_pretrained(whole.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    parameters = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)
    for batch in batches(STEPS):
        step(client, batch, parameters)
        optimizer.zero_grad()
        total = 0.0
        for each in batch:
            targets = each.loss_fn_inputs["target_tokens"].to_torch()
            total = total - log_probs(model, each.model_input.to_ints(), targets).sum()
        total.backward()
        optimizer.step()
    saved = whole.weights(client)
    for name, parameter in model.named_parameters():
        if name in saved:  # a tied lm_head is stored once
            torch.testing.assert_close(saved[name], parameter.detach(), rtol=0, atol=1e-4, msg=name)
    assert len(saved) > 10


def test_a_checkpoint_has_all_weights_and_the_optimizers_state(whole, client):
    first, second = batches(2)
    step(client, first)
    path = client.save_state("half").result().path
    step(client, second)
    wanted = whole.weights(client)
    client.load_state_with_optimizer(path).result()
    step(client, second)
    assert_same(whole.weights(client), wanted)
    finish(whole, client)
    whole.client = tinker.ServiceClient(base_url=whole.url)
    again = whole.client.create_training_client_from_state_with_optimizer(path).result()
    step(again, second)
    assert_same(whole.weights(again), wanted)
    finish(whole, again)


def test_a_sampler_has_the_weights_of_its_checkpoint(whole, client):
    for batch in batches(4, seed=3):
        step(client, batch)
    path = client.save_state("sampled").result().path
    sampler = client.save_weights_and_get_sampling_client().result()
    step(client, batches(1)[0])  # not seen by the sampler
    model = AutoModelForCausalLM.from_pretrained(whole.checkpoint(path), dtype=torch.float32)
    tokens = list(PROMPT)
    for _ in range(8):
        with torch.no_grad():
            tokens.append(model(torch.tensor([tokens])).logits[0, -1].argmax().item())
    parameters = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    result = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, parameters).result()
    assert list(result.sequences[0].tokens) == tokens[len(PROMPT) :]


def test_a_second_model_of_all_weights_is_refused(whole, client):
    other = tinker.ServiceClient(base_url=whole.url)
    with pytest.raises(tinker.BadRequestError, match="one model at a time"):
        other.create_lora_training_client(base_model=whole.model.name, rank=4).result()


def test_a_model_that_does_not_fit_is_refused(program, models, tmp_path):
    with (
        WholeService(
            program, models("qwen3"), tmp_path, "full_fine_tuning=true", "model_memory=100KiB"
        ) as service,
        pytest.raises(tinker.BadRequestError, match="train an adapter instead"),
    ):
        service.train()


def test_after_a_restart_calls_fail_and_name_the_last_save(program, models, tmp_path):
    arguments = (program, models("qwen3"), tmp_path, "full_fine_tuning=true")
    with WholeService(*arguments) as service:
        client = service.train()
        path = client.save_state("last").result().path
        model_id = client.model_id
    with WholeService(*arguments) as service:
        raw = RawClient(service)
        body = {"model_id": model_id, "seq_id": 7}
        for route, more in (
            ("optim_step", {"adam_params": {"learning_rate": 1e-3}}),
            ("save_weights", {"path": "later"}),
            ("save_weights_for_sampler", {"path": "later"}),
        ):
            answer = raw.result(raw.post(route, {**body, **more}), may_fail=True)
            assert answer["category"] == "user" and path in answer["error"]

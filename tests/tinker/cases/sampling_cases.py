"""Sampling: log-probabilities against transformers, stops, seeds, and which weights a sampler has."""

import pytest
import torch
from order_cases import STEP, batches
from tinker_util import VOCABULARY, log_probs, peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinker import types

EOS = 1  # of the tiny models
PROMPT = [20, 31, 42, 53, 64, 75, 86, 97, 20, 31]


@pytest.fixture(scope="module")
def base(service):
    """A sampler of the base model, and the model."""
    model = AutoModelForCausalLM.from_pretrained(service.model, dtype=torch.float32)
    return service.client.create_sampling_client(base_model=service.model.name).result(), model


def prompt_of(tokens):
    return types.ModelInput.from_ints(tokens)


def sample(sampler, num_samples=1, prompt=PROMPT, **settings):
    parameters = types.SamplingParams(**{"max_tokens": 8, "temperature": 1.0, **settings})
    return sampler.sample(prompt_of(prompt), num_samples, parameters).result().sequences


def check_log_probs(sampler, model):
    tokens = torch.randint(3, VOCABULARY, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    values = sampler.compute_logprobs(prompt_of(tokens)).result()
    assert values[0] is None
    with torch.no_grad():
        wanted = log_probs(model, tokens[:-1], torch.tensor(tokens[1:]))
    torch.testing.assert_close(torch.tensor(values[1:]), wanted, rtol=1e-5, atol=1e-5)
    last = sampler.compute_logprobs(prompt_of(tokens), prompt_logprobs_last_n=5).result()
    assert last[:-5] == [None] * 35
    torch.testing.assert_close(torch.tensor(last[-5:]), wanted[-5:], rtol=1e-5, atol=1e-5)


def test_log_probabilities_of_a_prompt_are_those_of_transformers(service, base):
    check_log_probs(*base)
    client, path = service.train_random("prompt", rank=3)
    model, _ = peft_model(service.model, service.checkpoint(path), torch.float32)
    check_log_probs(client.save_weights_and_get_sampling_client().result(), model)


def test_the_most_likely_tokens_of_a_prompt_are_those_of_transformers(base):
    sampler, model = base
    response = sampler.sample(
        prompt_of(PROMPT),
        1,
        types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=4,
    ).result()
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1).topk(4)
    rows = response.topk_prompt_logprobs
    assert len(rows) == len(PROMPT) and not rows[0]
    for row, values, ids in zip(rows[1:], wanted.values, wanted.indices, strict=False):
        assert [token for token, _ in row] == ids.tolist()
        torch.testing.assert_close(torch.tensor([value for _, value in row]), values, rtol=0, atol=1e-5)


def sparse_targets(length):
    """Three ids at scattered places, in the layout of sparse rows."""
    tensor = torch.full((length, 50), -1, dtype=torch.int64)
    tensor[1, 3], tensor[1, 40], tensor[length - 1, 0] = 7, 9, 0
    return tensor, types.TensorData.from_torch_sparse(tensor, pad_value=-1)


def test_log_probabilities_of_given_tokens_in_a_prompt_are_those_of_transformers(service, base):
    client, path = service.train_random("targets", rank=3)
    adapted, _ = peft_model(service.model, service.checkpoint(path), torch.float32)
    sampler = client.save_weights_and_get_sampling_client().result()
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, VOCABULARY, (len(PROMPT) - 1, 3), generator=generator)
    ids[0, 1] = ids[4, :] = -1
    thin, sparse = sparse_targets(len(PROMPT) - 1)
    assert sparse.sparse_crow_indices is not None
    for (each, model), wanted_ids, targets in (
        (base, ids, types.TensorData.from_torch(ids)),
        ((sampler, adapted), ids, types.TensorData.from_torch(ids)),
        (base, thin, sparse),
    ):
        result = each.sample(
            prompt_of(PROMPT), 1, types.SamplingParams(max_tokens=1), target_prompt_logprobs=targets
        ).result()
        assert result.prompt_logprobs is None
        found = result.target_prompt_logprobs
        assert (found.sparse_crow_indices is None) == (targets.sparse_crow_indices is None)
        with torch.no_grad():
            values = log_probs(model, PROMPT[:-1], wanted_ids.clamp_min(0))
        wanted = torch.where(wanted_ids < 0, torch.zeros(()), values)
        torch.testing.assert_close(found.to_torch(), wanted, rtol=1e-5, atol=1e-5)


def test_log_probabilities_of_samples_are_those_of_transformers(base):
    sampler, model = base
    response = sampler.sample(
        prompt_of(PROMPT), 4, types.SamplingParams(max_tokens=12, seed=3), topk_sample_logprobs=3
    ).result()
    for sequence in response.sequences:
        tokens = PROMPT + list(sequence.tokens)
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)[len(PROMPT) - 1 :]
        wanted = logits.gather(1, torch.tensor([list(sequence.tokens)]).T)[:, 0]
        torch.testing.assert_close(torch.tensor(list(sequence.logprobs)), wanted, rtol=0, atol=1e-5)
        top = logits.topk(3)
        assert [[token for token, _ in row] for row in sequence.topk_logprobs] == top.indices.tolist()


def test_temperature_zero_takes_the_most_likely_token(base):
    sampler, model = base
    tokens = list(PROMPT)
    for _ in range(8):
        with torch.no_grad():
            tokens.append(model(torch.tensor([tokens])).logits[0, -1].argmax().item())
    assert sample(sampler, temperature=0.0, stop=[])[0].tokens == tokens[len(PROMPT) :]


def test_a_seed_gives_the_same_samples_and_no_seed_gives_new_ones(base):
    sampler, _ = base
    tokens = lambda **settings: [each.tokens for each in sample(sampler, 3, stop=[], **settings)]  # noqa: E731
    seeded = tokens(seed=7)
    assert tokens(seed=7) == seeded and tokens(seed=8) != seeded
    assert len({tuple(each) for each in seeded}) == 3
    assert tokens() != tokens()


def test_there_are_as_many_samples_as_asked_for_each_with_its_own_id(base):
    sampler, _ = base
    sequences = sample(sampler, 5) + sample(sampler, 2)
    assert len(sequences) == 7 and len({each.sequence_id for each in sequences}) == 7


def test_the_models_end_token_stops_a_sample_unless_the_stops_are_an_empty_list(base):
    sampler, _ = base
    ended = [each for each in sample(sampler, 64, max_tokens=40, seed=3) if each.stop_reason == "stop"]
    assert ended and all(each.tokens[-1] == EOS and len(each.tokens) <= 40 for each in ended)
    free = sample(sampler, 64, max_tokens=40, seed=3, stop=[])
    assert all(each.stop_reason == "length" and len(each.tokens) == 40 for each in free)
    assert any(EOS in each.tokens[:-1] for each in free)


def test_a_stop_token_ends_a_sample_and_is_its_last_token(base):
    sampler, _ = base
    free = sample(sampler, temperature=0.0, stop=[], max_tokens=16)[0].tokens
    place = next(i for i in range(3, 16) if free[i] not in free[:i])
    (stopped,) = sample(sampler, temperature=0.0, stop=[free[place]], max_tokens=16)
    assert stopped.tokens == free[: place + 1] and stopped.stop_reason == "stop"


@pytest.mark.parametrize("as_list", [True, False])
def test_a_stop_text_ends_a_sample(service, base, as_list):
    sampler, _ = base
    tokenizer = AutoTokenizer.from_pretrained(service.model)
    found = None
    for seed in range(40):  # a sample with a token of plain text that comes once
        free = sample(sampler, seed=seed, stop=[], max_tokens=16)[0].tokens
        texts = [tokenizer.decode([token]) for token in free]
        for i in range(2, 16):
            if texts[i].isascii() and texts[i].isprintable() and texts[i] not in "".join(texts[:i]):
                found = (seed, free, i, texts[i])
        if found:
            break
    seed, free, place, text = found
    (stopped,) = sample(sampler, seed=seed, stop=[text] if as_list else text, max_tokens=16)
    assert stopped.stop_reason == "stop" and stopped.tokens == free[: place + 1]


def test_a_snapshot_keeps_its_weights_and_an_inflight_sampler_takes_new_ones(service):
    client = service.train(rank=2)
    tokens = prompt_of(PROMPT)
    snapshot = client.save_weights_and_get_sampling_client().result()
    inflight = client.save_weights_and_get_sampling_client(kind="inflight").result()
    values = lambda sampler: sampler.compute_logprobs(tokens).result()[1:]  # noqa: E731
    old = values(snapshot)
    assert values(inflight) == old
    client.forward_backward(batches(1)[0], "cross_entropy")
    client.optim_step(STEP)
    newer = client.save_weights_and_get_sampling_client(kind="inflight").result()
    new = values(newer)
    assert max(abs(a - b) for a, b in zip(new, old, strict=True)) > 1e-3
    assert values(inflight) == new
    assert values(snapshot) == old
    named = client.save_weights_for_sampler("named").result().path
    assert values(client.create_sampling_client(named).result()) == new
    assert values(service.client.create_sampling_client(model_path=named).result()) == new


def test_a_sampler_knows_its_base_model(service, base):
    assert base[0].get_base_model() == service.model.name

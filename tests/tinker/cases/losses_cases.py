"""Each loss against its formula: a service in fp64 against PEFT, transformers and torch. Gradients are read
from an optimizer step."""

import pytest
import torch
from rollout_files import compute_in_double
from tinker_util import VOCABULARY, datum, log_probs, peft_model

from tinker import types

MODELS = ["qwen3", "llama_tied"]
# Adam's first step moves a weight by g / (|g| + eps), so the gradient can be read from it.
READ_GRADIENT = types.AdamParams(learning_rate=1.0, eps=1.0)


@pytest.fixture(autouse=True)
def fp64(monkeypatch):
    compute_in_double(monkeypatch)


@pytest.fixture(scope="module", params=MODELS)
def trained(request, double):
    """A service, a client with a random adapter, and its checkpoint."""
    service = double(request.param)
    client, path = service.train_random("start", rank=3)
    return service, client, path


def random_prompts(seed: int, length: int = 9) -> list[list[int]]:
    """Sequences that share prefixes."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda count: torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()  # noqa: E731
    root, left = draw(length), draw(4)
    return [root + left + draw(3), root + left + draw(5), root + draw(6), root + left, draw(7)]


def current_log_probs(service, path, data):
    model, _ = peft_model(service.model, service.checkpoint(path), torch.float64)
    with torch.no_grad():
        return [
            log_probs(model, each.model_input.to_ints(), each.loss_fn_inputs["target_tokens"].to_torch())
            for each in data
        ]


def compare(trained, data, expected_loss, submit, tolerance=1e-10):
    """Compares outputs, loss and gradient of submit(client) with expected_loss(datum, log-probabilities)."""
    service, client, path = trained
    client.load_state(path).result()
    model, parameters = peft_model(service.model, service.checkpoint(path), torch.float64)
    before = {name: value.detach().clone() for name, value in parameters.items()}
    expected = []
    total = 0.0
    for each in data:
        targets = each.loss_fn_inputs["target_tokens"].to_torch()
        expected.append(log_probs(model, each.model_input.to_ints(), targets))
        total = total + expected_loss(each, expected[-1])
    total.backward()

    result = submit(client).result()
    for output, wanted in zip(result.loss_fn_outputs, expected, strict=True):
        torch.testing.assert_close(
            output["logprobs"].to_torch().double(), wanted.detach(), rtol=1e-6, atol=1e-6
        )
    assert result.metrics["loss:sum"] == pytest.approx(total.item(), rel=tolerance, abs=tolerance)
    client.optim_step(READ_GRADIENT).result()
    after = service.weights(client)
    largest = max(parameter.grad.abs().max() for parameter in parameters.values())
    assert largest > 0.01
    for name, parameter in parameters.items():
        step = before[name] - after[name]
        gradient = step / (1 - step.abs())
        error = (gradient - parameter.grad).abs().max() / largest
        assert error < tolerance, f"{name}: {error}"


def inputs_of(each):
    return {name: value.to_torch().double() for name, value in each.loss_fn_inputs.items()}


def with_actions(trained, seed, **more):
    """Data of the policy losses: targets are random tokens, and ratios lie on both sides of the clips."""
    service, _, path = trained
    generator = torch.Generator().manual_seed(seed)
    data = []
    for tokens in random_prompts(seed):
        targets = torch.randint(0, VOCABULARY, (len(tokens),), generator=generator)
        data.append(datum(tokens, target_tokens=targets))
    values = current_log_probs(service, path, data)
    result = []
    for each, now in zip(data, values, strict=True):
        noise = 0.5 * torch.randn(now.shape, generator=generator, dtype=torch.float64)
        fields = {
            "target_tokens": each.loss_fn_inputs["target_tokens"],
            "logprobs": (now + noise).float(),
            "advantages": torch.randn(now.shape, generator=generator),
        }
        for name, make in more.items():
            fields[name] = make(now.shape, generator)
        result.append(types.Datum(model_input=each.model_input, loss_fn_inputs=fields))
    return result


def clips(each, low, high):
    fields = inputs_of(each)
    given = torch.tensor([low, high], dtype=torch.float64)
    return fields.get("clip_low_threshold", given[0]), fields.get("clip_high_threshold", given[1])


def importance_sampling(each, now):
    fields = inputs_of(each)
    return -((now - fields["logprobs"]).exp() * fields["advantages"]).sum()


def clipped(ratio, advantages, low, high):
    bounded = torch.maximum(torch.minimum(ratio, high), low)
    return -torch.minimum(ratio * advantages, bounded * advantages).sum()


def ppo(low=0.8, high=1.2):
    def loss(each, now):
        fields = inputs_of(each)
        return clipped((now - fields["logprobs"]).exp(), fields["advantages"], *clips(each, low, high))

    return loss


def cispo(low=0.0, high=4.0):
    def loss(each, now):
        fields = inputs_of(each)
        least, most = clips(each, low, high)
        ratio = (now.detach() - fields["logprobs"]).exp()
        weight = torch.maximum(torch.minimum(ratio, most), least)
        return -(weight * now * fields["advantages"]).sum()

    return loss


def dro(beta=0.05):
    def loss(each, now):
        fields = inputs_of(each)
        return -(now * fields["advantages"] - beta / 2 * (now - fields["logprobs"]) ** 2).sum()

    return loss


def gspo(low=0.8, high=1.2):
    def loss(each, now):
        fields = inputs_of(each)
        mask = fields["sequence_ratio_mask"]
        mean = ((now - fields["logprobs"]).detach() * mask).sum() / mask.sum()
        ratio = (mean + now - now.detach()).exp()
        return clipped(ratio, fields["advantages"], *clips(each, low, high))

    return loss


def low_clip(shape, generator):
    return 0.6 + 0.3 * torch.rand(shape, generator=generator)


def high_clip(shape, generator):
    return 1.05 + 0.4 * torch.rand(shape, generator=generator)


def mask(shape, generator):
    values = (torch.rand(shape, generator=generator) < 0.7).float()
    values[-1] = 1
    return values


CLIPS = {"clip_low_threshold": low_clip, "clip_high_threshold": high_clip}
GIVEN = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}
POLICY_LOSSES = [
    ("importance_sampling", importance_sampling, {}, None),
    ("ppo", ppo(), {}, None),
    ("ppo", ppo(0.7, 1.1), {}, GIVEN),
    ("ppo", ppo(), CLIPS, None),
    ("cispo", cispo(), {}, None),
    ("cispo", cispo(0.7, 1.1), {"clip_high_threshold": high_clip}, GIVEN),
    ("dro", dro(), {}, None),
    ("dro", dro(0.3), {}, {"beta": 0.3}),
    ("gspo", gspo(), {"sequence_ratio_mask": mask}, None),
    ("gspo", gspo(0.7, 1.1), {"sequence_ratio_mask": mask}, GIVEN),
    ("gspo", gspo(), {"sequence_ratio_mask": mask, **CLIPS}, None),
]


@pytest.mark.parametrize("case", range(len(POLICY_LOSSES)))
def test_policy_losses_are_their_formulas(trained, case):
    name, formula, more, config = POLICY_LOSSES[case]
    data = with_actions(trained, 100 + case, **more)
    compare(trained, data, formula, lambda client: client.forward_backward(data, name, config))


def test_a_clip_cuts_the_gradient_of_some_positions_and_not_of_others(trained):
    data = with_actions(trained, 101)
    now = current_log_probs(trained[0], trained[2], data)
    ratios = torch.cat([(a - inputs_of(each)["logprobs"]).exp() for a, each in zip(now, data, strict=True)])
    for share in ((ratios < 0.8), (ratios > 1.2), (ratios > 0.8) & (ratios < 1.2)):
        assert 0.1 < share.double().mean() < 0.8


def weighted(each, now):
    fields = inputs_of(each)
    return -(fields["weights"] * now).sum()


@pytest.mark.parametrize("targets", ["next", "random"])
def test_cross_entropy_is_its_formula(trained, targets):
    generator = torch.Generator().manual_seed(3)
    data = []
    for tokens in random_prompts(7):
        ids = torch.tensor(tokens[1:] + [5])
        if targets == "random":
            ids = torch.randint(0, VOCABULARY, ids.shape, generator=generator)
        data.append(datum(tokens, target_tokens=ids, weights=torch.randn(ids.shape, generator=generator)))
    compare(trained, data, weighted, lambda client: client.forward_backward(data, "cross_entropy"))


def test_cross_entropy_without_weights_sums_all_positions(trained):
    data = [datum(tokens, target_tokens=tokens[1:] + [4]) for tokens in random_prompts(8)]
    compare(
        trained,
        data,
        lambda each, now: -now.sum(),
        lambda client: client.forward_backward(data, "cross_entropy"),
    )


@pytest.mark.parametrize("layout", ["dense", "sparse", "several"])
def test_cross_entropy_of_several_targets_at_a_position_is_its_formula(trained, layout):
    generator = torch.Generator().manual_seed(4)
    data = []
    for index, tokens in enumerate(random_prompts(9)):
        columns = 2 + index if layout == "several" else 12
        shape = (len(tokens), columns)
        ids = torch.randint(1, VOCABULARY, shape, generator=generator)
        weights = torch.rand(shape, generator=generator)
        if layout == "sparse":  # few entries, so that the SDK sends compressed rows
            absent = torch.rand(shape, generator=generator) < 0.8
            ids[absent], weights[absent] = 0, 0
        data.append(datum(tokens, target_tokens=ids, weights=weights))
        is_sparse = data[-1].loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
        assert is_sparse == (layout == "sparse")
    compare(trained, data, weighted, lambda client: client.forward_backward(data, "cross_entropy"))


def test_a_custom_loss_of_the_client_has_its_gradient(trained):
    """The loss couples sequences. The client computes its gradient in fp32."""
    data = [datum(tokens, target_tokens=tokens[1:] + [6]) for tokens in random_prompts(10)]

    def preference(sums):
        return -torch.nn.functional.logsigmoid(0.1 * (sums[0] - sums[1] + sums[2] - sums[3])) + 0.01 * sums[4]

    def in_client(given, log_probs_of):
        assert [each.model_input.to_ints() for each in given] == [each.model_input.to_ints() for each in data]
        loss = preference([value.sum() for value in log_probs_of])
        return loss, {"preference:mean": loss.item()}

    seen = []

    def in_reference(each, now):
        seen.append(now.sum())
        return preference(seen) if len(seen) == len(data) else torch.zeros(())

    compare(
        trained,
        data,
        in_reference,
        lambda client: client.forward_backward_custom(data, in_client),
        tolerance=1e-5,
    )

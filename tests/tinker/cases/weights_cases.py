"""Twenty steps of training: the weights of a service against PEFT's with torch's AdamW."""

import pytest
import torch
from losses_cases import cispo, dro, importance_sampling, ppo, weighted
from tinker_util import VOCABULARY, datum, log_probs, peft_model

from tinker import types

STEPS = 20
LOSSES = [
    ("cross_entropy", weighted),
    ("importance_sampling", importance_sampling),
    ("ppo", ppo()),
    ("cispo", cispo()),
    ("dro", dro()),
]


def rollouts(service, path):
    """Sixteen sequences of two prompts, with log-probabilities of the adapter at the start."""
    generator = torch.Generator().manual_seed(11)
    draw = lambda count: torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()  # noqa: E731
    model, _ = peft_model(service.model, service.checkpoint(path), torch.float32)
    data = []
    for _ in range(2):
        prompt = draw(8)
        for length in (3, 4, 4, 5, 5, 6, 7, 8):
            tokens = prompt + draw(length)
            targets = torch.tensor(tokens[1:])
            with torch.no_grad():
                old = log_probs(model, tokens[:-1], targets)
            advantages = torch.zeros(len(targets))
            advantages[len(prompt) - 1 :] = torch.randn((), generator=generator)
            data.append((tokens[:-1], targets, old, advantages))
    return data


def as_data(chosen, loss):
    if loss == "cross_entropy":
        return [datum(tokens, target_tokens=targets, weights=a) for tokens, targets, _, a in chosen]
    return [datum(tokens, target_tokens=t, logprobs=old, advantages=a) for tokens, t, old, a in chosen]


@pytest.mark.parametrize(
    "adam", [{}, {"grad_clip_norm": 1.0, "weight_decay": 0.1}], ids=["plain", "clipped and decayed"]
)
def test_twenty_steps_give_the_weights_of_peft_and_torch(service, adam):
    client, path = service.train_random("peft" + "-clipped" * bool(adam), rank=4)
    data = rollouts(service, path)
    model, parameters = peft_model(service.model, service.checkpoint(path), torch.float32)
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=adam.get("weight_decay", 0.0)
    )
    start = {name: value.detach().clone() for name, value in parameters.items()}
    clipped_steps = 0
    for step in range(STEPS):
        loss, formula = LOSSES[step % len(LOSSES)]
        batch = as_data(data[step % 2 :: 2], loss)
        client.forward_backward(batch, loss)
        client.optim_step(types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, **adam))

        optimizer.zero_grad()
        total = 0.0
        for each in batch:
            targets = each.loss_fn_inputs["target_tokens"].to_torch()
            total = total + formula(each, log_probs(model, each.model_input.to_ints(), targets))
        total.backward()
        if adam:
            norm = torch.nn.utils.clip_grad_norm_(parameters.values(), adam["grad_clip_norm"])
            clipped_steps += bool(norm > adam["grad_clip_norm"])
        optimizer.step()
        for name, weight in service.weights(client).items():
            torch.testing.assert_close(
                weight, parameters[name].detach(), rtol=0, atol=1e-4, msg=f"step {step} {name}"
            )
    assert all((parameters[name] - start[name]).abs().max() > 1e-3 for name in parameters)
    assert clipped_steps > 10 or not adam

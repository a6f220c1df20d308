"""bough.TreeEngine against transformers, which runs each sequence by itself."""

import copy

import bough
import pytest
import torch
from rollout_files import compute_in_double, gradient_error, random_rollouts
from tiny_models import ARCHITECTURES, make_tiny_model

ARCHITECTURE_NAMES = list(ARCHITECTURES)


def sequences_of(seed, vocab):
    """Random rollouts as sequences of the engine."""
    rollouts = random_rollouts(seed, vocab)
    for rollout in rollouts:
        rollout["loss_mask"][:1] = [0] * len(rollout["loss_mask"][:1])
    return rollouts


def flat_values(model, sequences, temperature=1.0):
    """Log-probabilities and entropies of the trained tokens by transformers, with a graph."""
    log_probs, entropies = [], []
    for sequence in sequences:
        ids, mask = torch.tensor(sequence["input_ids"]), torch.tensor(sequence["loss_mask"][1:]).bool()
        if not mask.any():
            continue
        logits = model(ids.unsqueeze(0), use_cache=False).logits[0, :-1] / temperature
        all_log_probs = logits.log_softmax(-1)
        log_probs.append(all_log_probs.gather(1, ids[1:].unsqueeze(1)).squeeze(1)[mask])
        entropies.append(-(all_log_probs.exp() * all_log_probs).sum(-1)[mask])
    return torch.cat(log_probs), torch.cat(entropies)


def some_loss(log_probs, entropies, weights):
    return (weights * log_probs + 0.1 * log_probs.exp() - 0.3 * weights * entropies).sum()


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(got, expected, tolerance):
    assert got.keys() == expected.keys()
    largest = max(g.norm() for g in expected.values())
    for name, gradient in got.items():
        error = (gradient - expected[name]).norm() / max(expected[name].norm(), 1e-5 * largest)
        assert error <= tolerance, (name, error)


@pytest.mark.parametrize("index", range(len(ARCHITECTURE_NAMES)), ids=ARCHITECTURE_NAMES)
def test_values_and_gradients_in_fp64(monkeypatch, index):
    """Every family: values, loss.backward() with activations held and with two forwards, and step()."""
    compute_in_double(monkeypatch)
    model = make_tiny_model(ARCHITECTURE_NAMES[index], seed=index).double()
    model.set_attn_implementation("sdpa")  # the eager attention computes its softmax in fp32
    sequences = sequences_of(index, 311)
    expected_log_probs, expected_entropies = flat_values(model, sequences, temperature=0.7)
    weights = torch.randn(len(expected_log_probs), dtype=torch.float64)
    some_loss(expected_log_probs, expected_entropies, weights).backward()
    expected = gradients_of(model)

    for strategy, holds in (("packed", True), ("path", False)):
        model.zero_grad()
        engine = bough.TreeEngine(model, strategy=strategy)
        log_probs, entropies = engine(sequences, temperature=0.7)
        assert engine.last_plan["holds_activations"] is holds
        torch.testing.assert_close(log_probs, expected_log_probs, rtol=0, atol=1e-10)
        torch.testing.assert_close(entropies, expected_entropies, rtol=0, atol=1e-10)
        some_loss(log_probs, entropies, weights).backward()
        assert_equal_gradients(gradients_of(model), expected, 1e-10)

    model.zero_grad()
    result = engine.step(
        sequences, lambda lp, ent, rows: some_loss(lp, ent, weights[rows]), temperature=0.7
    )
    assert result.loss == pytest.approx(some_loss(expected_log_probs, expected_entropies, weights).item())
    assert_equal_gradients(gradients_of(model), expected, 1e-10)

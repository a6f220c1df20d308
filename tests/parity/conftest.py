"""For all parity tests."""

import pytest


@pytest.fixture(autouse=True)
def experts_one_after_another(monkeypatch):
    """transformers' default for mixtures of experts, torch's grouped product, does not take fp64."""
    from transformers import PreTrainedModel

    def refuse(self):
        raise ValueError("use the eager implementation")

    monkeypatch.setattr(PreTrainedModel, "_grouped_mm_can_dispatch", refuse)

"""LoRA with bough.verl. The reference is verl's FSDP engine."""

import json
from copy import deepcopy

import pytest
import torch
from verl.trainer.config import CheckpointConfig
from verl_util import (
    LORA,
    LOSSES,
    assert_same_gradients,
    gradients,
    log_probs,
    make_engine,
    ppo_batch,
    with_random_adapters,
)

LORA_MODULES = {
    "all-linear": {},
    "some": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "excluded": {"target_modules": "all-linear", "exclude_modules": r".*layers\.0\..*|.*o_proj"},
}


@pytest.mark.parametrize("modules", LORA_MODULES)
def test_lora_equals_fsdp(model_folder, modules):
    model = {**LORA, **LORA_MODULES[modules]}
    engines = with_random_adapters(
        make_engine(model_folder, model=model), make_engine(model_folder, reference=True, model=model)
    )
    loss_fn = LOSSES["ppo"][1]
    losses = [sum(engine.forward_backward_batch(ppo_batch(), loss_fn)["loss"]) for engine in engines]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert_same_gradients(*map(gradients, engines))
    norms = [engine.optimizer_step() for engine in engines]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    torch.testing.assert_close(*map(log_probs, engines), rtol=0, atol=1e-4)
    for name, p in engines[0].module.named_parameters():
        assert p.requires_grad == (".lora_" in name)


def test_the_reference_of_lora_is_the_model_without_its_adapter(model_folder):
    engines = with_random_adapters(
        make_engine(model_folder, model=LORA), make_engine(model_folder, reference=True, model=LORA)
    )
    plain = log_probs(make_engine(model_folder))
    policy = log_probs(engines[0])
    assert (policy - plain).abs().max() > 1e-2
    for engine in engines:
        with engine.disable_adapter():
            torch.testing.assert_close(log_probs(engine), plain, rtol=0, atol=1e-5)
    assert torch.equal(log_probs(engines[0]), policy)
    trained = [p.requires_grad for _, p in engines[0].module.named_parameters() if ".lora_" in _]
    assert trained and all(trained)


def test_lora_in_bf16_changes_fp32_adapters(model_folder):
    [engine] = with_random_adapters(make_engine(model_folder, mixed_precision=None, model=LORA))
    base = {name: p.clone() for name, p in engine.module.named_parameters() if not p.requires_grad}
    with engine.train_mode():
        before = log_probs(engine)
        norm = engine.train_batch(ppo_batch(), LOSSES["ppo"][1])["metrics"]["grad_norm"]
    assert norm > 0 and not torch.equal(log_probs(engine), before)
    with engine.disable_adapter():
        assert torch.equal(log_probs(engine), log_probs(make_engine(model_folder, mixed_precision=None)))
    for name, p in engine.module.named_parameters():
        assert p.dtype == torch.float32 and (name not in base or torch.equal(p, base[name]))


def test_rollout_engines_get_the_adapter_the_base_or_their_sum(model_folder):
    from peft import PeftModel

    engines = with_random_adapters(
        make_engine(model_folder, model=LORA), make_engine(model_folder, reference=True, model=LORA)
    )
    for synced in (False, True):
        (got, config), (expected, expected_config) = (
            engine.get_per_tensor_param(base_sync_done=synced) for engine in engines
        )
        got, expected = dict(got), dict(expected)
        assert got.keys() == expected.keys() and config == expected_config
        for name, value in got.items():
            assert torch.equal(value, expected[name]), name
    [merging] = with_random_adapters(make_engine(model_folder, model={**LORA, "lora": {"merge": True}}))
    got, config = merging.get_per_tensor_param()
    got = dict(got)
    assert config is None
    merged = deepcopy(merging.module)
    assert isinstance(merged, PeftModel)
    for name, value in merged.merge_and_unload().state_dict().items():
        torch.testing.assert_close(got.pop(name), value, rtol=0, atol=1e-6)
    assert not got


def test_a_checkpoint_of_lora_continues_the_run(model_folder, tmp_path):
    contents = ["model", "optimizer", "extra", "hf_model"]
    checkpoint = CheckpointConfig(save_contents=contents, load_contents=contents[:3])
    [first] = with_random_adapters(make_engine(model_folder, checkpoint=checkpoint, model=LORA))
    first.train_batch(ppo_batch(), LOSSES["ppo"][1])
    first.save_checkpoint(str(tmp_path))
    second = make_engine(model_folder, checkpoint=checkpoint, model=LORA)
    second.load_checkpoint(str(tmp_path))
    assert torch.equal(log_probs(first), log_probs(second))
    for engine in (first, second):
        engine.train_batch(ppo_batch(), LOSSES["ppo"][1])
    for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)
    # The adapter is PEFT's, huggingface has the sum.
    settings = {**LORA, "lora_adapter_path": str(tmp_path / "lora_adapter")}
    again, whole = make_engine(model_folder, model=settings), make_engine(tmp_path / "huggingface")
    assert all(p.requires_grad for name, p in again.module.named_parameters() if ".lora_" in name)
    torch.testing.assert_close(log_probs(again), log_probs(whole), rtol=0, atol=1e-4)
    other = make_engine(model_folder, checkpoint=checkpoint, model={**LORA, "target_modules": ["q_proj"]})
    with pytest.raises(ValueError, match="lora_adapter: got other modules"):
        other.load_checkpoint(str(tmp_path))


def test_other_adapters_are_refused(model_folder, critic_folder, tmp_path):
    with pytest.raises(ValueError, match="lora_rank: got 4, expected 0"):
        make_engine(critic_folder, "value_model", model=LORA)
    with pytest.raises(ValueError, match="lora_adapter_path: got 'a' with lora_rank 0"):
        make_engine(model_folder, model={"lora_adapter_path": "a"})
    with pytest.raises(ValueError, match="target_parameters: got"):
        make_engine(model_folder, model={**LORA, "target_parameters": ["experts"]})
    with pytest.raises(ValueError, match="lora.rank: got 8"):
        make_engine(model_folder, model={"lora": {"rank": 8}})
    make_engine(model_folder, model=LORA).module.save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    for given, message in (("lora_dropout", "lora_dropout: got 0.5"), ("use_dora", "DoRA")):
        config = {**json.loads(path.read_text()), given: 0.5 if given == "lora_dropout" else True}
        (tmp_path / given).mkdir()
        (tmp_path / given / "adapter_config.json").write_text(json.dumps(config))
        (tmp_path / given / "adapter_model.safetensors").write_bytes(
            (tmp_path / "adapter_model.safetensors").read_bytes()
        )
        with pytest.raises(ValueError, match=message):
            make_engine(model_folder, model={**LORA, "lora_adapter_path": str(tmp_path / given)})

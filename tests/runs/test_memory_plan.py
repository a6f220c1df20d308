"""`bough plan --run`: the memory of a run on a GPU that is not there (docs/gpu_memory.md)."""

import json

import pytest

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.fixture
def plan(bough, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3_8B))
    (tmp_path / "run.yaml").write_text("model: {path: model}\ntrain_dataset: {path: train.jsonl}\n")
    return lambda *arguments, **options: bough("plan", "--run", "run.yaml", *arguments, **options)


def test_a_run_of_8b_fits_on_80_gb_with_its_optimizer_in_host_memory(plan):
    found = plan("--device", "h100", "--json", ok=True).json
    rows = {row["what"]: row for row in found["rows"]}
    assert found["fits"] and found["offloads"]
    assert rows["optimizer"]["device_bytes"] == 0
    assert 97e9 < rows["optimizer"]["host_bytes"] < 99e9  # 12 bytes for each of 8.19e9 weights
    assert found["device_bytes"] <= found["device_total"] == 80_000_000_000
    text = plan("--device", "h100", ok=True).stdout
    for what in [*rows, "samples of full length", "offloaded to host memory", "74.5 GiB"]:
        assert what in text


def test_settings_behind_it_count_and_eight_ranks_share_the_optimizer(plan):
    asynchronous = plan("rollout.max_head_offpolicyness=2", "--device", "h100", "--json", ok=True).json
    assert "weights of generation" in [row["what"] for row in asynchronous["rows"]]
    shared = plan("--device", "h100", "--ranks", "8", "--json", ok=True).json
    assert not shared["offloads"]


def test_what_does_not_fit_is_refused_with_the_smallest_change(plan):
    result = plan("actor.optimizer.offload=false", "--device", "h100")
    assert result.returncode == 2
    assert "the device has 74.5 GiB; it fits with actor.optimizer.offload=null" in result.stderr
    assert "gradients" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "choose a GPU with --device h100"),
        (["--device", "b200"], "expected h100, h200 or a100"),
        (["--device", "h100", "--memory", "40GiB"], "--memory: has no effect with --run"),
        (["--device", "h100", "--rollouts", "x.jsonl"], "--rollouts: has no effect with --run"),
        (["--device", "h100", "lr=1"], "unknown setting 'lr'"),
    ],
)
def test_refusals(plan, arguments, message):
    result = plan(*arguments)
    assert result.returncode == 2
    assert message in result.stderr

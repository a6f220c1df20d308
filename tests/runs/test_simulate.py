"""`bough simulate`: splits of a cluster, from the rates of a device and from the rates of a run."""

import json
import shlex
from pathlib import Path


def test_splits_of_planned_devices(bough):
    text = bough("simulate", "--devices", 4, "--steps", 6, "--eta", 0, 4, ok=True).stdout
    assert "best: " in text and "qwen3-0.6b in bf16 on h100" in text
    splits = json.loads(
        bough("simulate", "--devices", 4, "--steps", 6, "--eta", 0, 4, "--json", ok=True).stdout
    )["splits"]
    assert [(s["rollout_devices"], s["train_devices"]) for s in splits] == [(4, 4), (1, 3), (2, 2), (3, 1)]
    assert all(s["tokens_per_s"] > 0 and 0 <= s["trainer_idle"] <= 1 for s in splits)
    assert splits[0]["staleness_max"] == 0 < splits[3]["staleness_max"]
    # Each split as options of `bough train`.
    assert splits[0]["rank_options"] == "--ranks 4 rollout.max_head_offpolicyness=0"
    assert splits[3]["rank_options"] == "--ranks 4 rollout.ranks=3 rollout.max_head_offpolicyness=4"
    best = max(splits, key=lambda s: s["tokens_per_s"])
    assert f"as a run: bough train CONFIG {best['rank_options']}" in text


def test_a_budget_makes_long_responses_cheaper(bough):
    words = shlex.split("simulate --devices 2 --steps 4 --eta 0 --length 8000 --group-size 8 --json")
    dense = json.loads(bough(*words, ok=True).stdout)
    sparse = json.loads(bough(*words, "--sparse-budget", 512, ok=True).stdout)
    assert sparse["splits"][0]["tokens_per_s"] > 1.2 * dense["splits"][0]["tokens_per_s"]
    assert "recompute" in dense["iteration"] and "budget 512" in sparse["iteration"]
    # A budget above every context length is dense.
    wide = json.loads(bough(*words, "--sparse-budget", 10**6, ok=True).stdout)
    assert wide["splits"] == dense["splits"]


def test_plan_prices_an_iteration_dense_beside_sparse(bough):
    lines = [
        {
            "group": f"g{i // 4}",
            "input_ids": [i // 4] * 64 + [7 + i] * 4000,
            "loss_mask": [0] * 64 + [1] * 4000,
            "logprobs": [0.0] * 64 + [-1.0] * 4000,
        }
        for i in range(8)
    ]
    (bough.cwd / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["plan", "--rollouts", "rollouts.jsonl", "--device", "h100", "--sparse-budget", "16x32", "--json"]
    plan = json.loads(bough(*words, ok=True).stdout)
    dense, sparse = plan["iteration"], plan["sparse_iteration"]
    assert dense["decode_passes"] == sparse["decode_passes"] == 4000
    assert sparse["kv_bytes"] < dense["kv_bytes"] and dense["summary_bytes"] == 0 < sparse["summary_bytes"]
    assert sparse["rollout_seconds"] < dense["rollout_seconds"]
    assert 0 < dense["recompute_seconds"] < dense["update_seconds"]
    assert 0 < sparse["sparse_step_seconds"] < sparse["update_seconds"] and dense["sparse_step_seconds"] == 0
    text = bough(*words[:-1], ok=True).stdout
    assert "budget 16x32: rollout" in text and "speed over dense: rollout" in text
    refused = bough("plan", "--rollouts", "rollouts.jsonl", "--device", "h100", "--sparse-budget", "many")
    assert refused.returncode == 2 and "--sparse-budget" in refused.stderr


def test_invalid_options_are_refused(bough, tmp_path):
    for words, said in (
        (["--run", tmp_path, "--sparse-budget", 512], "--sparse-budget"),
        (["--devices", 1], "--devices"),
        (["--devices", 4, 8], "--cluster FILE"),
        (["--cluster", tmp_path / "none.yaml"], "none.yaml"),
        (["--reward-seconds", 2, 1], "--reward-seconds"),
        (["--run", tmp_path], "config.yaml"),
        (["--device", "tpu"], "h100"),
        (["--eta", -1], "--eta"),
    ):
        result = bough("simulate", *words)
        assert result.returncode == 2, (words, result.stderr)
        assert said in result.stderr, (words, result.stderr)


def test_clusters_of_several_sizes(bough):
    cluster = Path(__file__).resolve().parents[2] / "configs/cluster.yaml"
    words = ["simulate", "--cluster", cluster, "--shape", "qwen3-8b", "--steps", 3, "--batch-groups", 8]
    words += ["--devices", 2, 8, 32, "--eta", 0, 2]
    small, node, nodes = json.loads(bough(*words, "--json", ok=True).stdout)["clusters"]
    # Two devices of 80 GB cannot hold a pass and 147 GB of weights, gradients and optimizer state.
    assert small["splits"] == []
    assert node["splits"][0]["max_head_offpolicyness"] == 0
    assert {split["layout"] for split in node["splits"][1:]} & {"d4+d2t2", "d4+d2p2"}
    for split in node["splits"]:
        engines, trainers = split["layout"].split("+")
        assert ("rank_options" in split) == ("t" not in engines), split
        if "rank_options" in split and ("t" in trainers or "p" in trainers):
            assert split["rank_options"].startswith(f"actor.backend=fsdp:{trainers} rollout.ranks="), split
    assert all(split["rollout_devices"] % 2 == 0 for split in nodes["splits"])
    best = [max(s["tokens_per_s"] for s in c["splits"]) for c in (node, nodes)]
    assert best[0] < best[1] < 4 * best[0]
    text = bough(*words, ok=True).stdout
    assert text.count("too large") == 2
    assert "50 GB/s per device between nodes" in text and "best split" in text and "100%" in text
    # Slower links make a slower step.
    slow = bough.cwd / "slow.yaml"
    slow.write_text("{ nvlink_gb_per_s: 5, network_gb_per_s: 0.5 }\n")
    fewer = ["simulate", *words[3:], "--json", "--cluster"]
    slower = json.loads(bough(*fewer, slow, ok=True).stdout)["clusters"][2]["splits"]
    assert max(s["tokens_per_s"] for s in slower) < best[1]
    slow.write_text("{ nvlink: 5 }\n")
    refused = bough(*fewer, slow)
    assert refused.returncode == 2 and "nvlink_gb_per_s" in refused.stderr

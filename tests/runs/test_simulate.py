"""`bough simulate`: splits of a cluster, from a device's rates and from a run's."""

import json


def test_splits_of_planned_devices(bough):
    text = bough("simulate", "--devices", 4, "--steps", 6, "--eta", 0, 4, ok=True).stdout
    assert "best: " in text and "qwen3-0.6b in bf16 on h100" in text
    splits = json.loads(
        bough("simulate", "--devices", 4, "--steps", 6, "--eta", 0, 4, "--json", ok=True).stdout
    )["splits"]
    assert [(s["rollout_devices"], s["train_devices"]) for s in splits] == [(4, 4), (1, 3), (2, 2), (3, 1)]
    assert all(s["tokens_per_s"] > 0 and 0 <= s["trainer_idle"] <= 1 for s in splits)
    assert splits[0]["staleness_max"] == 0 < splits[3]["staleness_max"]


def test_what_cannot_be_simulated_is_refused(bough, tmp_path):
    for words, said in (
        (["--devices", 1], "--devices"),
        (["--reward-seconds", 2, 1], "--reward-seconds"),
        (["--run", tmp_path], "config.yaml"),
        (["--device", "tpu"], "h100"),
        (["--eta", -1], "--eta"),
    ):
        result = bough("simulate", *words)
        assert result.returncode == 2, (words, result.stderr)
        assert said in result.stderr, (words, result.stderr)

"""actor.routing_replay in whole runs: experts that generation recorded (R3), and the trainer's own (R2)."""

import json

import pytest
from run_util import ENVIRONMENT, final_state, read_metrics, read_rollouts
from test_mixtures import EXPERTS, SHAPE, write_mixture_experiment


def rollouts_of(run):
    return [line for path in sorted((run / "rollouts").glob("*.jsonl*")) for line in read_rollouts(path)]


def test_recorded_experts_are_stored_and_replayed_also_by_a_resumed_run(bough):
    config = write_mixture_experiment(bough, **{"actor.routing_replay": "R3"})
    bough("train", config, "trial_name=whole", ok=True, env=ENVIRONMENT)
    runs = bough.cwd / "runs/tiny"
    run = runs / "whole"
    rows = rollouts_of(run)
    assert rows
    for row in rows:
        routed = row["routed_experts"]
        assert len(routed) == len(row["input_ids"]) - 1
        assert all(len(layers) == 2 and all(len(set(layer)) == 2 for layer in layers) for layers in routed)
    for record in read_metrics(run)[1:]:
        assert record["experts/routes_differ"] <= 1e-3
        assert record["experts/tokens_differ"] <= 1e-2
        assert record["experts/records_differ"] == 0
        assert 1 <= record["experts/load_max"] <= 4
        assert record["mismatch/logprob_abs_diff"] <= 1e-4
    for steps in ("total_train_steps=4", "total_train_steps=7"):
        bough("train", config, "trial_name=parts", steps, ok=True, env=ENVIRONMENT)
    assert final_state(runs / "parts") == final_state(runs / "whole")


def test_generation_beside_training_replays_the_records_of_old_weights(bough):
    settings = {"actor.routing_replay": "R3", "rollout.max_head_offpolicyness": 2}
    config = write_mixture_experiment(bough, **settings)
    bough("train", config, ok=True, env=ENVIRONMENT)
    assert len(read_metrics(bough.cwd / "runs/tiny/trial0")) >= 7


def test_the_trainers_own_experts_are_replayed_in_later_steps_of_a_batch(bough):
    settings = {"actor.routing_replay": "R2", "actor.ppo_n_minibatches": 2, "actor.ppo_epochs": 2}
    config = write_mixture_experiment(bough, **settings)
    bough("train", config, ok=True, env=ENVIRONMENT)
    records = read_metrics(bough.cwd / "runs/tiny/trial0")[1:]
    # The first optimizer step replays what the router would choose; later ones have other weights.
    assert all(0 < record["experts/routes_differ"] < 1 for record in records)


def test_ranks_replay_as_one_process_does(bough):
    settings = {"actor.routing_replay": "R3", "actor.routing_differences": "majority"}
    config = write_mixture_experiment(bough, **settings)
    bough("train", config, "--ranks", 2, ok=True, env=ENVIRONMENT)
    for record in read_metrics(bough.cwd / "runs/tiny/trial0")[1:]:
        assert record["mismatch/logprob_abs_diff"] <= 1e-4
    r2 = ["actor.routing_replay=R2", "actor.routing_differences=exact", "actor.ppo_epochs=2", "trial_name=r2"]
    bough("train", config, *r2, "--ranks", 2, ok=True, env=ENVIRONMENT)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["actor.routing_replay=R2"], ["routing_replay", "no effect"]),
        (["actor.routing_differences=majority"], ["routing_differences", "no effect", "R3"]),
        (["actor.routing_replay=R4"], ["routing_replay", "R4", "R2"]),
    ],
)
def test_settings_without_effect_are_named(bough, overrides, words):
    config = write_mixture_experiment(bough)
    result = bough("train", config, "total_train_steps=1", *overrides, env=ENVIRONMENT)
    assert all(word in result.stderr for word in words), result.stderr


def test_a_model_without_experts_is_refused(bough):
    config = write_mixture_experiment(bough)
    bough(
        "init", "base", "--hidden-size", 32, "--layers", 2, "--heads", 2, "--kv-heads", 1, "--force", ok=True
    )
    for setting in (
        "actor.routing_replay=R3",
        "actor.routing_replay=R2",
        "rollout.return_routed_experts=true",
    ):
        refused = bough("train", config, setting, "actor.ppo_epochs=2", env=ENVIRONMENT)
        assert refused.returncode == 2, setting
        assert "no experts" in refused.stderr, refused.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda routed: routed[:-2], ["routed_experts", "expected"]),
        (lambda routed: [[[0]] * 2] * len(routed), ["1 experts in each of 2 layers", "expected 2"]),
        (lambda routed: [[[0, 9], [0, 1]]] + routed[1:], ["expert 9", "below 4"]),
        (lambda routed: [[[0, 0], [0, 1]]] + routed[1:], ["expert 0 twice"]),
        (lambda routed: [[["a", 0], [0, 1]]] + routed[1:], ["routed_experts", "a"]),
    ],
)
def test_wrong_records_of_a_rollout_file_are_named(bough, change, words):
    config = write_mixture_experiment(bough, **{"actor.routing_replay": "R3"})
    bough("train", config, "total_train_steps=1", ok=True, env=ENVIRONMENT)
    rows = rollouts_of(bough.cwd / "runs/tiny/trial0")
    rows[0]["routed_experts"] = change(rows[0]["routed_experts"])
    (bough.cwd / "wrong.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    step = [
        "step",
        "--model",
        "base",
        "--rollouts",
        "wrong.jsonl",
        "--from-rewards",
        "actor.routing_replay=R3",
    ]
    refused = bough(*step, env=ENVIRONMENT)
    assert refused.returncode == 2, refused.stdout
    assert all(word in refused.stderr for word in words), refused.stderr


def test_a_mixture_learns_from_a_teacher_that_chooses_its_own_experts(bough):
    settings = {"teacher.path": "teacher", "teacher.rl_loss_weight": 0, "teacher.loss_mode": "k2"}
    settings |= {
        "actor.loss": "pg",
        "actor.entropy_coef": 0,
        "actor.optimizer.lr": 5e-3,
        "total_train_steps": 30,
    }
    settings |= {"train_dataset.batch_size": 12, "gconfig.ignore_eos": True, "actor.routing_replay": "R3"}
    config = write_mixture_experiment(bough, **settings)
    bough("init", "teacher", *SHAPE, *EXPERTS, "--seed", 2, ok=True)
    bough("train", config, ok=True, env=ENVIRONMENT)
    records = [record for record in read_metrics(bough.cwd / "runs/tiny/trial0") if record["step"] > 0]
    kl = [record["teacher/kl_k3"] for record in records]
    assert sum(kl[-3:]) < 0.8 * sum(kl[:3]), kl
    assert all(record["mismatch/logprob_abs_diff"] <= 1e-4 for record in records)


def test_experts_and_pages_of_sparse_generation_are_replayed_together(bough):
    settings = {"actor.routing_replay": "R3", "total_train_steps": 3, "gconfig.ignore_eos": True}
    settings |= {"rollout.sparse.budget": "16x4", "rollout.sparse.dense_layers": 1}
    settings |= {"gconfig.max_new_tokens": 120, "evaluator.at_start": False, "evaluator.at_end": False}
    config = write_mixture_experiment(bough, **settings, **{"evaluator.freq_steps": 0})
    modes = {
        "sparse": [],
        "sparse_to_sparse": ["rollout.sparse.replay=true"],
        "distill": ["sparse_training.kl_loss_coef=0.1", "sparse_training.lora.rank=4"],
    }
    for mode, more in modes.items():
        bough(
            "train",
            config,
            f"sparse_training.mode={mode}",
            f"trial_name={mode}",
            *more,
            ok=True,
            env=ENVIRONMENT,
        )
        for record in read_metrics(bough.cwd / "runs/tiny" / mode):
            assert record["rollout/active_pages"] < 1
            is_same_policy = mode == "sparse_to_sparse"  # the trained policy is the one that generates
            assert (record["mismatch/logprob_abs_diff"] < 1e-4) == is_same_policy, mode
            assert (record["experts/routes_differ"] < 1e-3) == is_same_policy, mode

"""Whole runs of `bough train` on a model of a few thousand weights."""

import itertools
import json
import random
import signal
import time
from pathlib import Path

import pytest
from host_env import copies_bf16_to_fp32, is_batch_invariant
from run_util import (
    ENVIRONMENT,
    comparable_metrics,
    final_state,
    last_checkpoint,
    read_metrics,
    read_rollouts,
    write_experiment,
)


def wait_for_steps(run: Path, steps: int, process, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "metrics.jsonl").exists() and len(read_metrics(run)) > steps:
            return
        time.sleep(0.01)
    pytest.fail(f"no {steps} steps in {seconds} s; exit code {process.poll()}: {process.communicate()}")


def test_a_run_leaves_what_the_formats_promise(bough):
    config = write_experiment(bough)
    result = bough("train", config, "compare_dense=1", "--json", ok=True, env=ENVIRONMENT)
    run = bough.cwd / "runs/tiny/trial0"
    assert result.json["steps"] == 7
    assert result.json["folder"] == "runs/tiny/trial0"
    assert result.json["compression"] > 1
    assert result.json["seconds"] > 0 and result.json["dense_seconds"] > 0
    assert [result.json[when]["step"] for when in ("before", "after")] == [0, 7]
    for name in ("config.yaml", "log.txt", "report.html", "latest"):
        assert (run / name).stat().st_size > 0, name
    assert list(run.glob("events.*"))
    assert sorted(file.name for file in (run / "rollouts").iterdir()) == [
        f"step_{step}.jsonl.zst" for step in range(1, 8)
    ]
    assert sorted(folder.name for folder in (run / "checkpoints").iterdir()) == ["step_6", "step_7"]
    records = read_metrics(run)
    assert [record["step"] for record in records] == list(range(8))
    assert [record["step"] for record in records if "eval/avg_at_k" in record] == [0, 4, 7]
    expected = {
        "reward/mean", "reward/std", "reward/failures",
        "loss/policy", "policy/clip_fraction", "policy/approx_kl",
        "optim/grad_norm", "optim/lr", "optim/skipped_steps", "rollout/length_mean",
        "rollout/truncated_fraction", "rollout/zero_std_groups", "mismatch/logprob_abs_diff",
        "mismatch/importance_weight_mean", "mismatch/masked_fraction", "staleness/mean", "staleness/max",
        "tree/compression", "tree/attention_compression", "tree/recomputed_fraction", "tree_token_ratio",
        "time/step", "rollout/batch_groups", "rollout/surplus_samples", "age/mean", "age_0/tokens",
        "age_0/effective_sample_size", "age_0/clip_fraction", "age_0/importance_weight_mean",
        "time/rollout", "time/train", "time/publish", "perf/train_tokens_per_s", "perf/unique_tokens_per_s",
        "perf/generated_tokens_per_s", "perf/mfu", "memory/peak",
    }  # fmt: skip
    assert expected <= records[1].keys()
    # Rollout and trainer compute the same log-probabilities, with the same bits if the CPU allows it
    # (numerics.md).
    limit = 0 if is_batch_invariant() else 1e-4
    assert all(record["mismatch/logprob_abs_diff"] <= limit for record in records[1:])


def listed_settings(stderr: str, title: str) -> list[str]:
    lines = stderr.splitlines()
    after = lines[lines.index(title) + 1 :]
    return list(itertools.takewhile(lambda line: line.startswith("  "), after))


def test_the_start_lists_the_settings_that_differ_from_their_defaults(bough):
    config = write_experiment(bough)
    for trial, words in (("plain", []), ("json", ["--json"])):
        words = [f"trial_name={trial}", "gconfig.stop=[' ']", "seed=1", "total_train_steps=1", *words]
        result = bough("train", config, *words, ok=True, env=ENVIRONMENT)
        title = f"settings that differ from their defaults (all: runs/tiny/{trial}/config.yaml):"
        assert listed_settings(result.stderr, title) == [
            "  experiment_name: tiny",
            f"  trial_name: {trial}",
            "  model.path: base",
            "  train_dataset.path: train.jsonl",
            "  train_dataset.batch_size: 3",
            "  valid_dataset.path: valid.jsonl",
            "  gconfig.n_samples: 4",
            "  gconfig.max_new_tokens: 8",
            '  gconfig.stop: [" "]',
            "  actor.optimizer.lr: 0.001",
            "  evaluator.freq_steps: 4",
            "  saver.freq_steps: 2",
            "  total_train_steps: 1",
        ]
        assert "differ" not in result.stdout
    long = "examples/" * 20 + "train.jsonl"  # no terminal: nothing is cut
    (bough.cwd / long).parent.mkdir(parents=True)
    (bough.cwd / "train.jsonl").rename(bough.cwd / long)
    words = ["model.path=base", f"train_dataset.path={long}", "out=tuned", "max_steps=1"]
    result = bough("sft", *words, "--json", ok=True, env=ENVIRONMENT)
    title = "settings that differ from their defaults (all: bough sft --settings):"
    assert listed_settings(result.stderr, title) == [
        "  model.path: base",
        "  out: tuned",
        f"  train_dataset.path: {long}",
        "  max_steps: 1",
    ]


def test_an_asynchronous_run_is_planned_for_the_threads_that_train(bough):
    config = write_experiment(bough, **{"rollout.max_head_offpolicyness": 2, "total_train_steps": 1})
    bough("train", config, ok=True, env={"OMP_NUM_THREADS": "2"})
    profile = json.loads((bough.cwd / "runs/tiny/trial0/calibration.json").read_text())
    assert profile["threads"] == 1, "the other thread generates"


def test_the_saved_rollouts_are_a_rollout_file(bough):
    config = write_experiment(bough)
    bough("train", config, "total_train_steps=1", ok=True, env=ENVIRONMENT)
    file = "runs/tiny/trial0/rollouts/step_1.jsonl.zst"
    plan = bough("plan", "--rollouts", file, "--json", ok=True, env=ENVIRONMENT)
    assert plan.json is not None
    step = bough("step", "--model", "base", "--rollouts", file, "--json", ok=True, env=ENVIRONMENT)
    assert step.json["tokens"] > step.json["tree_tokens"]


def test_the_same_seed_gives_the_same_metrics_and_weights(bough):
    config = write_experiment(bough)
    runs = []
    for trial in ("first", "second"):
        bough("train", config, f"trial_name={trial}", ok=True, env=ENVIRONMENT)
        runs.append(bough.cwd / "runs/tiny" / trial)
    assert comparable_metrics(runs[0]) == comparable_metrics(runs[1])
    assert final_state(runs[0]) == final_state(runs[1])
    bough("train", config, "trial_name=other", "seed=2", ok=True, env=ENVIRONMENT)
    assert comparable_metrics(runs[0]) != comparable_metrics(bough.cwd / "runs/tiny/other")


@pytest.mark.parametrize(("seed", "staleness"), [(1, 0), (2, 0), (3, 2)])
def test_a_run_killed_at_any_moment_ends_with_the_same_weights(bough, seed, staleness):
    settings = {"actor.ppo_n_minibatches": 2, "saver.freq_steps": 1, "total_train_steps": 20}
    if staleness:
        settings |= {"rollout.max_head_offpolicyness": staleness, "rollout.fixed_staleness": True}
    config = write_experiment(bough, **settings)
    bough("train", config, "trial_name=whole", ok=True, env=ENVIRONMENT)
    whole, killed = bough.cwd / "runs/tiny/whole", bough.cwd / "runs/tiny/killed"
    for step, record in enumerate(read_metrics(whole)[1:]):
        age = min(step, staleness)
        assert record["staleness/mean"] == record["staleness/max"] == record["age/mean"] == age
    moments = random.Random(seed)
    for kill in range(4):
        process = bough.start("train", config, "trial_name=killed", env=ENVIRONMENT)
        # The kill waits for progress, since the clock says little on a busy machine. After that, the kill
        # comes at a random moment inside a step.
        wait_for_steps(killed, kill + moments.randrange(2), process)
        time.sleep(moments.uniform(0, 0.1))
        assert process.poll() is None
        process.kill()
        process.communicate()
    bough("train", config, "trial_name=killed", ok=True, env=ENVIRONMENT)
    assert final_state(whole) == final_state(killed)
    assert comparable_metrics(whole) == comparable_metrics(killed)
    assert sorted(f.name for f in (whole / "rollouts").iterdir()) == sorted(
        f.name for f in (killed / "rollouts").iterdir()
    )


def trained_groups(run):
    """Returns the groups that each step was trained on, all steps in one list."""
    groups = []
    for file in sorted((run / "rollouts").iterdir()):
        groups += sorted({row["group"] for row in read_rollouts(file)})
    return groups


# Each seed kills three times: 6 kills in every run of the tests, 15 more in the slow suite.
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 8))])
def test_an_asynchronous_run_killed_at_any_moment_trains_on_every_group_once(bough, seed):
    config = write_experiment(bough, **{"saver.freq_steps": 1, "total_train_steps": 12})
    bough("train", config, "trial_name=synchronous", ok=True, env=ENVIRONMENT)
    ahead = ["trial_name=ahead", "rollout.max_head_offpolicyness=2", f"seed={seed}"]
    run = bough.cwd / "runs/tiny/ahead"
    moments = random.Random(seed)
    for kill in range(3):
        process = bough.start("train", config, *ahead, env=ENVIRONMENT)
        wait_for_steps(run, 2 * kill + 1 + moments.randrange(2), process)
        time.sleep(moments.uniform(0, 0.05))
        process.kill()
        process.communicate()
    bough("train", config, *ahead, ok=True, env=ENVIRONMENT)
    records = read_metrics(run)
    assert [record["step"] for record in records] == list(range(13))
    assert max(record.get("staleness/max", 0) for record in records) > 0, "nothing was generated ahead"
    # Both runs use the same 36 of the 40 problems. Another seed uses others.
    groups = trained_groups(run)
    assert len(set(groups)) == len(groups) == 36
    if seed == 1:
        assert set(groups) == set(trained_groups(bough.cwd / "runs/tiny/synchronous"))


def test_a_stopped_asynchronous_run_goes_on_with_the_samples_that_it_had(bough):
    config = write_experiment(bough, **{"saver.freq_steps": 0, "total_train_steps": 400})
    # The staleness limiter never stops the engine. The engine generates one sample at a time. On most
    # machines a sample takes longer than the trainer needs to finish its step when the run stops. If the
    # engine is faster, the run is stopped again.
    ahead = ["trial_name=stopped", "rollout.max_head_offpolicyness=399", "gconfig.max_new_tokens=200"]
    ahead += ["rollout.max_buffered_groups=1200", "gconfig.ignore_eos=true", "evaluator.freq_steps=0"]
    ahead += ["rollout.max_concurrent_rollouts=1", "gconfig.n_samples=8"]
    run = bough.cwd / "runs/tiny/stopped"
    for stop in range(12):
        process = bough.start("train", config, *ahead, env=ENVIRONMENT)
        wait_for_steps(run, 2 + 4 * stop, process)
        if stop == 0:
            words = bough("threads", run, "--rollout", 1, "--actor", 1, ok=True).stdout
            assert words.startswith("threads")
        wait_for_steps(run, 4 + 4 * stop, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        state = json.loads((last_checkpoint(run) / "state.json").read_text())["state"]["controller"]
        begun = [sample for request in state["running"] for sample in request["samples"]]
        if begun:
            break
    assert begun, "nothing was ever running"
    assert "threads from now on: generation 1, training 1" in (run / "log.txt").read_text()
    done = state["step"]
    # Finished samples come first, three groups a step.
    steps = (len(state["buffer"]) + len(state["awaiting_reward"])) // 3 + 4
    bough("train", config, *ahead, f"total_train_steps={done + steps}", ok=True, env=ENVIRONMENT)
    # The first tokens of partial rollouts were sampled before the stop, by versions that the second process
    # never had.
    kept = {tuple(sample["tokens"]) for sample in begun}
    rows = []
    for step in range(done + 1, done + steps + 1):
        rows += read_rollouts(run / f"rollouts/step_{step}.jsonl.zst")
    responses = [
        [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
        for row in rows
    ]
    found = {tokens for tokens in kept for row in responses if row[: len(tokens)] == list(tokens)}
    assert found, "no sample went on where it stood"
    spans = [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]
    assert {"engine", "trainer", "rewards", "writer"} <= {span[0] for span in spans}
    assert json.dumps(spans[-1])[:20].replace(" ", "") in (run / "report.html").read_text()


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_a_checkpoint_and_goes_on(bough, which):
    config = write_experiment(bough, **{"saver.freq_steps": 0, "total_train_steps": 12})
    bough("train", config, "trial_name=whole", ok=True, env=ENVIRONMENT)
    run = bough.cwd / "runs/tiny/stopped"
    process = bough.start("train", config, "trial_name=stopped", env=ENVIRONMENT)
    wait_for_steps(run, 3, process)
    process.send_signal(which)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    done = int(last_checkpoint(run).name.removeprefix("step_"))
    assert 3 <= done < 12
    # If a step's evaluation is interrupted, the step's metrics are written after the run is resumed.
    assert len(read_metrics(run)) - 1 in ((done - 1, done) if done % 4 == 0 else (done,))
    assert "same command" in errors
    assert "same command" in (run / "log.txt").read_text()
    bough("train", config, "trial_name=stopped", ok=True, env=ENVIRONMENT)
    assert final_state(run) == final_state(bough.cwd / "runs/tiny/whole")
    assert comparable_metrics(run) == comparable_metrics(bough.cwd / "runs/tiny/whole")


# The evaluation is interrupted at step 4, or at the last step and again when the run is resumed.
@pytest.mark.parametrize(("step", "interruptions"), [(4, 1), (6, 2)])
def test_an_evaluation_that_is_interrupted_is_made_up_for(bough, step, interruptions):
    evaluation = {"evaluator.n_samples": 500, "evaluator.temperature": 1.0, "evaluator.at_start": False}
    config = write_experiment(bough, **{"saver.freq_steps": 0, "total_train_steps": 6, **evaluation})
    bough("train", config, "trial_name=whole", ok=True, env=ENVIRONMENT)
    run = bough.cwd / "runs/tiny/stopped"
    if step > 4:
        bough("train", config, "trial_name=stopped", "total_train_steps=5", ok=True, env=ENVIRONMENT)
    for i in range(interruptions):
        process = bough.start("train", config, "trial_name=stopped", env=ENVIRONMENT)
        # A step's rollouts are written just before its evaluation. A resumed run says so in its log.
        times_resumed = i + (step > 4)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (
            (run / f"rollouts/step_{step}.jsonl.zst").exists()
            and (run / "log.txt").read_text().count("resumed from") >= times_resumed
        ):
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert f"stopped after step {step}" in errors
        assert read_metrics(run)[-1]["step"] == step - 1
    again = bough("train", config, "trial_name=stopped", ok=True, env=ENVIRONMENT)
    assert "accuracy after" in again.stdout
    evaluated = [record["step"] for record in read_metrics(run) if "eval/avg_at_k" in record]
    assert evaluated == ([4, 6] if step == 4 else [4, 5, 6])
    if step == 4:
        assert comparable_metrics(run) == comparable_metrics(bough.cwd / "runs/tiny/whole")
    bough("train", config, "trial_name=stopped", ok=True, env=ENVIRONMENT)
    assert [record["step"] for record in read_metrics(run)] == list(range(1, 7))


def test_a_finished_run_started_again_says_so_and_trains_nothing(bough):
    config = write_experiment(bough)
    first = bough("train", config, "--json", ok=True, env=ENVIRONMENT)
    before = comparable_metrics(bough.cwd / "runs/tiny/trial0")
    again = bough("train", config, "--json", ok=True, env=ENVIRONMENT)
    assert comparable_metrics(bough.cwd / "runs/tiny/trial0") == before
    assert again.json == first.json


def test_other_settings_are_refused_by_name_and_longer_runs_are_not(bough):
    config = write_experiment(bough)
    bough("train", config, "total_train_steps=2", ok=True, env=ENVIRONMENT)
    run = bough.cwd / "runs/tiny/trial0"
    before = final_state(run)
    refused = bough("train", config, "actor.optimizer.lr=0.5", "seed=3", env=ENVIRONMENT)
    assert refused.returncode == 2
    for part in ("actor.optimizer.lr", "seed", "0.5", "trial_name"):
        assert part in refused.stderr
    assert "terminate called" not in refused.stderr
    assert final_state(run) == before
    longer = bough("train", config, "total_train_steps=4", "--json", ok=True, env=ENVIRONMENT)
    assert longer.json["steps"] == 4


def test_two_processes_do_not_share_a_run(bough):
    config = write_experiment(bough, **{"total_train_steps": 2000, "evaluator.at_start": False})
    process = bough.start("train", config, env=ENVIRONMENT)
    try:
        wait_for_steps(bough.cwd / "runs/tiny/trial0", 1, process)
        second = bough("train", config, env=ENVIRONMENT)
        assert second.returncode == 2, str(second)
        assert str(process.pid) in second.stderr
    finally:
        process.kill()
        process.communicate()


def test_a_model_of_transformers_with_the_users_own_data_and_reward(bough, tiny_models):
    """The README's example with the user's own model, a GSM8K-format file and a reward in Python."""
    (bough.cwd / "gsm8k.jsonl").write_text(
        "".join(
            f'{{"question": "Natalia sold {n} clips and then half as many. How many?", '
            f'"answer": "She sold {n}/2 = <<{n}/2={n // 2}>>{n // 2}.\\n#### {n + n // 2}"}}\n'
            for n in range(2, 42, 2)
        )
    )
    (bough.cwd / "my_reward.py").write_text(
        "def score(prompt, completion, answer, **fields):\n"
        "    assert 'Natalia' in prompt and answer.split()[-1].isdigit() and 'question' in fields\n"
        "    if completion.startswith('~'):\n"
        "        raise ValueError('no tilde, please')\n"
        "    return len(set(completion)) / 10\n"
    )
    config = write_experiment(
        bough,
        **{
            "model.path": str(tiny_models("qwen3")),
            "train_dataset.path": "gsm8k.jsonl",
            "train_dataset.format": "chat",
            "valid_dataset.path": "gsm8k.jsonl",
            "valid_dataset.format": "chat",
            "valid_dataset.max_problems": 4,
            "reward": "my_reward.py:score",
            "total_train_steps": 3,
        },
    )
    result = bough("train", config, "--json", ok=True, env=ENVIRONMENT)
    records = read_metrics(bough.cwd / "runs/tiny/trial0")
    assert all(record["reward/mean"] > 0 for record in records[1:])
    assert all(record["mismatch/logprob_abs_diff"] < 1e-4 for record in records[1:])

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = bough.cwd / result.json["model"]
    trained = AutoModelForCausalLM.from_pretrained(model)
    before = AutoModelForCausalLM.from_pretrained(tiny_models("qwen3"))
    assert any(not (a == b).all() for a, b in zip(trained.parameters(), before.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(model)("Natalia").input_ids


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actr.lr=1", ["actr", "actor"]),
        ("gconfig.n_samples=0", ["gconfig.n_samples", "0"]),
        ("model.path=nowhere", ["nowhere"]),
        ("train_dataset.path=nowhere.jsonl", ["nowhere.jsonl"]),
        ("reward=nowhere.py:score", ["nowhere.py"]),
        ("gconfig.temperature=0", ["gconfig.temperature"]),
        ("valid_dataset.path=base", ["base"]),
        ("total_train_steps", ["total_train_steps"]),
    ],
)
def test_bad_settings_end_with_a_message_before_anything_is_made(bough, override, words):
    config = write_experiment(bough)
    result = bough("train", config, override, env=ENVIRONMENT)
    assert result.returncode == 2, str(result)
    for word in words:
        assert word in result.stderr
    assert "terminate called" not in result.stderr
    assert not (bough.cwd / "runs/tiny/trial0/metrics.jsonl").exists()


def test_logits_in_fp32_bring_training_closer_to_generation(bough):
    # The rewards of a group's samples must differ.
    reward = "def score(completion, **fields):\n    return sum(map(ord, completion)) % 3 == 0\n"
    (bough.cwd / "reward.py").write_text(reward)
    settings = {"total_train_steps": 2, "evaluator.at_start": False, "dtype": "bf16"}
    config = write_experiment(bough, **settings, reward="reward.py:score")
    differences = {}
    for head in ("model", "fp32"):
        arguments = [f"model.head_dtype={head}", f"trial_name={head}", "evaluator.at_end=false"]
        bough("train", config, *arguments, ok=True, env=ENVIRONMENT)
        records = read_metrics(bough.cwd / "runs/tiny" / head)
        differences[head] = sum(record["mismatch/logprob_abs_diff"] for record in records)
        assert all(record["optim/grad_norm"] > 0 for record in records)
    assert differences["fp32"] < (1e-5 if copies_bf16_to_fp32() else differences["model"])
    refused = bough("train", config, "model.head_dtype=fp32", "dtype=fp32", "trial_name=no")
    assert refused.returncode == 2 and "head_dtype" in refused.stderr

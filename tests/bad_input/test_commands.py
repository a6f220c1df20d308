"""Bad use and bad input through the program itself. The program must exit with code 2 or 3 and print a
message of a few lines that names the fault and its place. The program must damage nothing, and must never
end by a signal or print `terminate called`."""

import json
import os
import resource
import shutil
import signal
import struct
import subprocess
from pathlib import Path

import pytest

GOOD_LINE = {
    "group": "a",
    "input_ids": [5, 6, 7],
    "loss_mask": [0, 1, 1],
    "logprobs": [0, -0.5, -0.25],
    "reward": 1,
}


@pytest.fixture
def model(tiny_models, tmp_path):
    shutil.copytree(tiny_models("qwen3"), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def rollouts(tmp_path):
    path = tmp_path / "good.jsonl"
    path.write_text(json.dumps(GOOD_LINE) + "\n" + json.dumps(GOOD_LINE | {"reward": 0}) + "\n")
    return path


@pytest.fixture
def step(bough, model, rollouts):
    """`bough step` with valid arguments, plus the arguments that a test adds."""

    def run(*arguments, model=model, rollouts=rollouts, **options):
        return bough("step", "--model", model, "--rollouts", rollouts, "--json", *arguments, **options)

    return run


def assert_refused(result, *words, code=2):
    assert result.returncode == code, result
    assert "terminate called" not in result.stderr
    assert "Exception raised from" not in result.stderr  # a stack trace
    assert result.stdout == ""
    assert 0 < len(result.stderr) < 2000
    assert len(result.stderr.splitlines()) <= 8
    for word in words:
        assert word in result.stderr, (word, result.stderr)


def test_the_good_input_is_good(step, tmp_path):
    result = step("--grads", "g.safetensors", ok=True)
    assert len(result.stdout.splitlines()) == 1 and result.json["tokens"] == 6
    assert (tmp_path / "g.safetensors").stat().st_size > 1000


USE = {
    "no command": ([], ["a command is missing", "step"]),
    "unknown command": (["stepp"], ["stepp", "did you mean step?"]),
    "nothing like a command": (["x" * 10000], ["unknown command", "one of"]),
    "unknown flag": (["--verison"], ["--verison", "did you mean --version?"]),
    "mistyped required flag": (["step", "--modell", "x"], ["--modell", "did you mean --model?"]),
    "mistyped optional flag": (["plan", "--rollouts", "x", "--jsn"], ["--jsn", "did you mean --json?"]),
    "missing flag": (["step", "--rollouts", "x"], ["bough step", "--model"]),
    "missing value": (["step", "--rollouts", "x", "--model"], ["--model"]),
    "a word too many": (["plan", "--rollouts", "x", "extra"], ["extra"]),
    "not a number": (
        ["plan", "--rollouts", "x", "--max-tokens-per-mb", "many"],
        ["--max-tokens-per-mb", "many"],
    ),
    "a fraction": (["plan", "--rollouts", "x", "--max-tokens-per-mb", "1.5"], ["--max-tokens-per-mb", "1.5"]),
    "B = 0": (["plan", "--rollouts", "x", "--max-tokens-per-mb", "0"], ["--max-tokens-per-mb", "got 0"]),
    "flag given twice": (["plan", "--rollouts", "x", "--rollouts", "y"], ["--rollouts"]),
    "init without a folder": (["init"], ["DIR"]),
    "init with too small a vocabulary": (["init", "m", "--vocab-size", "100"], ["--vocab-size", "259"]),
    "init with heads that do not divide": (["init", "m", "--heads", "7"], ["--heads"]),
    "init with key heads that do not divide": (
        ["init", "m", "--kv-heads", "3"],
        ["--kv-heads 3 does not divide --heads 8"],
    ),
    "init with an unknown architecture": (["init", "m", "--arch", "gpt2"], ["--arch", "gpt2", "qwen3"]),
    "init with a negative size": (["init", "m", "--layers", "-1"], ["--layers", "-1"]),
    "init with a folder that cannot be": (["init", "/dev/null/m"], ["/dev/null"]),
}


@pytest.mark.parametrize("case", USE)
def test_use(bough, case, tmp_path):
    arguments, words = USE[case]
    assert_refused(bough(*arguments), *words)
    assert list(tmp_path.iterdir()) == []


STEP_OPTIONS = {
    "threads 0": (["--threads", "0"], ["--threads", "got 0"]),
    "threads beyond all": (["--threads", "1000000000000"], ["--threads"]),
    "repeat 0": (["--repeat", "0"], ["--repeat", "got 0"]),
    "B = 0": (["--max-tokens-per-mb", "0"], ["--max-tokens-per-mb", "got 0"]),
    "B negative": (["--max-tokens-per-mb", "-5"], ["--max-tokens-per-mb", "-5"]),
    "dtype": (["--dtype", "fp8"], ["--dtype", "fp8", "fp32"]),
    "mode": (["--mode", "tree"], ["--mode", "tree", "path"]),
    "loss": (["--loss", "dpo"], ["--loss", "dpo", "pg"]),
    "memory": (["--memory", "much"], ["--memory", "much"]),
    "too little memory": (["--memory", "1KiB"], ["--memory", "got 1024", "smallest budget that fits"]),
    "device": (["--device", "tpu"], ["--device", "tpu"]),
    "grads in a missing folder": (["--grads", "none/g.safetensors"], ["--grads", "none"]),
    "grads is a folder": (["--grads", "model"], ["--grads", "model", "folder"]),
}


@pytest.mark.parametrize("case", STEP_OPTIONS)
def test_step_options(step, case):
    arguments, words = STEP_OPTIONS[case]
    assert_refused(step(*arguments), *words)


SETTINGS = {
    "unknown key": ("actor.loss_agregation=token_mean", ["actor.loss_agregation", "actor.loss_aggregation"]),
    "not the actor's": ("gconfig.n_samples=2", ["gconfig"]),
    "no value": ("actor.eps_clip", ["actor.eps_clip", "key=value"]),
    "impossible value": ("actor.adv_estimator=gea", ["actor.adv_estimator", "gea", "rloo"]),
    "out of range": ("actor.eps_clip=7", ["actor.eps_clip", "7"]),
    "more than one gradient": ("actor.ppo_n_minibatches=2", ["actor.ppo_n_minibatches", "got 2"]),
    "a length that no file says": ("actor.overlong_reward_penalty=true", ["overlong_reward_penalty"]),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_step_settings(step, case):
    setting, words = SETTINGS[case]
    assert_refused(step(setting), *words)


def test_cuda_without_a_gpu(step):
    """Builds with and without the CUDA library, on a machine that has no GPU."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU")
    assert_refused(step("--device", "cuda"), "device cuda", "device cpu")


def change_norm_shape(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [4, 12]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


MODELS = {
    "missing folder": (lambda m: shutil.rmtree(m), ["model"]),
    "no config": (lambda m: (m / "config.json").unlink(), ["config.json"]),
    "empty config": (lambda m: (m / "config.json").write_text(""), ["config.json", "empty"]),
    "config is a folder": (
        lambda m: ((m / "config.json").unlink(), (m / "config.json").mkdir()),
        ["config.json"],
    ),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), ["model.safetensors"]),
    "empty weights": (lambda m: (m / "model.safetensors").write_bytes(b""), ["model.safetensors", "empty"]),
    "truncated weights": (lambda m: os.truncate(m / "model.safetensors", 5000), ["model.safetensors"]),
    "header length 2^60": (
        lambda m: (m / "model.safetensors").write_bytes(
            struct.pack("<Q", 2**60) + (m / "model.safetensors").read_bytes()[8:]
        ),
        ["model.safetensors", str(2**60)],
    ),
    "wrong shape": (lambda m: change_norm_shape(m / "model.safetensors"), ["model.norm.weight", "[4, 12]"]),
}


@pytest.mark.parametrize("command", ["step", "rollout"])
@pytest.mark.parametrize("damage", MODELS)
def test_model(bough, step, model, tmp_path, damage, command):
    change, words = MODELS[damage]
    change(model)
    (tmp_path / "out").write_text("old")
    if command == "step":
        result = step("--grads", "out")
    else:
        (tmp_path / "prompts.jsonl").write_text('{"input_ids": [5, 6]}\n')
        result = bough("rollout", "--model", model, "--prompts", "prompts.jsonl", "--out", "out")
    assert_refused(result, *words)
    assert (tmp_path / "out").read_text() == "old"


def test_model_is_a_file(step, rollouts):
    assert_refused(step(model=rollouts), "good.jsonl")


ROLLOUTS = {
    "empty": ("", ["empty"]),
    "not JSON": ("{]", ["line 2"]),
    "cut off": (json.dumps(GOOD_LINE)[:-9], ["line 2"]),
    "a list": ("[1, 2]", ["line 2"]),
    "id outside the vocabulary": ({"input_ids": [5, 311, 7]}, ["line 2", "input_ids", "position 1", "311"]),
    "huge id": ({"input_ids": [5, 2**63, 7]}, ["line 2", "input_ids", "position 1"]),
    "mask too long": ({"loss_mask": [0, 1, 1, 1]}, ["line 2", "loss_mask", "4", "3"]),
    "mask of other numbers": ({"loss_mask": [0, 1, 2]}, ["line 2", "loss_mask", "position 2", "2"]),
    "logprobs too short": ({"logprobs": [0]}, ["line 2", "logprobs"]),
    "not-a-number reward": ({"reward": float("nan")}, ["line 2", "reward", "NaN"]),
    "reward as text": ({"reward": "1"}, ["line 2", "reward"]),
    "reward beyond doubles": (
        json.dumps(GOOD_LINE).replace('"reward": 1', '"reward": 1e999'),
        ["line 2", "reward"],
    ),
    "neither reward nor advantage": (
        json.dumps({k: v for k, v in GOOD_LINE.items() if k != "reward"}),
        ["line 2", "reward", "advantage"],
    ),
    "advantage too short": ({"advantage": [1.0, 2.0]}, ["line 2", "advantage"]),
    "other temperature": ({"temperature": 0.5}, ["line 2", "temperature"]),
    "a long line of nonsense": ("x" * 1_000_000, ["line 2"]),
}


@pytest.mark.parametrize("damage", ROLLOUTS)
def test_rollouts(bough, step, tmp_path, damage):
    change, words = ROLLOUTS[damage]
    second = json.dumps(GOOD_LINE | change) if isinstance(change, dict) else change
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(GOOD_LINE) + "\n" + second if second else "")
    (tmp_path / "out").write_text("old")
    assert_refused(step("--grads", "out", rollouts=path), "bad.jsonl", *words)
    assert (tmp_path / "out").read_text() == "old"
    if "vocabulary" not in damage and "neither" not in damage:  # plan has no model and needs no reward
        assert_refused(bough("plan", "--rollouts", path), "bad.jsonl", *words)


def test_rollout_file_that_is_none(bough, step, tmp_path):
    for command in (lambda path: step(rollouts=path), lambda path: bough("plan", "--rollouts", path)):
        assert_refused(command(tmp_path), "folder")
        assert_refused(command(tmp_path / "none.jsonl"), "none.jsonl")


def test_file_without_permission(bough, step, rollouts, tmp_path):
    rollouts.chmod(0)
    if os.access(rollouts, os.R_OK):
        pytest.skip("this user may read everything")
    assert_refused(step(), "good.jsonl")
    assert_refused(bough("plan", "--rollouts", rollouts), "good.jsonl")


PROMPTS = {
    "empty": ("", ["prompts.jsonl"]),
    "blank": ("\n\n", ["prompts.jsonl"]),
    "not JSON": ('{"prompt": "a"}\n{', ["prompts.jsonl:2"]),
    "neither": ('{"text": "a"}', ["prompts.jsonl:1", "prompt", "input_ids"]),
    "no token": ('{"input_ids": []}', ["prompts.jsonl:1", "input_ids"]),
    "id outside the vocabulary": ('{"input_ids": [1, 311]}', ["prompts.jsonl:1", "311"]),
    "not UTF-8": (b'{"prompt": "\xff"}', ["prompts.jsonl"]),
}


@pytest.mark.parametrize("damage", PROMPTS)
def test_prompts(bough, model, tmp_path, damage):
    content, words = PROMPTS[damage]
    (tmp_path / "prompts.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    result = bough("rollout", "--model", model, "--prompts", "prompts.jsonl", "--out", "out.jsonl")
    assert_refused(result, *words)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_report_of_a_folder_that_is_no_run(bough, model):
    before = sorted(model.iterdir())
    assert_refused(bough("report", model), "model", "config.yaml", "run's folder")
    assert sorted(model.iterdir()) == before


def test_sft_does_not_overwrite_the_model_it_starts_from(bough, model, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    before = (model / "model.safetensors").read_bytes()
    for out in (model, f"{model}/../model/"):
        result = bough("sft", "--model", model, "--data", "data.jsonl", "--out", out)
        assert_refused(result, "out", "model.path", "another folder")
    assert (model / "model.safetensors").read_bytes() == before


def test_an_unknown_device(bough, rollouts):
    assert_refused(
        bough("plan", "--rollouts", rollouts, "--device", "h1000"), "--device", "h1000", "h200", "cpu"
    )


def test_too_many_problems(bough, tmp_path):
    assert_refused(bough("data", "sums", "--out", "x.jsonl", "-n", 10**11), "-n", "at most 10000000")


def test_an_unknown_instruction_set(bough, model, rollouts):
    result = bough("step", "--model", model, "--rollouts", rollouts, env={"BOUGH_MAX_ISA": "avx-2"})
    assert_refused(result, "BOUGH_MAX_ISA", "avx-2", "baseline, avx2, avx512, avx512_bf16 or amx")


ROLLOUT_OPTIONS = {
    "no sample": (["--n-samples", "0"], ["--n-samples"]),
    "no token": (["--max-new-tokens", "0"], ["--max-new-tokens"]),
    "minimum above maximum": (
        ["--min-new-tokens", "9", "--max-new-tokens", "8"],
        ["--min-new-tokens", "9", "8"],
    ),
    "negative temperature": (["--temperature", "-1"], ["--temperature"]),
    "not-a-number temperature": (["--temperature", "nan"], ["--temperature", "nan"]),
    "top-p above 1": (["--top-p", "1.5"], ["--top-p", "got 1.5", "0 to 1"]),
    "negative top-k": (["--top-k", "-1"], ["--top-k"]),
    "min-p above 1": (["--min-p", "2"], ["--min-p", "got 2"]),
    "repetition penalty of 0": (["--repetition-penalty", "0"], ["--repetition-penalty", "got 0"]),
    "infinite penalty": (["--presence-penalty", "inf"], ["--presence-penalty", "got inf"]),
    "nothing at once": (["--max-concurrent", "0"], ["--max-concurrent"]),
    "empty stop string": (["--stop", ""], ["stop"]),
    "memory": (["--kv-memory", "1KiB"], ["kv_memory"]),
    "batch invariance in fp64": (
        ["--batch-invariant", "--dtype", "fp64"],
        ["batch_invariant", "fp32 or bf16"],
    ),
    "quantization": (["--quantization", "int4"], ["--quantization", "int4", "none or int8"]),
    "threads": (["--threads", "0"], ["--threads"]),
    "out is a folder": (["--out", "model"], ["--out", "folder"]),
}


@pytest.mark.parametrize("case", ROLLOUT_OPTIONS)
def test_rollout_options(bough, model, tmp_path, case):
    arguments, words = ROLLOUT_OPTIONS[case]
    (tmp_path / "prompts.jsonl").write_text('{"input_ids": [5, 6]}\n')
    out = [] if "--out" in arguments else ["--out", "out.jsonl"]
    assert_refused(bough("rollout", "--model", model, "--prompts", "prompts.jsonl", *out, *arguments), *words)
    assert not (tmp_path / "out.jsonl").exists()


def small_disk():
    """Limits every file to 20,000 bytes. Writing beyond the limit fails instead of killing the process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))


def run_on_small_disk(bough, *arguments):
    return subprocess.run(
        [bough.program, *map(str, arguments)], cwd=bough.cwd, capture_output=True, text=True, check=False,
        preexec_fn=small_disk, timeout=120,
    )  # fmt: skip


def test_full_disk(bough, model, rollouts, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"input_ids": [5, 6]}\n')
    for name in ("g", "out.jsonl"):
        (tmp_path / name).write_text("old")
    before = sorted(path.name for path in tmp_path.iterdir())
    step = run_on_small_disk(bough, "step", "--model", model, "--rollouts", rollouts, "--grads", "g")
    assert_refused(step, "g", code=3)
    many = ("--n-samples", 64, "--max-new-tokens", 64, "--min-new-tokens", 64)
    out = run_on_small_disk(
        bough, "rollout", "--model", model, "--prompts", "prompts.jsonl", "--out", "out.jsonl", *many
    )
    assert out.returncode == 3 and "out.jsonl" in out.stderr and "terminate called" not in out.stderr, out
    assert [(tmp_path / name).read_text() for name in ("g", "out.jsonl")] == ["old", "old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    weights = (model / "model.safetensors").read_bytes()
    init = run_on_small_disk(bough, "init", model, "--force")
    assert_refused(init, "model", code=3)
    assert (model / "model.safetensors").read_bytes() == weights


def test_full_device(bough, step, model, rollouts):
    assert_refused(step("--grads", "/dev/full"), "/dev/full", code=3)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [bough.program, "plan", "--rollouts", rollouts, "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 3 and "stdout" in done.stderr


def test_reader_that_goes_away(bough, rollouts):
    """`bough plan | head -c 0` ends as other programs do: without a message, by SIGPIPE."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [bough.program, "plan", "--rollouts", rollouts],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.returncode == -signal.SIGPIPE and done.stderr == ""


def test_interrupted_rollout_leaves_no_file(bough, model, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"input_ids": [5, 6]}\n')
    process = bough.start(
        "rollout", "--model", model, "--prompts", "prompts.jsonl", "--out", "out.jsonl", "--n-samples", 2000,
        "--max-new-tokens", 2000, "--min-new-tokens", 2000,
    )  # fmt: skip
    try:
        # The first line says that generation has begun, so the signal handler is installed when the signal
        # comes.
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("command", ["init", "step", "plan", "rollout"])
def test_help(bough, command):
    result = bough(command, "--help", ok=True)
    assert f"bough {command}" in result.stdout and result.stderr == ""
    assert "--json" in result.stdout


def test_version(bough):
    assert bough("--version", ok=True).stdout.split()[0] == "bough"

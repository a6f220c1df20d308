"""`bough train` on the demo's job with a real vLLM server that generates, compared with the embedded engine.

Needs .venv-vllm (scripts/setup_vllm). Prints the tokens a second of both engines on the same prompts."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from run_util import read_metrics

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"
STEPS = 40
PORT = 18199


def demo_folder(bough_program, tmp_path):
    if "BOUGH_DEMO_DIR" in os.environ:
        return Path(os.environ["BOUGH_DEMO_DIR"]).resolve()
    environment = {**os.environ, "BOUGH": str(bough_program), "DEMO_DIR": str(tmp_path / "demo")}
    script = [ROOT / "scripts/demo"]
    subprocess.run(script, env=environment, check=True, timeout=3000, stdout=subprocess.DEVNULL)
    return tmp_path / "demo"


@pytest.fixture
def vllm(tmp_path):
    """Starts vLLM with a model and returns its address."""
    if not PYTHON.exists():
        pytest.skip("no .venv-vllm: scripts/setup_vllm makes it")
    servers = []

    def start(model):
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", PORT]
        command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", 1024, "--enforce-eager"]
        command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        command += ["--uvicorn-log-level", "warning", "--disable-log-stats"]
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
        environment |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        log = (tmp_path / "vllm.log").open("w")
        servers.append(subprocess.Popen(list(map(str, command)), env=environment, stdout=log, stderr=log))
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health"):
                    return f"http://127.0.0.1:{PORT}"
            except (urllib.error.URLError, ConnectionError):
                assert servers[-1].poll() is None, (tmp_path / "vllm.log").read_text()[-3000:]
                time.sleep(1)
        raise TimeoutError((tmp_path / "vllm.log").read_text()[-3000:])

    yield start
    for server in servers:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def test_training_ends_where_the_embedded_engines_does(bough_program, tmp_path, vllm):
    demo = demo_folder(bough_program, tmp_path)

    def train(name, *settings):
        job = [f"fileroot={tmp_path}", f"trial_name={name}", f"model.path={demo}/warm", "compare_dense=0"]
        for dataset, file in (("train_dataset", "train"), ("valid_dataset", "test")):
            job += [f"{dataset}.path={demo}/{file}.jsonl"]
            job += [f"{dataset}.few_shot.path={demo}/examples.jsonl", f"{dataset}.few_shot.shots=3"]
        job += [f"total_train_steps={STEPS}", "evaluator.freq_steps=0", "rollout.max_concurrent_rollouts=256"]
        command = [bough_program, "train", ROOT / "configs/sums.yaml", *job, *settings]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return read_metrics(tmp_path / "demo" / name)

    def outcome(records):
        return [r["eval/avg_at_k"] for r in records if "eval/avg_at_k" in r][-1]

    def tokens_per_second(records):
        tokens = sum(r.get("rollout/new_tokens", 0) for r in records)
        return round(tokens / sum(r.get("time/rollout", 0) for r in records))

    embedded = [train(f"embedded{seed}", f"seed={seed}") for seed in (1, 2, 3)]
    url = vllm(demo / "warm")
    served = train("vllm", "rollout.backend=vllm", f"rollout.servers.addresses=[{url}]")
    spread = [outcome(records) for records in embedded]
    found = {
        "vllm": outcome(served),
        "embedded": spread,
        "tokens_per_s": {
            "vllm": tokens_per_second(served),
            "embedded": [tokens_per_second(records) for records in embedded],
        },
        "logprob_abs_diff": max(r["mismatch/logprob_abs_diff"] for r in served if r["step"] > 0),
    }
    print(json.dumps(found))
    assert found["logprob_abs_diff"] < 1e-4, found
    # The margin is the evaluation's own uncertainty (500 problems, four samples each), beyond the spread of
    # three seeds.
    assert min(spread) - 0.03 <= found["vllm"] <= max(spread) + 0.03, found

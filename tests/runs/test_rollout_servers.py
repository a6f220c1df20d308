"""`bough train` with `rollout.backend`: servers of vLLM's and SGLang's API generate (tests/servers)."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from run_util import ENVIRONMENT, read_metrics, read_rollouts, write_experiment
from test_mixtures import write_mixture_experiment
from transformers import AutoConfig, AutoModelForCausalLM

SERVER = Path(__file__).parent.parent / "servers/policy_server.py"


class Server:
    """A fixture server. The weights that it starts with do not matter, since a run sends its own. The
    architecture must match."""

    def __init__(self, model, *options):
        command = [sys.executable, SERVER, "--model", model, *options]
        self.process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
        self.url = json.loads(self.process.stdout.readline())["url"]

    def configure(self, **options):
        body = json.dumps(options).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/configure", body)):
            pass

    def loads(self):
        """Names of the folders that the server has loaded since it was configured."""
        with urllib.request.urlopen(f"{self.url}/loads") as answer:
            return [Path(path).name for path in json.loads(answer.read())]

    def end(self):
        self.process.kill()
        self.process.wait()


DEFAULTS = {"api_key": "", "max_length": 1 << 20, "raw_logprobs": False, "incremental": False, "die_after": 0}
DEFAULTS |= {"experts": False, "random_experts": "", "more_layers": 0}


@pytest.fixture(scope="module")
def running():
    servers = {}
    yield servers
    for server in servers.values():
        server.end()


@pytest.fixture
def serve(bough, running):
    """Returns a server by its number, with an API and options. `bough` must have the server's base model."""

    def start(api, number=0, **options):
        if number not in running or running[number].process.poll() is not None:
            running[number] = Server(bough.cwd / "base", "--api", api)
        running[number].configure(**{**DEFAULTS, "api": api, **options})
        return running[number]

    return start


def settings(api, *servers):
    urls = ",".join(server.url for server in servers)
    return (f"rollout.backend={api}", f"rollout.servers.addresses=[{urls}]")


def metrics_of(bough):
    return [r for r in read_metrics(bough.cwd / "runs/tiny/trial0") if "mismatch/logprob_abs_diff" in r]


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_servers_generate_by_the_weights_of_each_step(bough, serve, api):
    config = write_experiment(
        bough, **{"gconfig.top_logprobs": 3, "actor.correction": "obrs", "actor.optimizer.lr": 0.02}
    )
    server = serve(api, incremental=True)
    bough("train", config, *settings(api, server), "total_train_steps=5", ok=True, env=ENVIRONMENT)
    records = metrics_of(bough)
    assert len(records) == 5
    # After every update, the trainer's log-probabilities match those of another implementation that sampled.
    assert all(r["mismatch/logprob_abs_diff"] < 1e-4 for r in records), records
    assert server.loads() == [f"v{step}" for step in range(6)]
    run = bough.cwd / "runs/tiny/trial0"
    assert not (run / "weights").exists(), "weights for servers outlive the run"


def test_an_asynchronous_run_interrupts_the_servers(bough, serve):
    config = write_experiment(
        bough,
        **{"rollout.max_head_offpolicyness": 2, "gconfig.max_new_tokens": 60, "gconfig.ignore_eos": True},
        **{"actor.correction": "tis", "evaluator.freq_steps": 0, "evaluator.at_start": False},
        **{"evaluator.at_end": False, "total_train_steps": 5},
    )
    first, second = serve("vllm"), serve("vllm", 1)
    bough("train", config, *settings("vllm", first, second), ok=True, env=ENVIRONMENT)
    records = metrics_of(bough)
    assert len(records) == 5
    assert records[0]["mismatch/logprob_abs_diff"] < 1e-4
    assert all(r["mismatch/logprob_abs_diff"] < 0.5 for r in records)
    assert sum(r.get("rollout/interrupted_samples", 0) for r in records) > 0
    assert first.loads() == second.loads()


@pytest.mark.parametrize("eta", [0, 2])
def test_several_ranks_train_on_what_servers_generate(bough, serve, eta):
    """Rank 0 sends requests to the servers. Each rank has updated a shard of the weights. Rank 0 sends all
    weights to the servers."""
    without = {"evaluator.freq_steps": 0, "evaluator.at_start": False, "evaluator.at_end": False}
    config = write_experiment(
        bough, **without, **{"rollout.max_head_offpolicyness": eta, "actor.optimizer.lr": 0.02}
    )
    server = serve("vllm")
    words = ("train", config, *settings("vllm", server), "total_train_steps=3")
    bough(*words, "--ranks", 2, ok=True, env=ENVIRONMENT)
    records = metrics_of(bough)
    assert len(records) == 3 and all("ranks/bytes_sent" in r for r in records)
    assert all(r["mismatch/logprob_abs_diff"] < (1e-4 if eta == 0 else 0.5) for r in records)
    assert server.loads()[:3] == ["v0", "v1", "v2"]
    # The run continues from its checkpoint on one rank.
    bough(*words[:-1], "total_train_steps=4", ok=True, env=ENVIRONMENT)
    assert len(metrics_of(bough)) == 4


def test_adapters_are_merged_for_the_servers(bough, serve):
    without = {"evaluator.freq_steps": 0, "evaluator.at_start": False, "evaluator.at_end": False}
    config = write_experiment(bough, **{"lora.rank": 4, "actor.optimizer.lr": 0.02}, **without)
    arguments = (*settings("vllm", serve("vllm")), "total_train_steps=3")
    bough("train", config, *arguments, ok=True, env=ENVIRONMENT)
    assert all(r["mismatch/logprob_abs_diff"] < 1e-4 for r in metrics_of(bough))


def test_a_server_that_dies_and_one_that_comes_back(bough, serve):
    without = {"evaluator.freq_steps": 0, "evaluator.at_start": False, "evaluator.at_end": False}
    config = write_experiment(bough, **without, total_train_steps=4)
    living, dying = serve("vllm"), Server(bough.cwd / "base", "--api", "vllm", "--die-after", 60)
    result = bough("train", config, *settings("vllm", dying, living), ok=True, env=ENVIRONMENT)
    assert dying.process.wait(10) == 1
    assert "its samples continue on another server" in result.stderr
    records = metrics_of(bough)
    assert len(records) == 4 and all(r["mismatch/logprob_abs_diff"] < 1e-4 for r in records)


def refused(bough, *arguments):
    result = bough("train", bough.cwd / "config.yaml", *arguments, env=ENVIRONMENT)
    assert result.returncode in (2, 3), result
    return result.stderr


def test_wrong_servers_are_refused_with_the_remedy(bough, serve):
    write_experiment(bough)
    server = settings("vllm", serve("vllm", raw_logprobs=True))
    said = refused(bough, *server)
    assert "temperature 1" in said and "--logprobs-mode processed_logprobs" in said
    serve("vllm", api_key="secret")
    said = refused(bough, *server, "rollout.servers.timeout_seconds=1")
    assert "401" in said, said
    key = {**ENVIRONMENT, "BOUGH_ROLLOUT_API_KEY": "secret"}
    bough("train", bough.cwd / "config.yaml", *server, "total_train_steps=1", ok=True, env=key)
    serve("vllm", max_length=12)
    assert "--max-model-len" in refused(bough, *server, "trial_name=b")
    serve("vllm")
    other = ("rollout.backend=sglang", server[1], "rollout.servers.timeout_seconds=1", "trial_name=c")
    assert "/get_model_info" in refused(bough, *other)
    said = refused(bough, *server, "rollout.sparse.budget=64", "trial_name=d")
    assert "rollout.sparse.budget" in said and "dense" in said
    assert "top_p is 0.9" in refused(bough, *server, "gconfig.top_p=0.9", "trial_name=e")
    assert "rollout.servers.addresses" in refused(bough, "rollout.backend=vllm", "trial_name=f")
    nobody = ("rollout.servers.addresses=[http://127.0.0.1:9]", "rollout.servers.timeout_seconds=1")
    assert "no connection" in refused(bough, server[0], *nobody, "trial_name=g")
    # Commands that load a model generate with the embedded engine.
    bough("data", "sums", "--out", "p.jsonl", "-n", 2, ok=True)
    said = bough("eval", "--model", "base", "--data", "p.jsonl", "rollout.backend=vllm", server[1]).stderr
    assert "expected embedded" in said, said


# Experts of a mixture. The servers choose them by chance, so the trainer has their log-probabilities only if
# it replays their choice.

LAYERS, DENSE = 3, 1
WITHOUT_EVALUATION = {"evaluator.freq_steps": 0, "evaluator.at_start": False, "evaluator.at_end": False}


@pytest.fixture
def mixture_experiment(bough):
    """Writes an experiment whose model has three layers, the second one without experts."""

    def write(**given):
        fixed = {"actor.routing_replay": "R3"} | WITHOUT_EVALUATION
        config = write_mixture_experiment(bough, **fixed | given)
        base = bough.cwd / "base"
        shape = AutoConfig.from_pretrained(base)
        shape.num_hidden_layers, shape.mlp_only_layers = LAYERS, [DENSE]
        shape.layer_types = None
        AutoModelForCausalLM.from_config(shape).save_pretrained(base)
        return config

    return write


def rollouts_of(bough):
    files = sorted((bough.cwd / "runs/tiny/trial0/rollouts").glob("*.jsonl*"))
    return [line for path in files for line in read_rollouts(path)]


def check_rows(rows):
    """Each token but the last has the experts of every layer that has some."""
    assert rows
    for row in rows:
        routed = row["routed_experts"]
        assert len(routed) == len(row["input_ids"]) - 1
        assert all(len(layers) == LAYERS - 1 for layers in routed)
        assert all(len(set(experts)) == 2 for layers in routed for experts in layers)


@pytest.mark.parametrize(
    ("api", "differences"), [("vllm", "exact"), ("sglang", "exact"), ("sglang", "majority")]
)
def test_the_servers_choice_is_replayed_at_every_token(bough, serve, mixture_experiment, api, differences):
    config = mixture_experiment(**{"actor.routing_differences": differences, "gconfig.top_logprobs": 3})
    server = serve(api, experts=True, random_experts="request", incremental=True)
    words = ("train", config, *settings(api, server), "actor.correction=obrs", "total_train_steps=3")
    bough(*words, ok=True, env=ENVIRONMENT)
    check_rows(rollouts_of(bough))
    records = metrics_of(bough)
    assert len(records) == 3
    for record in records:
        assert record["experts/routes_differ"] > 0.5, "the router would choose the same experts"
        # The samples of a group have records of their own of the prompt.
        assert record["experts/records_differ"] > 0.2
        if differences == "exact":
            assert record["mismatch/logprob_abs_diff"] < 1e-5
        else:  # tokens of the prompt have another sample's experts
            assert record["mismatch/logprob_abs_diff"] > 1e-4


def test_without_replay_the_same_servers_log_probabilities_are_others(bough, serve, mixture_experiment):
    config = mixture_experiment(**{"actor.routing_replay": "none", "rollout.return_routed_experts": True})
    server = serve("vllm", experts=True, random_experts="request")
    bough("train", config, *settings("vllm", server), "total_train_steps=2", ok=True, env=ENVIRONMENT)
    check_rows(rollouts_of(bough))
    assert all(record["mismatch/logprob_abs_diff"] > 1e-4 for record in metrics_of(bough))


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_interrupted_samples_have_all_rows(bough, serve, mixture_experiment, api):
    config = mixture_experiment(
        **{"rollout.max_head_offpolicyness": 2, "gconfig.max_new_tokens": 60, "gconfig.ignore_eos": True},
        **{"actor.correction": "tis", "total_train_steps": 4},
    )
    first, second = (serve(api, number, experts=True, random_experts="request") for number in (0, 1))
    bough("train", config, *settings(api, first, second), ok=True, env=ENVIRONMENT)
    rows = rollouts_of(bough)
    check_rows(rows)
    assert any(len(set(row["versions"]) - {-1}) > 1 for row in rows), "no sample has tokens of two versions"
    records = read_metrics(bough.cwd / "runs/tiny/trial0")
    assert sum(record.get("rollout/rerouted_experts", 0) for record in records) > 0
    assert metrics_of(bough)[0]["mismatch/logprob_abs_diff"] < 1e-4


ENVIRONMENT_OF_TURNS = """
class Echo:
    def reset(self, problem, seed):
        self.turns = 0
        return {"messages": "say " + problem["answer"]}

    def step(self, action):
        self.turns += 1
        return "go on", len(action["text"]) % 3 / 2, self.turns == 3
"""


def test_a_later_turn_gives_the_last_token_of_the_turn_before_its_row(bough, serve, mixture_experiment):
    (bough.cwd / "echo.py").write_text(ENVIRONMENT_OF_TURNS)
    config = mixture_experiment(
        **{"environment.type": "python", "environment.path": "echo.py:Echo", "total_train_steps": 2},
        **{"model.path": "warm", "gconfig.max_new_tokens": 12},
    )
    bough("data", "guess", "--out", "traces.jsonl", "-n", 60, "--traces", ok=True)
    data = ("--data", "traces.jsonl", "--max-steps", 30, "--lr", 1e-2)
    bough("sft", "--model", "base", "--out", "warm", *data, ok=True)
    server = serve("vllm", experts=True, random_experts="prefix")
    bough("train", config, *settings("vllm", server), ok=True, env=ENVIRONMENT)
    rows = rollouts_of(bough)
    check_rows(rows)
    assert max(max(row["turns"]) for row in rows) > 0, "no conversation has a second turn"
    assert all(record["mismatch/logprob_abs_diff"] < 1e-4 for record in metrics_of(bough))


def test_servers_that_return_no_experts_are_refused_with_the_remedy(bough, serve, mixture_experiment):
    config = mixture_experiment()

    def refused(*words):
        result = bough("train", config, "total_train_steps=1", *words, env=ENVIRONMENT)
        assert result.returncode == 2, result
        return result.stderr

    said = refused(*settings("vllm", serve("vllm")))
    assert "no route /inference/v1/generate" in said, said
    assert "--enable-return-routed-experts --enable-scale-out" in said
    said = refused(*settings("sglang", serve("sglang")), "trial_name=b")
    assert "no routed_experts" in said, said
    assert "sglang.launch_server --model-path MODEL --enable-return-routed-experts" in said
    said = refused(*settings("sglang", serve("sglang", experts=True, more_layers=1)), "trial_name=c")
    assert "routed_experts: got" in said and f"rows of {LAYERS} layers with 2 experts" in said, said
    bough(
        "init", "base", "--hidden-size", 32, "--layers", 2, "--heads", 2, "--kv-heads", 1, "--force", ok=True
    )
    assert "no experts" in refused(
        *settings("vllm", serve("vllm")),
        "trial_name=d",
        "actor.routing_replay=none",
        "rollout.return_routed_experts=true",
    )

"""Data sets as people have them: messages with calls and tools, prompts that are too long, and files that
change between two processes of a run."""

import json

import pytest
from run_util import ENVIRONMENT, read_metrics, read_rollouts, to_yaml
from tiny_models import write_tiny_model
from transformers import AutoTokenizer

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": {"city": "Oslo", "a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
MESSAGES = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "", "reasoning_content": "look it up", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def experiment(bough):
    """Writes a model and a configuration. The test writes train.jsonl."""
    write_tiny_model(bough.cwd / "base", "qwen3", num_hidden_layers=1, max_position_embeddings=512)
    (bough.cwd / "base/chat_template.jinja").write_text(TEMPLATE)
    (bough.cwd / "reward.py").write_text("def score(completion, **fields):\n    return len(completion) % 3\n")
    settings = {
        "experiment_name": "tiny",
        "model.path": "base",
        "train_dataset.path": "train.jsonl",
        "train_dataset.batch_size": 1,
        "gconfig.n_samples": 2,
        "gconfig.max_new_tokens": 2,
        "reward": "reward.py:score",
        "saver.freq_steps": 1,
        "total_train_steps": 1,
        "compare_dense": 0,
    }
    (bough.cwd / "config.yaml").write_text(to_yaml(settings))
    return bough.cwd


@pytest.mark.parametrize("form", ["objects", "texts"])
def test_all_fields_of_messages_and_tools_reach_the_template(bough, experiment, form):
    messages, tools = json.loads(json.dumps(MESSAGES)), TOOLS
    if form == "texts":  # as in answers of OpenAI's API and in Parquet files
        messages[1]["content"] = None
        function = messages[1]["tool_calls"][0]["function"]
        function["arguments"] = json.dumps(function["arguments"])
        messages[0]["tool_calls"] = messages[2]["reasoning_content"] = None
        messages[2]["content"] = [{"type": "text", "text": "rain"}]
        tools = json.dumps(TOOLS)
    row = {"messages": messages, "tools": tools, "answer": "x"}
    write_lines(experiment / "train.jsonl", [row])
    tokenizer = AutoTokenizer.from_pretrained(experiment / "base")
    expected = tokenizer.apply_chat_template(
        MESSAGES, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )

    bough("train", "config.yaml", ok=True, env=ENVIRONMENT)
    samples = read_rollouts(experiment / "runs/tiny/trial0/rollouts/step_1.jsonl.zst")
    assert [sample["prompt"] for sample in samples] == [expected] * 2

    arguments = ["--model", "base", "--prompts", "train.jsonl", "--out", "out.jsonl", "--max-new-tokens", 1]
    bough("rollout", *arguments, ok=True, env=ENVIRONMENT)
    rollout = json.loads((experiment / "out.jsonl").read_text().splitlines()[0])
    prompt = [id for id, mask in zip(rollout["input_ids"], rollout["loss_mask"], strict=True) if not mask]
    assert prompt == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert rollout["answer"] == "x"


def test_tools_of_a_plain_row_reach_the_template(bough, experiment):
    row = {"prompt": "weather?", "answer": "x", "tools": TOOLS}
    write_lines(experiment / "train.jsonl", [{"question": "q", "answer": "x"}, row])
    for command in (
        ["train", "config.yaml"],
        ["eval", "--model", "base", "--data", "train.jsonl", "--reward", "reward.py:score"],
        ["sft", "--model", "base", "--data", "train.jsonl", "--out", "out"],
    ):
        refused = bough(*command, env=ENVIRONMENT)
        assert refused.returncode == 2
        assert "train.jsonl:2: tools: a plain prompt shows no tools" in refused.stderr, command

    write_lines(experiment / "train.jsonl", [row])
    tokenizer = AutoTokenizer.from_pretrained(experiment / "base")
    asked = [{"role": "user", "content": "weather?"}]
    expected = tokenizer.apply_chat_template(asked, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    # An environment makes a conversation of a plain row.
    (experiment / "env.py").write_text(
        "class E:\n"
        "    def reset(self, problem, seed):\n"
        "        return {}\n"
        "    def step(self, action):\n"
        "        return {'reward': 1.0, 'done': True}\n"
    )
    environment = [
        "environment.type=python",
        "environment.path=env.py:E",
        "environment.tool_call_parser=hermes",
    ]
    for trial, keys in (("chat", ["train_dataset.format=chat"]), ("environment", environment)):
        bough("train", "config.yaml", *keys, f"trial_name={trial}", ok=True, env=ENVIRONMENT)
        samples = read_rollouts(experiment / f"runs/tiny/{trial}/rollouts/step_1.jsonl.zst")
        ids = [
            id for id, mask in zip(samples[0]["input_ids"], samples[0]["loss_mask"], strict=True) if not mask
        ]
        assert tokenizer.decode(ids) == expected, trial


def test_sft_learns_calls_and_reasoning(bough, experiment):
    write_lines(experiment / "train.jsonl", [{"messages": MESSAGES[:2], "tools": TOOLS}])
    arguments = ["--model", "base", "--data", "train.jsonl", "--out", "out", "--max-steps", 1, "--json"]
    result = json.loads(bough("sft", *arguments, ok=True, env=ENVIRONMENT).stdout)
    tokenizer = AutoTokenizer.from_pretrained(experiment / "base")
    written = tokenizer.apply_chat_template(MESSAGES[:2], tools=TOOLS, tokenize=False)
    answer = written.rsplit("<|im_start|>assistant\n", 1)[1].rstrip("\n")
    assert result["trained_tokens"] == len(tokenizer(answer, add_special_tokens=False)["input_ids"])


OVERLONG = [{"question": f"q{i}", "answer": "1"} for i in range(6)] + [{"question": "z" * 600, "answer": "1"}]


@pytest.mark.parametrize("where", ["train", "valid"])
def test_an_overlong_prompt_is_found_before_the_run(bough, experiment, where):
    write_lines(experiment / "train.jsonl", OVERLONG[:6])
    write_lines(experiment / f"{where}.jsonl", OVERLONG)
    data = f"{where}_dataset"
    refused = bough("train", "config.yaml", f"{data}.path={where}.jsonl", env=ENVIRONMENT)
    assert refused.returncode == 2
    assert f"{where}.jsonl:7: the prompt has 606 tokens, expected at most 511" in refused.stderr
    assert "1 of 7 prompts" in refused.stderr
    assert not (experiment / "runs/tiny/trial0/metrics.jsonl").exists()

    keys = [f"{data}.path={where}.jsonl", f"{data}.filter_overlong_prompts=true", "total_train_steps=8"]
    left_out = bough("train", "config.yaml", *keys, ok=True, env=ENVIRONMENT)
    assert "1 of 7 prompts have more than 511 tokens" in left_out.stderr
    assert read_metrics(experiment / "runs/tiny/trial0")[-1]["step"] == 8


def test_an_overlong_plain_prompt_is_cut_at_its_left(bough, experiment):
    write_lines(experiment / "train.jsonl", OVERLONG[6:])
    bough("train", "config.yaml", "train_dataset.overlong_prompts=truncate_left", ok=True, env=ENVIRONMENT)
    sample = read_rollouts(experiment / "runs/tiny/trial0/rollouts/step_1.jsonl.zst")[0]
    assert sample["prompt"].endswith("zzz\nA:")
    assert sample["loss_mask"].index(1) == 511


def test_a_run_does_not_resume_with_another_field(bough, experiment):
    rows = [{"question": f"q{i}", "answer": "x", "gold": 1} for i in range(4)]
    write_lines(experiment / "train.jsonl", rows)
    bough("train", "config.yaml", ok=True, env=ENVIRONMENT)
    write_lines(experiment / "train.jsonl", [{**row, "gold": 9} for row in rows])
    changed = bough("train", "config.yaml", "total_train_steps=2", env=ENVIRONMENT)
    assert changed.returncode == 2
    assert "train.jsonl: cannot resume" in changed.stderr and "fields of its lines changed" in changed.stderr
    write_lines(experiment / "train.jsonl", rows)
    bough("train", "config.yaml", "total_train_steps=2", ok=True, env=ENVIRONMENT)


def test_a_run_does_not_resume_with_another_validation_set(bough, experiment):
    rows = [{"question": f"q{i}", "answer": "x", "gold": 1} for i in range(4)]
    write_lines(experiment / "train.jsonl", rows)
    write_lines(experiment / "valid.jsonl", rows)
    keys = ["valid_dataset.path=valid.jsonl"]
    bough("train", "config.yaml", *keys, ok=True, env=ENVIRONMENT)
    for changed, message in (
        (rows[1:], "it had 4 problems, now it has 3"),
        ([{**row, "answer": "y"} for row in rows], "prompts, messages or answers changed"),
        ([{**row, "gold": 9} for row in rows], "fields of its lines changed"),
    ):
        write_lines(experiment / "valid.jsonl", changed)
        refused = bough("train", "config.yaml", *keys, "total_train_steps=2", env=ENVIRONMENT)
        assert refused.returncode == 2
        assert "valid.jsonl: cannot resume" in refused.stderr and message in refused.stderr

    # A checkpoint of version 0.1.0 says nothing about the validation set.
    state = experiment / "runs/tiny/trial0/checkpoints/step_1/state.json"
    saved = json.loads(state.read_text())
    del saved["state"]["valid_dataset"]
    state.write_text(json.dumps(saved))
    bough("train", "config.yaml", *keys, "total_train_steps=2", ok=True, env=ENVIRONMENT)


def test_an_environment_may_return_messages_in_openais_form(bough, experiment):
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**CALL, "function": {"name": "get", "arguments": '{"city": "Oslo", "a": 1}'}}],
    }
    messages = [MESSAGES[0], message, {**MESSAGES[2], "content": [{"type": "text", "text": "rain"}]}]
    (experiment / "env.py").write_text(
        "class E:\n"
        "    def reset(self, problem, seed):\n"
        f"        return {{'messages': {messages!r}}}\n"
        "    def step(self, action):\n"
        "        return {'reward': 1.0, 'done': True}\n"
    )
    write_lines(experiment / "train.jsonl", OVERLONG[:1])
    arguments = ["--model", "base", "--prompts", "train.jsonl", "--out", "out.jsonl", "--max-new-tokens", 1]
    bough("rollout", *arguments, "--environment", "python", "path=env.py:E", ok=True, env=ENVIRONMENT)
    rollout = json.loads((experiment / "out.jsonl").read_text().splitlines()[0])
    tokenizer = AutoTokenizer.from_pretrained(experiment / "base")
    prompt = [id for id, mask in zip(rollout["input_ids"], rollout["loss_mask"], strict=True) if not mask]
    given = [MESSAGES[0], {key: MESSAGES[1][key] for key in ("role", "content", "tool_calls")}, MESSAGES[2]]
    assert tokenizer.decode(prompt) == tokenizer.apply_chat_template(
        given, add_generation_prompt=True, tokenize=False
    )

"""Answers end at the token that the chat template ends a turn with, also if generation_config.json lacks it:
in serve and rollout. A saved model's generation_config.json has it."""

import json
import shutil
import subprocess

import pytest
from script_model import TEMPLATE, THINK, text_of
from serve_util import Served


@pytest.fixture(scope="module", params=["template", "eos_token"])
def base_model(request, script_model, tmp_path_factory):
    """The scripted model as a base model: its files end a text with <|endoftext|>, and it never writes this
    token. Only the chat template, or only eos_token, names <|im_end|>."""
    directory = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(script_model, directory)
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 0}))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    if request.param == "template":
        config["eos_token"] = "<|endoftext|>"
    else:
        (directory / "chat_template.jinja").write_text(TEMPLATE.replace("<|im_end|>", ""))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_serve(bough_program, base_model):
    import openai

    with Served(bough_program, base_model) as served:
        client = openai.OpenAI(base_url=served.url + "/v1", api_key="none")
        answer = client.chat.completions.create(
            model=served.name, messages=[{"role": "user", "content": "Hi"}], max_tokens=40, temperature=0
        )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text_of(THINK)


def test_rollout(bough, base_model):
    (bough.cwd / "prompts.jsonl").write_text(json.dumps({"prompt": "Hi<|think|>"}) + "\n")
    sampling = ("--temperature", 0, "--max-new-tokens", 40)
    bough(
        "rollout", "--model", base_model, "--prompts", "prompts.jsonl", "--out", "out.jsonl", *sampling,
        ok=True,
    )  # fmt: skip
    rollout = json.loads((bough.cwd / "out.jsonl").read_text())
    assert rollout["finish_reason"] == "stop" and rollout["input_ids"][-1] == 1


def test_a_saved_model_lists_the_token(build_dir, base_model, tmp_path):
    subprocess.run([build_dir / "bin" / "checkpoint_tool", "copy", base_model, tmp_path / "out"], check=True)
    before = json.loads((base_model / "generation_config.json").read_text())
    after = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert after == before | {"eos_token_id": [0, 1]}

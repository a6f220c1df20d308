"""The official `openai` client, given a base_url and nothing else."""

import json
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from host_env import is_batch_invariant
from safetensors.torch import load_file, save_file
from script_model import ANSWER, BROKEN, EMOJI, TEMPLATE, text_of
from serve_util import Served

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "a tool",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    for name in ("add", "look")
]
QUESTION = [{"role": "user", "content": "What is it?"}]
CALLS = [("add", {"a": 2, "b": 40}), ("look", {"where": "über"})]


def client_of(served: Served, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0, **options)


@pytest.fixture
def client(scripted: Served) -> openai.OpenAI:
    return client_of(scripted)


@pytest.fixture
def random_client(random_model: Served) -> openai.OpenAI:
    return client_of(random_model)


def test_models(client: openai.OpenAI, scripted: Served):
    (model,) = client.models.list().data
    assert model.id == scripted.name
    assert client.models.retrieve(scripted.name).id == scripted.name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client: openai.OpenAI, scripted: Served):
    answer = client.chat.completions.create(model=scripted.name, messages=QUESTION)
    (choice,) = answer.choices
    assert choice.message.content == "Hello, world!"
    assert choice.message.reasoning_content == "Hm, well."
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == 8  # seven pieces and the end of the turn
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4  # the last one ends the reasoning
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_chat_stream_is_the_unstreamed_answer(client: openai.OpenAI, scripted: Served):
    chunks = list(
        client.chat.completions.create(
            model=scripted.name,
            messages=QUESTION,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 4
    assert chunks[-1].choices == []
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert choices[0].delta.role == "assistant"
    content = [choice.delta.content for choice in choices if choice.delta.content]
    assert "".join(content) == "Hello, world!"
    assert len(content) > 2  # the content is streamed
    reasoning = "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in choices)
    assert reasoning == "Hm, well."
    assert [choice.finish_reason for choice in choices][-1] == "stop"
    assert all(choice.finish_reason is None for choice in choices[:-1])


def test_tool_calls_and_their_results(client: openai.OpenAI, scripted: Served):
    answer = client.chat.completions.create(model=scripted.name, messages=QUESTION, tools=TOOLS)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == CALLS
    assert len({call.id for call in calls}) == 2
    results = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in calls]
    answer = client.chat.completions.create(
        model=scripted.name, messages=[*QUESTION, message, *results], tools=TOOLS
    )
    assert answer.choices[0].message.content == text_of(ANSWER)


def test_streamed_tool_calls_are_the_unstreamed_ones(client: openai.OpenAI, scripted: Served):
    with client.chat.completions.stream(model=scripted.name, messages=QUESTION, tools=TOOLS) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    whole = client.chat.completions.create(model=scripted.name, messages=QUESTION, tools=TOOLS).choices[0]
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    functions = [
        [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        for choice in (streamed, whole)
    ]
    assert functions[0] == functions[1]
    assert (streamed.message.content or "") == (whole.message.content or "") == "\n\n"


def test_tool_choice(client: openai.OpenAI, scripted: Served):
    answer = client.chat.completions.create(
        model=scripted.name, messages=QUESTION, tools=TOOLS, tool_choice="none"
    )
    assert answer.choices[0].message.tool_calls is None
    assert "<tool_call>" in answer.choices[0].message.content


def test_a_forced_call(client: openai.OpenAI, scripted: Served):
    """The answer begins with a call instead of reasoning."""
    options = {"model": scripted.name, "messages": QUESTION, "tools": TOOLS}
    for forced in ("required", {"type": "function", "function": {"name": "look"}}):
        (choice,) = client.chat.completions.create(**options, tool_choice=forced).choices
        assert not choice.message.content and not choice.message.reasoning_content
        calls = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
        assert calls == CALLS
        assert choice.finish_reason == "tool_calls"
        with client.chat.completions.stream(**options, tool_choice=forced) as stream:
            (streamed,) = stream.get_final_completion().choices
        assert [c.function.name for c in streamed.message.tool_calls] == ["add", "look"]
    answer = client.responses.create(
        model=scripted.name,
        input="?",
        tools=[{"type": "function", **TOOLS[0]["function"]}],
        tool_choice="required",
    )
    assert [item.name for item in answer.output] == ["add", "look"]
    for wrong in ({"tools": []}, {"tool_choice": {"type": "function", "function": {"name": "other"}}}):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**{**options, "tool_choice": "required", **wrong})
        assert error.value.param == "tool_choice"


def test_a_call_that_cannot_be_read_is_content_and_counted(client: openai.OpenAI, scripted: Served):
    before = scripted.metrics()["malformed_tool_calls_total"]
    answer = client.chat.completions.create(
        model=scripted.name, messages=[{"role": "user", "content": "broken"}], tools=TOOLS
    )
    assert answer.choices[0].message.content == text_of(BROKEN)
    assert answer.choices[0].finish_reason == "stop"
    assert scripted.metrics()["malformed_tool_calls_total"] == before + 1


def test_a_stream_never_splits_a_character(client: openai.OpenAI, scripted: Served):
    chunks = client.chat.completions.create(
        model=scripted.name,
        messages=[{"role": "user", "content": "bytes"}],
        stream=True,
        extra_body={"return_token_ids": True},
    )
    pieces, ids = [], []
    for chunk in chunks:
        pieces.append(chunk.choices[0].delta.content or "")
        ids += getattr(chunk.choices[0], "token_ids", None) or []
    assert [piece for piece in pieces if piece] == list(EMOJI)
    assert len(ids) == len(EMOJI.encode()) + 1  # each byte, and the end of the turn


def test_stop_strings(client: openai.OpenAI, scripted: Served):
    options = {"model": scripted.name, "messages": QUESTION, "stop": ["world", "lo, wor"]}
    choice = client.chat.completions.create(**options).choices[0]
    assert (choice.message.content, choice.finish_reason, choice.stop_reason) == ("Hel", "stop", "lo, wor")
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hel"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_length(client: openai.OpenAI, scripted: Served):
    for limit in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
        answer = client.chat.completions.create(model=scripted.name, messages=QUESTION, **limit)
        assert answer.choices[0].message.content == "Hello, "
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 5


def test_logprobs_and_token_ids(client: openai.OpenAI, scripted: Served, script_model: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(script_model)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    answer = client.chat.completions.create(
        model=scripted.name, messages=QUESTION, logprobs=True, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0]
    assert answer.prompt_token_ids == tokenizer.encode(prompt, add_special_tokens=False)
    assert tokenizer.decode(choice.token_ids) == "<think>Hm, well.</think>Hello, world!<|im_end|>"
    assert [token.token for token in choice.logprobs.content] == [
        tokenizer.decode([token]) for token in choice.token_ids
    ]
    assert all(-1e-6 < token.logprob <= 0 for token in choice.logprobs.content)
    assert b"".join(bytes(token.bytes) for token in choice.logprobs.content).endswith(b"world!<|im_end|>")
    chunks = list(
        client.chat.completions.create(
            model=scripted.name,
            messages=QUESTION,
            logprobs=True,
            stream=True,
            extra_body={"return_token_ids": True},
        )
    )
    assert chunks[0].prompt_token_ids == answer.prompt_token_ids
    streamed = [chunk.choices[0] for chunk in chunks]
    assert sum((getattr(c, "token_ids", None) or [] for c in streamed), []) == choice.token_ids
    assert sum((c.logprobs.content for c in streamed if c.logprobs), []) == choice.logprobs.content


def test_samples_and_seeds(random_client: openai.OpenAI, random_model: Served):
    def draw(**options) -> list[str]:
        answer = random_client.chat.completions.create(
            model=random_model.name, messages=QUESTION, max_tokens=12, **options
        )
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.message.content for choice in answer.choices]

    five = draw(n=5, seed=7)
    assert len(set(five)) == 5
    assert draw(n=5, seed=7) == five  # earlier requests do not matter
    assert draw(n=5, seed=8) != five
    assert draw() != draw()
    assert len(set(draw(n=3, temperature=0))) == 1
    stream = random_client.chat.completions.create(
        model=random_model.name, messages=QUESTION, max_tokens=12, n=5, seed=7, stream=True
    )
    texts = [""] * 5
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == five


def test_greedy_answers_are_those_of_bough_rollout(
    bough, random_client: openai.OpenAI, random_model: Served, tiny_models
):
    prompts = ["The thing in 12 00", "ein Wort über 12", "1 2 3"]
    (bough.cwd / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    bough(
        *("rollout", "--model", tiny_models("qwen3"), "--prompts", "prompts.jsonl", "--out", "out.jsonl"),
        *("--temperature", 0, "--n-samples", 1, "--max-new-tokens", 40),
        ok=True,
    )
    rollouts = [json.loads(line) for line in (bough.cwd / "out.jsonl").read_text().splitlines()]
    answer = random_client.completions.create(
        model=random_model.name,
        prompt=prompts,
        max_tokens=40,
        temperature=0,
        logprobs=0,
        extra_body={"return_token_ids": True},
    )
    assert len(rollouts) == len(answer.choices) == 3
    for rollout, choice in zip(rollouts, answer.choices, strict=True):
        assert choice.prompt_token_ids + choice.token_ids == rollout["input_ids"]
        assert choice.logprobs.token_logprobs == pytest.approx(
            rollout["logprobs"][-len(choice.token_ids) :], abs=1e-5
        )


def test_most_likely_tokens(random_client: openai.OpenAI, random_model: Served):
    options = {"model": random_model.name, "messages": QUESTION, "logprobs": True, "top_logprobs": 5}
    options |= {"max_tokens": 4, "seed": 1, "extra_body": {"ignore_eos": True}}

    def answer(temperature: float):
        return (
            random_client.chat.completions.create(temperature=temperature, **options)
            .choices[0]
            .logprobs.content
        )

    def top_of(token):
        return [(tuple(top.bytes), pytest.approx(top.logprob, abs=1e-5)) for top in token.top_logprobs]

    greedy = answer(0)
    for token in greedy:
        assert len(token.top_logprobs) == 5
        assert top_of(token)[0] == (tuple(token.bytes), pytest.approx(token.logprob, abs=1e-6))
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) < 1
    # These are the model's own log-probabilities, whatever the sampling temperature is.
    for temperature in (0.3, 1.0, 2.0):
        first = answer(temperature)[0].top_logprobs
        assert [(tuple(top.bytes), top.logprob) for top in first] == top_of(greedy[0])
    stream = random_client.chat.completions.create(temperature=0, stream=True, **options)
    chunks = [chunk.choices[0] for chunk in stream]
    assert sum((chunk.logprobs.content for chunk in chunks if chunk.logprobs), []) == greedy
    # In the completions format, tokens with the same text are told apart by their ids.
    by_text = (
        random_client.completions.create(
            model=random_model.name, prompt="The 12", max_tokens=3, temperature=0, logprobs=5
        )
        .choices[0]
        .logprobs
    )
    for drawn, top in zip(by_text.token_logprobs, by_text.top_logprobs, strict=True):
        assert len(top) == 5
        assert drawn == pytest.approx(max(top.values()), abs=1e-6)


def test_completions(random_client: openai.OpenAI, random_model: Served):
    options = {"model": random_model.name, "max_tokens": 9, "temperature": 0}
    by_text = random_client.completions.create(
        prompt="The 12", extra_body={"return_token_ids": True}, **options
    ).choices[0]
    by_ids = random_client.completions.create(prompt=by_text.prompt_token_ids, **options)
    assert by_ids.choices[0].text == by_text.text
    assert by_ids.usage.prompt_tokens == len(by_text.prompt_token_ids)
    echoed = random_client.completions.create(prompt="The 12", echo=True, **options)
    assert echoed.choices[0].text == "The 12" + by_text.text
    several = random_client.completions.create(
        prompt=[by_text.prompt_token_ids, [5, 6]], n=2, echo=True, **options
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[1].text == echoed.choices[0].text
    chunks = list(random_client.completions.create(prompt="The 12", echo=True, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len(random_client.completions.create(model=random_model.name, prompt="1").choices[0].text) > 0


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"model": "other"}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": 1}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"extra_body": {"temperatur": 1}}, "temperatur"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ],
)
def test_bad_requests_name_the_field(client: openai.OpenAI, scripted: Served, options, param):
    with pytest.raises(openai.APIStatusError) as error:
        client.chat.completions.create(**{"model": scripted.name, "messages": QUESTION, **options})
    assert error.value.status_code == (404 if param == "model" else 400)
    assert error.value.param == param
    assert error.value.type == "invalid_request_error"


def test_tokens_of_the_same_text_are_all_listed(random_client: openai.OpenAI, random_model: Served):
    """Bytes of which a character has several, and ids without a text, have the same text."""
    options = {
        "model": random_model.name,
        "max_tokens": 20,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    listed = random_client.completions.create(prompt="hello", logprobs=20, **options).choices[0].logprobs
    assert [len(top) for top in listed.top_logprobs] == [20] * 20
    assert any(key.startswith("token_id:") for top in listed.top_logprobs for key in top)
    for token, logprob, top in zip(listed.tokens, listed.token_logprobs, listed.top_logprobs, strict=True):
        assert top[token] == pytest.approx(logprob, abs=1e-6)


def test_one_call_at_a_time(client: openai.OpenAI, scripted: Served):
    """The model writes two calls. Generation stops after the first."""
    options = {"model": scripted.name, "messages": QUESTION, "tools": TOOLS}
    both = client.chat.completions.create(**options)
    one = client.chat.completions.create(**options, parallel_tool_calls=False)
    (call,) = one.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == CALLS[0]
    assert one.choices[0].finish_reason == "tool_calls"
    assert one.choices[0].message.content == both.choices[0].message.content
    assert one.usage.completion_tokens < both.usage.completion_tokens
    with client.chat.completions.stream(**options, parallel_tool_calls=False) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert [call.function.name for call in streamed.message.tool_calls] == ["add"]
    assert streamed.finish_reason == "tool_calls"
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    answer = client.responses.create(
        model=scripted.name, input="What is it?", tools=tools, parallel_tool_calls=False
    )
    assert [item.name for item in answer.output if item.type == "function_call"] == ["add"]
    assert answer.parallel_tool_calls is False


def test_the_format_of_calls_is_found_in_the_template(
    bough_program: Path, script_model: Path, tmp_path: Path
):
    """`tool_call_parser: auto`, the default. The log names the format."""
    served_model = tmp_path / "model"
    shutil.copytree(script_model, served_model)
    for marker, named in (("<tool_call> name", "auto: hermes"), ("", "auto: none")):
        (served_model / "chat_template.jinja").write_text(f"{{# {marker} #}}{TEMPLATE}")
        with Served(bough_program, served_model, "reasoning_parser=qwen3") as served:
            client = client_of(served)
            if marker:
                answer = client.chat.completions.create(model="model", messages=QUESTION, tools=TOOLS)
                assert [c.function.name for c in answer.choices[0].message.tool_calls] == ["add", "look"]
            else:
                with pytest.raises(openai.BadRequestError, match="tools.*tool_call_parser"):
                    client.chat.completions.create(model="model", messages=QUESTION, tools=TOOLS)
                assert client.chat.completions.create(model="model", messages=QUESTION).choices
            assert named in served.log.read_text()


def test_tools_need_a_parser(random_client: openai.OpenAI, random_model: Served):
    with pytest.raises(openai.BadRequestError, match="tool_call_parser"):
        random_client.chat.completions.create(model=random_model.name, messages=QUESTION, tools=TOOLS)


def test_responses(client: openai.OpenAI, scripted: Served):
    answer = client.responses.create(model=scripted.name, input="What is it?", instructions="Be brief.")
    assert answer.output_text == "Hello, world!"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "Hm, well."
    assert (answer.status, answer.usage.output_tokens) == ("completed", 8)
    assert answer.usage.output_tokens_details.reasoning_tokens == 4
    short = client.responses.create(model=scripted.name, input="What is it?", max_output_tokens=5)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=scripted.name, input="And?", previous_response_id=answer.id)


def test_responses_with_tools(client: openai.OpenAI, scripted: Served):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    answer = client.responses.create(model=scripted.name, input="What is it?", tools=tools)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in calls]
    history = [{"role": "user", "content": "What is it?"}, *answer.output, *results]
    answer = client.responses.create(model=scripted.name, input=history, tools=tools)
    assert answer.output_text == text_of(ANSWER)


def test_streamed_responses_are_the_unstreamed_ones(client: openai.OpenAI, scripted: Served):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    options = {"model": scripted.name, "input": "What is it?", "include": ["message.output_text.logprobs"]}

    def comparable(answer) -> dict:
        made = answer.to_dict()
        for item in made["output"]:
            item.pop("id")
            item.pop("call_id", None)
        return {key: made[key] for key in ("output", "status", "usage")}

    for more in ({}, {"tools": tools}):
        whole = client.responses.create(**options, **more)
        events = list(client.responses.create(**options, **more, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1].type == "response.completed"
        assert comparable(events[-1].response) == comparable(whole)
        for kind in ("output_text", "reasoning_text", "function_call_arguments"):
            deltas = "".join(e.delta for e in events if e.type == f"response.{kind}.delta")
            field = "arguments" if kind.startswith("function") else "text"
            dones = "".join(getattr(e, field) for e in events if e.type == f"response.{kind}.done")
            assert deltas == dones
    with client.responses.stream(model=scripted.name, input="What is it?") as stream:
        assert stream.get_final_response().output_text == "Hello, world!"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["host=0.0.0.0"], "BOUGH_API_KEY"),
        (["host=example.org"], "expected an IP address"),
        (["tool_call_parser=hermse"], "hermes"),
        (["--port", "70000"], "0 (any free port) to 65535"),
        (["http.max_body=12"], "at least 1 KiB"),
        (["gconfig.max_new_token=3"], "gconfig.max_new_tokens"),
    ],
)
def test_bad_settings(bough, script_model: Path, settings: list[str], message: str):
    refused = bough("serve", "--model", script_model, *settings, timeout=60)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert refused.stdout == ""


def test_keys(bough_program: Path, script_model: Path, tmp_path: Path):
    (tmp_path / "key").write_text("secret\n")
    with Served(bough_program, script_model, f"api_key_file={tmp_path / 'key'}", "host=0.0.0.0") as served:
        served.url = served.url.replace("0.0.0.0", "127.0.0.1")
        with pytest.raises(openai.AuthenticationError):
            client_of(served).models.list()
        right = openai.OpenAI(base_url=served.url + "/v1", api_key="secret", max_retries=0)
        assert right.chat.completions.create(model=served.name, messages=QUESTION).choices


def test_names_and_defaults(bough_program: Path, script_model: Path):
    with Served(
        bough_program, script_model, "served_model_name=[small, '*']", "gconfig.max_new_tokens=3"
    ) as served:
        client = client_of(served)
        assert [model.id for model in client.models.list().data] == ["small"]
        answer = client.chat.completions.create(model="gpt-4.1", messages=QUESTION)
        assert (answer.model, answer.usage.completion_tokens) == ("gpt-4.1", 3)
        assert served.stop() == 0
        assert "/v1/chat/completions 200" in served.log.read_text()
    assert os.path.exists(served.log)


def test_adapters_are_models_of_their_own(bough_program: Path, tiny_models, tmp_path: Path):
    """`lora_modules`: an adapter is requested by its name. All adapters and the base model are served at the
    same time."""
    base = tiny_models("qwen3")
    weights = load_file(base / "model.safetensors")
    kinds = {"nothing": ("q_proj", 0.0), "other": ("q_proj", 1.0), "head": ("lm_head", 1.0)}
    adapters = {name: tmp_path / name for name in kinds}
    for name, directory in adapters.items():
        directory.mkdir()
        target, largest = kinds[name]
        tensors = {}
        for key, weight in weights.items():
            if key.endswith(f"{target}.weight"):
                prefix = f"base_model.model.{key.removesuffix('.weight')}"
                tensors[f"{prefix}.lora_A.weight"] = torch.ones(2, weight.shape[1])
                column = torch.linspace(0, largest, weight.shape[0]).unsqueeze(1)
                tensors[f"{prefix}.lora_B.weight"] = column.repeat(1, 2)
        save_file(tensors, directory / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": [target], "bias": "none"}
        (directory / "adapter_config.json").write_text(json.dumps(config))
    modules = ",".join(f"{name}={directory}" for name, directory in adapters.items())
    with Served(bough_program, base, "rollout.kv_memory=64MiB", f"lora_modules=[{modules}]") as served:
        client = client_of(served)
        assert [model.id for model in client.models.list().data] == [served.name, *adapters]
        assert client.models.retrieve("other").parent == served.name

        def ask(name: str) -> list[float]:
            options = {"max_tokens": 8, "temperature": 0, "logprobs": 0, "extra_body": {"ignore_eos": True}}
            answer = client.completions.create(model=name, prompt=[5, 6, 7], **options)
            assert answer.model == name
            return answer.choices[0].logprobs.token_logprobs

        with ThreadPoolExecutor(6) as pool:
            mine, same, changed, head = (list(pool.map(ask, [n] * 4)) for n in (served.name, *adapters))
        # The bits are the same if they do not depend on the other requests of a pass.
        most = 0 if is_batch_invariant() else 1e-4
        alike = [pytest.approx(mine[0], rel=0, abs=most)] * 4
        assert mine == alike and same == alike
        for others in (changed, head):
            assert others == [pytest.approx(others[0], rel=0, abs=most)] * 4
            assert max(abs(a - b) for a, b in zip(mine[0], others[0], strict=True)) > 1e-2
        with pytest.raises(openai.NotFoundError):
            ask("third")

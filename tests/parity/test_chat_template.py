"""Chat templates against transformers' apply_chat_template, and the files that `bough init` writes.

The templates here use the features that current models' templates use. If TRL or its wheel is there
(scripts/setup downloads the wheel), its templates are run as well."""

import json
import random

import jinja2
import pytest
import transformers
from chat_templates import PLAIN, TEMPLATES, trl_templates
from test_tokenizer import ask


def write(directory, template):
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<s>",
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("byte_level")
    assert ask({"op": "byte_level", "path": str(directory)}) == [{}]
    return transformers.AutoTokenizer.from_pretrained(directory)


CONTENTS = [
    "Hi.",
    "",
    " spaced \n",
    "a\n\nb",
    "<think>\nwhy\n</think>\n\nso",
    "<tool>1</tool>",
    "\u3000é👍 '\"{{ x }}",
]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Weather "now" in a city, é',
            "parameters": {
                "type": "object",
                "properties": {
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "city": {"type": "string", "description": "City"},
                    "days": {"type": ["integer", "null"], "minimum": 1},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Over\nlines <b>",
            "parameters": {
                "type": "object",
                "properties": {
                    "values": {"type": "array", "items": {"type": "number"}},
                    "deep": {
                        "type": "object",
                        "properties": {"z": {"type": "boolean"}, "A": {"anyOf": [{"type": "string"}, {}]}},
                    },
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
ARGUMENTS = [
    {"city": "Zürich", "unit": "C"},
    {"values": [1, 2.5, 1e-7, 1e20], "deep": {"z": True, "A": None}},
    {},
    '{"a": "\\"b"}',
]


def conversations(seed, count):
    """Requests of every kind: roles, tools and calls, reasoning, and contents that are parts, null or
    missing."""
    rng = random.Random(seed)
    for _ in range(count):
        kind = rng.choice(["plain", "plain", "tools", "reasoning", "parts"])
        messages = [{"role": "system", "content": rng.choice(CONTENTS)}] * rng.randint(0, 1)
        for _ in range(rng.randint(1, 4)):
            content = rng.choice(CONTENTS)
            if kind == "parts" and rng.random() < 0.7:
                content = [{"type": "text", "text": content}, {"type": "image"}][: rng.randint(1, 2)]
            messages.append({"role": "user", "content": content})
            if kind == "tools" and rng.random() < 0.7:
                calls = [
                    {
                        "id": f"call{i}",
                        "type": "function",
                        "function": {
                            "name": rng.choice(["weather", "Now"]),
                            "arguments": rng.choice(ARGUMENTS),
                        },
                    }
                    for i in range(rng.randint(1, 2))
                ]
                messages.append(
                    {"role": "assistant", "content": rng.choice([None, "", "So."]), "tool_calls": calls}
                )
                if rng.random() < 0.3:
                    del messages[-1]["content"]
                messages += [
                    {"role": "tool", "content": rng.choice(["42", CONTENTS[0], {"t": 1.5}])} for _ in calls
                ]
            answer = {"role": "assistant", "content": rng.choice(CONTENTS)}
            if kind == "reasoning":
                answer[rng.choice(["reasoning_content", "thoughts"])] = rng.choice([*CONTENTS, None])
            messages.append(answer)
        del messages[len(messages) - rng.randint(0, 1) :]
        yield {
            "messages": messages,
            "tools": rng.sample(TOOLS, rng.randint(1, 3)) if kind == "tools" else None,
            "variables": rng.choice([{}, {}, {"enable_thinking": False}, {"date_string": "1 Jan 2031"}]),
            "add_generation_prompt": rng.random() < 0.5,
        }


def render(tokenizer, template, case):
    """Returns transformers' text, or None if the template, or Python code in it, refuses the case."""
    try:
        return tokenizer.apply_chat_template(
            case["messages"],
            chat_template=template,
            tools=case["tools"],
            tokenize=False,
            add_generation_prompt=case["add_generation_prompt"],
            **{"bos_token": "<s>", **case["variables"]},
        )
    except (jinja2.TemplateError, TypeError, ValueError, AttributeError):
        return None


def compare(tokenizer, template, directory, count, at_least):
    cases = list(conversations(3, count))
    answers = ask(*({"op": "chat", "path": str(directory), **case} for case in cases))
    equal = 0
    for case, answer in zip(cases, answers, strict=True):
        expected = render(tokenizer, template, case)
        if expected is None:
            assert (
                "error" in answer and "supported" not in answer["error"].split("refuses the conversation")[0]
            ), (case, answer)
        else:
            assert answer == {"text": expected}, case
            equal += 1
    assert equal >= at_least


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("as_file", [False, True])
def test_texts_equal_transformers(name, as_file, tokenizer, tmp_path):
    template = TEMPLATES[name]
    write(tmp_path, template)
    if as_file:
        write(tmp_path, "{{ raise_exception('the file comes first') }}")
        (tmp_path / "chat_template.jinja").write_text(template)
    compare(tokenizer, template, tmp_path, 300, 100)


@pytest.mark.skipif(not trl_templates(), reason="TRL, whose templates are run here, is not there")
def test_templates_of_trl(tokenizer, tmp_path):
    for template in trl_templates().values():
        write(tmp_path, template)
        compare(tokenizer, template, tmp_path, 200, 5)


def test_a_template_of_its_own_for_tools(tokenizer, tmp_path):
    named = [
        {"name": "default", "template": "default"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]
    write(tmp_path, named)
    requests = [
        {"op": "chat", "path": str(tmp_path), "messages": [], "tools": tools} for tools in (None, TOOLS)
    ]
    assert ask(*requests) == [{"text": "default"}, {"text": "tools 3"}]


@pytest.mark.parametrize("writes_bos", [True, False])
def test_bos_is_there_once_or_not_at_all(writes_bos, tokenizer, tmp_path):
    """Ids of a conversation, with a tokenizer that itself puts a BOS before plain texts."""
    template = "{{ bos_token }}" * writes_bos + PLAIN
    ask({"op": "byte_level", "path": str(tmp_path)})
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = [{"Sequence": {"id": kind, "type_id": 0}} for kind in "AB"]
    file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text[0]],
        "pair": [begin, *text],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"chat_template": template, "bos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Hi."}]
    (chat,) = ask({"op": "chat", "path": str(tmp_path), "messages": messages, "add_generation_prompt": True})
    _, chat_ids, plain_ids = ask(
        {"op": "load", "name": "t", "path": str(tmp_path)},
        {"op": "encode", "name": "t", "text": chat["text"]},
        {"op": "encode", "name": "t", "text": "Hi.", "add_special_tokens": True},
    )
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert chat_ids["ids"] == expected
    assert chat_ids["ids"].count(256) == writes_bos
    assert plain_ids["ids"] == theirs("Hi.")["input_ids"] == [256, *b"Hi."]


REFUSED = {
    "unknown_filter": (
        PLAIN.replace("message['content']", "message['content'] | urlize"),
        "the filter 'urlize'",
    ),
    "unknown_statement": ("{% include 'x' %}" + PLAIN, "the statement 'include'"),
    "not_closed": (PLAIN.replace("{% endfor %}", ""), "endfor"),
    "wrong_syntax": (PLAIN.replace("message['role'] +", "message['role'] + *"), "'*'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_cause(name, tmp_path):
    template, named = REFUSED[name]
    write(tmp_path, template)
    (answer,) = ask({"op": "chat", "path": str(tmp_path), "messages": [{"role": "user", "content": "Hi."}]})
    assert named in answer["error"] and "tokenizer_config.json:" in answer["error"], answer


def test_a_missing_template_is_an_error(tmp_path):
    request = {"op": "chat", "path": str(tmp_path), "messages": [{"role": "user", "content": ""}]}
    assert "no chat template" in ask(request)[0]["error"]
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert "no chat template" in ask(request)[0]["error"]


def test_a_template_may_refuse_a_conversation(tmp_path):
    write(tmp_path, "{% if messages|length > 6 %}{{ raise_exception('too long') }}{% endif %}" + PLAIN)
    messages = [{"role": "user", "content": "Hi."}] * 7
    assert "too long" in ask({"op": "chat", "path": str(tmp_path), "messages": messages})[0]["error"]


def test_files_of_a_new_model_load_in_transformers(tokenizer, tmp_path):
    ask({"op": "byte_level", "path": str(tmp_path)})
    assert len(tokenizer) == 259
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 256)
    messages = [{"role": "user", "content": "Grüße 👍\n"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 257 and ids[1:5] == list(b"user")
    ours = ask(
        {"op": "load", "name": "t", "path": str(tmp_path)},
        {"op": "encode", "name": "t", "text": text},
        {"op": "decode", "name": "t", "ids": ids},
        {"op": "chat", "path": str(tmp_path), "messages": messages, "add_generation_prompt": True},
    )
    assert ours[0] == {"vocab_size": 259}
    assert ours[1]["ids"] == ids
    assert ours[2]["text"] == tokenizer.decode(ids, skip_special_tokens=True)
    assert ours[3]["text"] == text

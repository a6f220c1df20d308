"""Chat templates against transformers' apply_chat_template, and the files that `bough init` writes."""

import json
import random

import pytest
import transformers
from test_tokenizer import ask

PLAIN = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# A default system message, put in front at the first message.
DEFAULT_AT_FIRST = """
{%- for m in messages -%}
  {%- if loop.first and m.role != "system" -%}
    {{ "<|im_start|>system\nBe brief.<|im_end|>\n" }}
  {%- endif -%}
  {%- if m.role in ["system", "user", "assistant"] and not (m.role == 'system' and loop.index0 > 0 and strict is defined) -%}
    {{ "<|im_start|>" ~ m["role"] }}
{% generation %}{{ m.content | trim }}{% endgeneration %}
    {{- "<|im_end|>\n" -}}
  {%- else -%}
    {{ raise_exception("role " + m.role) }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt is defined and add_generation_prompt -%}{{ "<|im_start|>assistant\n" }}{%- endif -%}
"""

# With branches for tools, which are read but never run.
WITH_TOOLS = """{# tools first #}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}
    {{- "<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
           (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- for call in message.tool_calls %}{{- call.function.arguments | tojson }}{%- endfor %}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{- 'first' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Keeps the thoughts of answers after the last question, drops those before it.
THINKING = """
{%- set ns = namespace(open=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == "user" and message.content is string and not (message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.open = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role in ['user', 'system'] %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- else %}
        {%- set thoughts = '' %}
        {%- if message.thoughts is string %}
            {%- set thoughts = message.thoughts %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or (not loop.last and thoughts)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# Text outside of tags: white space control and blocks that take their line break along.
LAYOUT = """{% for message in messages %}
  {%- if message.role %}
<|im_start|>{{ message.role }}
{{ message.content -}}
    <|im_end|>
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif +%}
"""

CHATML = {
    "plain": PLAIN,
    "default_at_first": DEFAULT_AT_FIRST,
    "with_tools": WITH_TOOLS,
    "thinking": THINKING,
    "layout": LAYOUT,
}

LLAMA3 = (
    "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
    "message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
NOT_CHATML = {
    "llama3": LLAMA3,
    "no_line_break": PLAIN.replace("+ '<|im_end|>' + '\n'", "+ '<|im_end|>'"),
    "drops_system": "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}"
    + PLAIN,
    "answer_changed": PLAIN.replace(
        "message['role'] + ", "message['role'] + ('x' if loop.index0 == 3 else '') + "
    ),
    "prompt_always": PLAIN.replace("if add_generation_prompt", "if true"),
    "macro": "{% macro m(x) %}{{ x }}{% endmacro %}" + PLAIN,
    "unknown_filter": PLAIN.replace("message['content']", "message['content'] | upper"),
    "not_closed": PLAIN.replace("{% endfor %}", ""),
    "wrong_syntax": PLAIN.replace("message['role'] +", "message['role'] + +"),
    "empty": "",
    "other_begin": "<s>" + PLAIN,
}


def write(directory, template):
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
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


def conversations(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        roles = rng.choice([[], ["system"]]) + ["user", "assistant"] * rng.randint(1, 4)
        roles = roles[: len(roles) - rng.randint(0, 1)]
        yield [{"role": role, "content": rng.choice(CONTENTS)} for role in roles]
    yield [
        {"role": role, "content": rng.choice(CONTENTS)}
        for role in ["user", "assistant", "assistant", "system"]
    ]


@pytest.mark.parametrize("name", CHATML)
@pytest.mark.parametrize("as_file", [False, True])
def test_texts_equal_transformers(name, as_file, tokenizer, tmp_path):
    template = CHATML[name]
    if as_file:
        (tmp_path / "chat_template.jinja").write_text(template)
    else:
        write(tmp_path, template)
    cases = [(messages, prompt) for messages in conversations(3, 40) for prompt in (False, True)]
    answers = ask(
        *({"op": "chat", "path": str(tmp_path), "messages": m, "add_generation_prompt": p} for m, p in cases)
    )
    for (messages, prompt), answer in zip(cases, answers, strict=True):
        expected = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
        assert answer == {"text": expected}, messages


@pytest.mark.parametrize("writes_bos", [True, False])
def test_bos_is_there_once_or_not_at_all(writes_bos, tokenizer, tmp_path):
    """Ids of a conversation, where the tokenizer itself puts a BOS in front of plain texts."""
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


@pytest.mark.parametrize("name", NOT_CHATML)
def test_other_templates_are_refused(name, tmp_path):
    write(tmp_path, NOT_CHATML[name])
    (answer,) = ask({"op": "chat", "path": str(tmp_path), "messages": [{"role": "user", "content": "Hi."}]})
    assert "ChatML" in answer["error"] and "plain prompts" in answer["error"], answer
    assert "tokenizer_config.json" in answer["error"]


def test_a_missing_template_and_a_wrong_role_are_errors(tmp_path):
    request = {"op": "chat", "path": str(tmp_path), "messages": [{"role": "tool", "content": ""}]}
    assert "no chat template" in ask(request)[0]["error"]
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert "no chat template" in ask(request)[0]["error"]
    write(tmp_path, PLAIN)
    assert "'tool'" in ask(request)[0]["error"]


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

"""Chat templates against transformers' apply_chat_template, and the files that `bough init` writes.

The templates here use the features that current models' templates use. If TRL is installed, its templates are
run as well."""

import importlib.util
import json
import random
from pathlib import Path

import jinja2
import pytest
import transformers
from test_tokenizer import ask

PLAIN = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# A default system message, put before the first message.
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

# Branches for tools, which are parsed but never run.
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

# Keeps the reasoning of answers after the last question. Drops earlier reasoning.
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

# Text outside of tags: white space control, and blocks that remove the line break after them.
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

# Turns between headers, a date, tools in the first question, strict alternation of roles.
HEADER = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|header|>system<|end|>\n\nToday: " + date_string + "\n\n" + system + "<|eot|>" }}
{%- if tools is not none and messages | length != 0 %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|header|>user<|end|>\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
    {{- first + "<|eot|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message and message.tool_calls %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' ~ (call.arguments | tojson) ~ "}<|eot|>" }}
    {%- elif message.role == "tool" %}
        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot|>" }}
    {%- else %}
        {{- '<|header|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|end|>\n\n' }}{%- endif %}
"""

# Roles that must alternate, tools as a list of printed dicts, message contents as parts.
BRACKETS = """{%- set ns = namespace(index=0, last=-1, closed=false) -%}
{%- for message in messages if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endfor -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}
        {%- if ns.index == ns.last and tools -%}
            [TOOLS]{{ tools }}[/TOOLS]{{ tools | map(attribute='function') | map(attribute='name') | sort | join(',') }}
        {%- endif -%}
        {%- set ns.index = ns.index + 1 -%}
        [Q]{%- if message.content is string %}{{ message.content }}{% else %}
            {%- for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{%- endfor %}
        {%- endif %}[/Q]
    {%- elif message['role'] in ['assistant', 'system'] -%}
        {{ ' ' ~ (message.content or '') ~ eos_token }}
        {%- for call in message.tool_calls or [] -%}
            {{ "%s#%d" % (call.function.name, loop.index) }}{{ call.function.arguments | string | replace("'", '"') }}
            {%- if not loop.last %}, {% endif -%}
        {%- endfor -%}
    {%- else -%}
        {%- if ns.closed is not true and loop.previtem is defined and loop.previtem.role != 'tool' %}<r>{% endif -%}
        {{ message.content }}
    {%- endif -%}
{%- endfor -%}
"""

# Macros that write a tool's schema recursively, with the keys in an order of their own.
SCHEMA = """{%- macro kind_of(p, depth=0) -%}
    {%- if p.type is string -%}
        {%- if p.type == 'array' -%}{{ kind_of(p['items'], depth + 1) }}[]
        {%- elif p.type == 'object' and p.properties -%}
            { {%- for name, value in p.properties | dictsort %}{{ ' ' * depth }}{{ name }}: {{ kind_of(value, depth=depth + 1) }}
            {%- if not loop.last %}, {% endif %}{% endfor %} }
        {%- else -%}{{ p.type | upper }}{%- if p.enum %} in {{ p.enum | join(' | ') }}{% endif %}{%- endif -%}
    {%- elif p.type is iterable -%}{{ p.type | map('title') | join('/') }}
    {%- elif p.anyOf is defined -%}{% for option in p.anyOf %}{{ kind_of(option) }}{{ '|' if not loop.last }}{% endfor %}
    {%- else -%}any{%- endif -%}
{%- endmacro -%}
{%- macro wrapped(name) -%}<{{ name }}>{{ caller(name | length) }}</{{ name }}>{%- endmacro -%}
{% for tool in tools or [] %}
{% set f = tool.function if tool.function is defined else tool %}
{% call(n) wrapped('tool') %}{{ n }} {{ f.name }}({% for key, p in f.parameters.properties | items %}
{{ key }}{{ '' if key in (f.parameters.required or []) else '?' }}: {{ kind_of(p) | trim }}{% endfor %}){% endcall %}

{% endfor %}
{% for message in messages %}
{% set body %}{{ message.content | default('', true) | string | indent(2) }}{% endset %}
{{ '%s> ' % message.role }}{{ body }}{% for c in message.tool_calls %} {{ c.function.name }}({% set args = c.function.arguments %}
{% if args is mapping %}{% for k, v in args.items() %}{{ k }}={{ v if v is string else v | tojson }};{% endfor %}{% else %}{{ args }}{% endif %}){% endfor %}

{% endfor %}
{{ 'assistant> ' if add_generation_prompt }}
"""

# Channels: reasoning is kept only after the last answer. Also loop controls, `filter` and `with` blocks.
CHANNELS = """{% set last = namespace(final=-1) %}
{% for m in messages %}{% if m.role != 'assistant' or m.tool_calls %}{% continue %}{% endif %}{% set last.final = loop.index0 %}{% endfor %}
<|start|>system<|message|>{% filter trim | replace('  ', ' ') %}
  You think.  Today is {{ strftime_now('%Y') | length }}. {% if enable_thinking is not defined or enable_thinking %}on{% else %}off{% endif %}

{% endfilter %}<|end|>
{%- for m in messages %}
{%- with thoughts = m.reasoning_content or (m.content.split('</think>')[0] if m.content is string and '</think>' in m.content else none) %}
<|start|>{{ m.role }}
{%- if thoughts and loop.index0 > last.final %}<|channel|>analysis<|message|>{{ thoughts.strip() }}<|end|>{% endif %}
{%- endwith %}
{%- for part in ([m.content] if m.content is string else m.content or []) %}
{%- if part is mapping and part.get('type') != 'text' %}<{{ part['type'] | capitalize }}>{% break %}{% endif %}
<|message|>{{ part if part is string else part.text }}{{ loop.cycle('', ';') }}
{%- endfor %}
{%- for c in m.tool_calls or [] %} to={{ c['function']['name'].lower() }} {{ c['function']['arguments'] | tojson(sort_keys=true) }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}
"""

TEMPLATES = {
    "plain": PLAIN,
    "default_at_first": DEFAULT_AT_FIRST,
    "with_tools": WITH_TOOLS,
    "thinking": THINKING,
    "layout": LAYOUT,
    "header": HEADER,
    "brackets": BRACKETS,
    "schema": SCHEMA,
    "channels": CHANNELS,
}


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


def installed_templates():
    spec = importlib.util.find_spec("trl")
    return sorted(Path(spec.origin).parent.glob("chat_templates/*.jinja")) if spec and spec.origin else []


@pytest.mark.skipif(not installed_templates(), reason="TRL, whose templates are run here, is not installed")
def test_templates_of_trl(tokenizer, tmp_path):
    for path in installed_templates():
        write(tmp_path, path.read_text())
        compare(tokenizer, path.read_text(), tmp_path, 200, 5)


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

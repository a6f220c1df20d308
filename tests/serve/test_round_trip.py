"""An answer of the server, given back by the official client as it came, is accepted and means the same: over
all chat templates of the tests, all kinds of answers, both clients, streamed and not."""

import json
import re
from pathlib import Path

import openai
import pytest
from api_client import Api
from chat_templates import TEMPLATES, trl_templates

ROOT = Path(__file__).resolve().parents[2]

# Like Mistral's: it accepts only ids of nine letters and digits, and shows a call only without content.
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}[TOOL_CALLS]["
    "{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]{% else %}{{ m.content }}{% endif %}</s>"
    "{% else %}[{{ m.role }}]{{ m.content }}[/{{ m.role }}]{% endif %}{% endfor %}"
)
# Like that of the first DeepSeek R1: it shows calls only if the content is null, and arguments as text.
NULL_ONLY = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    "{{ c.function.name }}\n```json\n{{ c.function.arguments + '' }}\n```<｜tool▁call▁end｜>"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ALL = {**TEMPLATES, **trl_templates(), "mistral": MISTRAL, "null_only": NULL_ONLY}

# A call as the model writes it, by format.
NAME, VALUE = "probe", "Zürich_Ort"
OBJECT = json.dumps({"name": NAME, "arguments": {"where": VALUE}}, ensure_ascii=False)
CALLS = {
    "hermes": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "llama3_json": OBJECT,
    "mistral": f"[TOOL_CALLS][{OBJECT}]",
    "qwen3_coder": f"<tool_call>\n<function={NAME}>\n<parameter=where>\n{VALUE}\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm45": f"<tool_call>{NAME}\n<arg_key>where</arg_key>\n<arg_value>{VALUE}</arg_value>\n</tool_call>",
    "deepseek_v3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n"
    + json.dumps({"where": VALUE}, ensure_ascii=False)
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "lfm2": f'<|tool_call_start|>[{NAME}(where="{VALUE}")]<|tool_call_end|>',
    "openai": f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>"
    + json.dumps({"where": VALUE}, ensure_ascii=False)
    + "<|call|>",
}
QUESTION = "What is it?"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "a tool",
            "parameters": {
                "type": "object",
                "properties": {"where": {"type": "string", "description": "a place"}},
            },
        },
    }
]
ANTHROPIC_TOOLS = [
    {"name": NAME, "description": "a tool", "input_schema": TOOLS[0]["function"]["parameters"]},
]
RESPONSES_TOOLS = [{"type": "function", **TOOLS[0]["function"]}]


def outputs(parser: str, with_reasoning: bool) -> dict[str, str]:
    """The kinds of answers, as the model writes them."""
    said = (lambda text: f"<|channel|>final<|message|>{text}") if parser == "openai" else (lambda text: text)
    kinds = {"text": said("It is one."), "empty": "", "blank": said(" \n"), "none": said("None")}
    if parser:
        kinds["call"] = CALLS[parser]
    if parser not in ("", "llama3_json", "openai"):  # their calls stand alone
        kinds["text and call"] = f"I look.{CALLS[parser]}"
    if with_reasoning and parser != "openai":
        kinds |= {f"reasoned {kind}": f"<think>Hmmm</think>{output}" for kind, output in kinds.items()}
    return kinds


def chat_answers(api: Api, tools: list | None):
    """One answer in all forms in which a client may keep it."""
    question = {"role": "user", "content": QUESTION}
    options = {"model": "bytes", "messages": [question], **({"tools": tools} if tools else {})}
    message = api.openai.chat.completions.create(**options).choices[0].message
    yield message
    yield message.model_dump()  # with every null field of the SDK
    yield message.to_dict(exclude_none=True)
    with api.openai.chat.completions.stream(**options) as stream:
        yield stream.get_final_completion().choices[0].message
    yield {**message.model_dump(), "tool_calls": message.model_dump()["tool_calls"] or []}


def without_ids(prompt: str) -> str:
    return re.sub(r"(call_|toolu_)[0-9a-f]{24}|\b[0-9a-f]{9}\b", "ID", prompt)


def chat_prompts(api: Api, tools: list | None) -> list[str]:
    prompts = []
    for message in chat_answers(api, tools):
        calls = (message if isinstance(message, dict) else message.model_dump()).get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls]
        history = [{"role": "user", "content": QUESTION}, message, *results]
        if not calls:
            history.append({"role": "user", "content": "And then?"})
        api.openai.chat.completions.create(
            model="bytes", messages=history, **({"tools": tools} if tools else {})
        )
        prompts.append(without_ids(api.prompts[-1]))
    return prompts


def responses_prompts(api: Api, tools: list | None) -> list[str]:
    prompts = []
    options = {"model": "bytes", **({"tools": RESPONSES_TOOLS} if tools else {})}
    answer = api.openai.responses.create(input=QUESTION, **options)
    with api.openai.responses.stream(input=QUESTION, **options) as stream:
        streamed = stream.get_final_response()
    for items in (answer.output, [item.model_dump() for item in answer.output], streamed.output):
        items = [item if isinstance(item, dict) else item.to_dict() for item in items]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}
            for item in items
            if item["type"] == "function_call"
        ]
        then = results or [{"role": "user", "content": "And then?"}]
        api.openai.responses.create(input=[{"role": "user", "content": QUESTION}, *items, *then], **options)
        prompts.append(without_ids(api.prompts[-1]))
    return prompts


def messages_prompts(api: Api, tools: list | None) -> list[str]:
    prompts = []
    question = {"role": "user", "content": QUESTION}
    options = {"model": "bytes", "max_tokens": 100, **({"tools": ANTHROPIC_TOOLS} if tools else {})}
    answer = api.anthropic.messages.create(messages=[question], **options)
    with api.anthropic.messages.stream(messages=[question], **options) as stream:
        streamed = stream.get_final_message()
    for content in (answer.content, [block.model_dump() for block in answer.content], streamed.content):
        blocks = [block if isinstance(block, dict) else block.model_dump() for block in content]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "rain"}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        history = [
            question,
            {"role": "assistant", "content": content},
            {"role": "user", "content": results or "And then?"},
        ]
        api.anthropic.messages.create(messages=history, **options)
        prompts.append(without_ids(api.prompts[-1]))
    return prompts


def takes(api: Api, messages: list) -> bool:
    status, _ = api.post("/v1/chat/completions", {"messages": messages})
    return status == 200


PLAIN_HISTORY = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "It is one."},
    {"role": "user", "content": "And then?"},
]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("reasoning_parser", ["", "qwen3"])
def test_an_answer_given_back_means_the_same(name: str, reasoning_parser: str):
    with Api(ALL[name], reasoning_parser=reasoning_parser) as api:
        assert takes(api, PLAIN_HISTORY)
        assert all(message["content"] in api.prompts[-1] for message in PLAIN_HISTORY)
        opens_reasoning = bool(reasoning_parser) and api.prompts[-1].rstrip().endswith("<think>")
        parser = api.parser()
        for kind, output in outputs(parser, bool(reasoning_parser)).items():
            tools = TOOLS if parser else None
            api.output = output
            if opens_reasoning:
                api.output = output.removeprefix("<think>") if "reasoned" in kind else f"</think>{output}"
            prompts = [read(api, tools) for read in (chat_prompts, responses_prompts, messages_prompts)]
            for each in prompts:
                assert len(set(each)) == 1, (kind, each)
            assert prompts[0][0] == prompts[1][0], kind
            if "call" not in kind:  # Anthropic's results have no names
                assert prompts[0][0] == prompts[2][0], kind
            prompt = prompts[0][0]
            assert prompt.count("None") == (kind.endswith("none")) + NONES.get(name, 0), (kind, prompt)
            if "call" in kind:
                before, after = prompt.split(QUESTION, 1)
                assert VALUE in after or json.dumps(VALUE)[1:-1] in after, (kind, prompt)
            if "text" in kind and "I look" in output:
                assert "I look." in prompt or name in HIDES_TEXT, (kind, prompt)


# The word None that a template writes by itself.
NONES: dict[str, int] = {}
# Templates that write calls without the text before them.
HIDES_TEXT = {"mistral"}


def test_calls_are_written_as_text_if_the_template_does_not_show_them():
    """Plain ChatML, which `bough init` writes. The user named the format."""
    for parser in ("hermes", "granite", "jamba", "internlm", "phi4_mini_json", "lfm2", "olmo3", "pythonic"):
        with Api(TEMPLATES["plain"], tool_call_parser=parser) as api:
            call = {
                "id": "1",
                "type": "function",
                "function": {"name": NAME, "arguments": json.dumps({"where": VALUE})},
            }
            history = [
                {"role": "user", "content": QUESTION},
                {"role": "assistant", "content": None, "tool_calls": [call, call]},
                {"role": "tool", "tool_call_id": "1", "content": "rain"},
            ]
            api.openai.chat.completions.create(model="bytes", messages=history, tools=TOOLS)
            (prompt,) = api.prompts
            written = prompt.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
            api.output = written
            answer = api.openai.chat.completions.create(model="bytes", messages=history, tools=TOOLS)
            calls = answer.choices[0].message.tool_calls
            assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
                (NAME, {"where": VALUE})
            ] * 2, written
    with (
        Api(TEMPLATES["plain"], tool_call_parser="qwen3_coder") as api,
        pytest.raises(openai.BadRequestError, match="does not show tool calls"),
    ):
        api.openai.chat.completions.create(model="bytes", messages=history)


def documented_formats() -> dict[str, str]:
    """The table of docs/chat.md: the format of each template."""
    section = (ROOT / "docs" / "chat.md").read_text().split("\n## auto\n")[1]
    formats = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)][1:-1]
        if len(cells) == 3 and (cells[0] == "none" or cells[0].startswith("`")):
            for name in cells[2].split():
                formats[name.strip("`")] = "" if cells[0] == "none" else cells[0].strip("`")
    return formats


@pytest.mark.parametrize("name", {**TEMPLATES, **trl_templates()})
def test_the_format_of_calls_by_the_markers_of_the_template(name: str):
    """And the calls that a template shows are read by this format."""
    with Api(ALL[name]) as api:
        parser = api.parser()
        assert parser == documented_formats()[name.removesuffix("_training")]
        if not parser:
            with pytest.raises(openai.BadRequestError, match="tool_call_parser"):
                api.openai.chat.completions.create(
                    model="bytes", messages=[{"role": "user", "content": QUESTION}], tools=TOOLS
                )
            return
        call = {
            "id": "c00000000",
            "type": "function",
            "function": {"name": NAME, "arguments": json.dumps({"where": VALUE})},
        }
        history = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c00000000", "content": "rain"},
        ]
        api.openai.chat.completions.create(model="bytes", messages=history, tools=TOOLS)
        shown = api.prompts[0].split(QUESTION)[1].split("rain")[0]
        if parser == "llama3_json":
            shown = shown[shown.index("{") :]
        api.output = shown
        answer = api.openai.chat.completions.create(model="bytes", messages=history, tools=TOOLS)
        (read,) = answer.choices[0].message.tool_calls
        assert (read.function.name, json.loads(read.function.arguments)) == (NAME, {"where": VALUE})

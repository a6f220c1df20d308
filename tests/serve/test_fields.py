"""docs/serve_fields.md against the request types of the installed `openai` and `anthropic`: each field
has a row, and is treated as the row says."""

import re
import typing
from pathlib import Path

import anthropic.types as anthropic_types
import pytest
from anthropic.types import (
    assistant_message_param,
    message_count_tokens_params,
    message_create_params,
    user_message_param,
)
from api_client import Api
from openai.types import chat, completion_create_params, responses
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params, response_input_param
from openai.types.shared_params import FunctionDefinition, Reasoning

ROOT = Path(__file__).resolve().parents[2]
# Shows everything that a request can change in a prompt.
TEMPLATE = "{{ messages | tojson }}{{ tools | tojson }}{{ reasoning_effort }}{{ enable_thinking }}"

# The package's types, by the section of the document.
TYPES = {
    "POST /v1/chat/completions": [
        chat_params.CompletionCreateParamsBase,
        chat_params.CompletionCreateParamsStreaming,
    ],
    "Messages of chat completions": [
        chat.ChatCompletionAssistantMessageParam,
        chat.ChatCompletionDeveloperMessageParam,
        chat.ChatCompletionSystemMessageParam,
        chat.ChatCompletionToolMessageParam,
        chat.ChatCompletionUserMessageParam,
    ],
    "Functions of chat completions' tools": [FunctionDefinition],
    "POST /v1/completions": [
        completion_create_params.CompletionCreateParamsBase,
        completion_create_params.CompletionCreateParamsStreaming,
    ],
    "POST /v1/responses": [
        response_create_params.ResponseCreateParamsBase,
        response_create_params.ResponseCreateParamsStreaming,
    ],
    "Reasoning of responses": [Reasoning],
    "Items of responses": [
        response_input_param.Message,
        response_input_param.FunctionCallOutput,
        responses.EasyInputMessageParam,
        responses.ResponseFunctionToolCallParam,
        responses.ResponseOutputMessageParam,
        responses.ResponseReasoningItemParam,
    ],
    "Tools of responses": [responses.FunctionToolParam],
    "POST /v1/messages": [
        message_create_params.MessageCreateParamsBase,
        message_create_params.MessageCreateParamsStreaming,
        message_count_tokens_params.MessageCountTokensParams,
    ],
    "Messages and blocks of messages": [
        assistant_message_param.AssistantMessageParam,
        user_message_param.UserMessageParam,
        anthropic_types.TextBlockParam,
        anthropic_types.ThinkingBlockParam,
        anthropic_types.ToolResultBlockParam,
        anthropic_types.ToolUseBlockParam,
    ],
    "Tools of messages": [anthropic_types.ToolParam],
    "Tool choice of messages": [
        anthropic_types.ToolChoiceAnyParam,
        anthropic_types.ToolChoiceAutoParam,
        anthropic_types.ToolChoiceNoneParam,
        anthropic_types.ToolChoiceToolParam,
    ],
}

USER = {"role": "user", "content": "q"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
MESSAGE_TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


# A good request of each section with a place for the field, as (path, body, the object that has the field).
def request_of(section: str) -> tuple[str, dict, dict]:
    chat_body = {"messages": [dict(USER)], "tools": [{"type": "function", "function": dict(FUNCTION)}]}
    response = {
        "input": [dict(USER)],
        "tools": [{"type": "function", **FUNCTION}],
        "reasoning": {"effort": "low"},
    }
    message = {
        "model": "bytes",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}],
        "tools": [dict(MESSAGE_TOOL)],
        "tool_choice": {"type": "auto"},
    }
    paths = {"chat": "/v1/chat/completions", "response": "/v1/responses", "message": "/v1/messages"}
    completion = {"prompt": "q"}
    places = {
        "POST /v1/chat/completions": ("chat", chat_body, chat_body),
        "Messages of chat completions": ("chat", chat_body, chat_body["messages"][0]),
        "Functions of chat completions' tools": ("chat", chat_body, chat_body["tools"][0]["function"]),
        "POST /v1/responses": ("response", response, response),
        "Reasoning of responses": ("response", response, response["reasoning"]),
        "Items of responses": ("response", response, response["input"][0]),
        "Tools of responses": ("response", response, response["tools"][0]),
        "POST /v1/messages": ("message", message, message),
        "Messages and blocks of messages": ("message", message, message["messages"][0]["content"][0]),
        "Tools of messages": ("message", message, message["tools"][0]),
        "Tool choice of messages": ("message", message, message["tool_choice"]),
    }
    if section == "POST /v1/completions":
        return "/v1/completions", completion, completion
    kind, body, place = places[section]
    return paths[kind], body, place


# Values of harmless and refused fields. Fields that are not here get an object.
VALUES = {
    "background": True,
    "best_of": 2,
    "cache_control": {"type": "ephemeral"},
    "context_management": [{"type": "compaction"}],
    "logit_bias": {"5": 1},
    "modalities": ["audio"],
    "response_format": {"type": "json_object"},
    "suffix": "end",
    "text": {"format": {"type": "json_object"}},
    "truncation": "auto",
}


def rows() -> dict[str, dict[str, tuple[str, str]]]:
    """The document's rows: section, field, (treatment, test or reason)."""
    sections: dict[str, dict[str, tuple[str, str]]] = {}
    section: dict[str, tuple[str, str]] = {}
    for line in (ROOT / "docs" / "serve_fields.md").read_text().splitlines():
        if line.startswith("#"):
            section = sections.setdefault(line.lstrip("# "), {})
        elif row := re.fullmatch(r"\| `(\w+)` \| (\w+) \| (.+) \|", line):
            assert row[1] not in section, row[1]
            section[row[1]] = (row[2], row[3])
    return {name: section for name, section in sections.items() if section}


def tests() -> set[str]:
    names: set[str] = set()
    for file in (ROOT / "tests" / "serve").glob("test_*.py"):
        names |= set(re.findall(r"^def (test_\w+)", file.read_text(), re.M))
    for file in (ROOT / "src" / "serve").glob("*_test.cpp"):
        names |= {f"{a}.{b}" for a, b in re.findall(r"^TEST(?:_F)?\((\w+), (\w+)\)", file.read_text(), re.M)}
    return names


ROWS = rows()


def test_every_section_has_its_types():
    assert ROWS.keys() == TYPES.keys()


@pytest.mark.parametrize("section", TYPES)
def test_the_tables_have_the_fields_of_the_packages(section: str):
    theirs = {field for type_ in TYPES[section] for field in typing.get_type_hints(type_)}
    assert sorted(ROWS[section]) == list(ROWS[section]), "the rows are in alphabetical order"
    assert set(ROWS[section]) == theirs, "the package's fields changed: add rows, and handle the fields"


@pytest.mark.parametrize("section", TYPES)
def test_fields_are_treated_as_the_tables_say(section: str):
    known = tests()
    with Api(TEMPLATE, tool_call_parser="hermes") as api:
        path, body, _ = request_of(section)
        status, answer = api.post(path, body)
        assert status == 200, answer
        for field, (treatment, reason) in ROWS[section].items():
            path, body, place = request_of(section)
            if treatment == "honoured":
                assert reason.strip("`") in known, f"{field}: no test {reason}"
                continue
            place[field] = VALUES.get(field, {"a": "b"})
            status, answer = api.post(path, body)
            if treatment == "refused":
                assert status == 400, (field, answer)
                assert field in answer["error"]["message"]
            else:
                assert treatment == "harmless"
                assert status == 200, (field, answer)
                if field == "strict" and section.startswith("Functions"):
                    continue  # the template sees it
                assert api.prompts[-1] == api.prompts[0], field

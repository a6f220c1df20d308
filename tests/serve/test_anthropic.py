"""The official `anthropic` client, given a base_url and nothing else."""

import anthropic
import pytest
from script_model import ANSWER, text_of
from serve_util import Served

TOOLS = [
    {"name": name, "description": "a tool", "input_schema": {"type": "object", "properties": {}}}
    for name in ("add", "look")
]
QUESTION = [{"role": "user", "content": "What is it?"}]


@pytest.fixture
def client(scripted: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=scripted.url, api_key="any", max_retries=0)


def test_message(client: anthropic.Anthropic, scripted: Served):
    message = client.messages.create(
        model=scripted.name, max_tokens=100, messages=QUESTION, system="Be brief."
    )
    thinking, text = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm, well.")
    assert (text.type, text.text) == ("text", "Hello, world!")
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 8)
    counted = client.messages.count_tokens(model=scripted.name, messages=QUESTION, system="Be brief.")
    assert counted.input_tokens == message.usage.input_tokens


def test_tools_and_their_results(client: anthropic.Anthropic, scripted: Served):
    options = {"model": scripted.name, "max_tokens": 100, "tools": TOOLS}
    message = client.messages.create(messages=QUESTION, **options)
    assert message.stop_reason == "tool_use"
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [(call.name, call.input) for call in calls] == [
        ("add", {"a": 2, "b": 40}),
        ("look", {"where": "über"}),
    ]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "42"} for call in calls]
    history = [
        *QUESTION,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    assert client.messages.create(messages=history, **options).content[0].text == text_of(ANSWER)


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_a_stream_is_the_unstreamed_message(client: anthropic.Anthropic, scripted: Served, tools):
    options = {"model": scripted.name, "max_tokens": 100, "messages": QUESTION}
    if tools:
        options["tools"] = tools
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"
    assert events.count("content_block_start") == events.count("content_block_stop") == len(whole.content)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.stop_reason == whole.stop_reason
    for mine, other in zip(streamed.content, whole.content, strict=True):
        assert mine.model_dump(exclude={"id"}) == other.model_dump(exclude={"id"})


def test_a_forced_call(client: anthropic.Anthropic, scripted: Served):
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        message = client.messages.create(
            model=scripted.name, max_tokens=100, messages=QUESTION, tools=TOOLS, tool_choice=choice
        )
        assert [(block.type, block.name) for block in message.content] == [
            ("tool_use", "add"),
            ("tool_use", "look"),
        ]


def test_one_call_at_a_time(client: anthropic.Anthropic, scripted: Served):
    options = {"model": scripted.name, "max_tokens": 100, "messages": QUESTION, "tools": TOOLS}
    options["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    message = client.messages.create(**options)
    assert [block.name for block in message.content if block.type == "tool_use"] == ["add"]
    assert message.stop_reason == "tool_use"
    with client.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    assert [block.name for block in streamed.content if block.type == "tool_use"] == ["add"]


def test_stop_sequence_and_length(client: anthropic.Anthropic, scripted: Served):
    options = {"model": scripted.name, "messages": QUESTION}
    message = client.messages.create(max_tokens=100, stop_sequences=["world"], **options)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "world")
    assert message.content[-1].text == "Hello, "
    assert client.messages.create(max_tokens=5, **options).stop_reason == "max_tokens"


def test_errors(client: anthropic.Anthropic, scripted: Served):
    good = {"model": scripted.name, "max_tokens": 10, "messages": QUESTION}
    for bad in (
        {"messages": []},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [*QUESTION, {"role": "assistant", "content": "I"}]},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "other"}, "tools": TOOLS},
        {"max_tokens": 0},
    ):
        with pytest.raises(anthropic.BadRequestError) as error:
            client.messages.create(**{**good, **bad})
        assert error.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**good, "model": "other"})

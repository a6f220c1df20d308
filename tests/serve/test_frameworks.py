"""Agent frameworks from PyPI, unchanged, given a base_url and nothing else: plain answers, streams, and tools
over several turns, in which each framework gives the server's answers back in its own form."""

import asyncio
from dataclasses import dataclass, field
from functools import reduce
from operator import add as plus
from pathlib import Path
from typing import Any

import agents
import openai
import pydantic
import pydantic_ai
import pytest
import smolagents
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import StructuredTool, ToolException
from langchain_openai import ChatOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from script_model import ANSWER, text_of
from serve_util import Served
from smolagents import tool
from transformers import AutoTokenizer

SYSTEM = "Be terse."
QUESTIONS = ["What is 2 + 40?", "Once more."]
CALLS = [("add", {"a": 2, "b": 40}), ("look", {"where": "über"})]
RESULTS = {"add": "42", "look": "nothing"}
HELLO = "Hello, world!"


@dataclass
class Talk:
    """A conversation with tools. With `error` the tool `add` raises it at its first call."""

    error: Exception | None = None
    answers: list[str] = field(default_factory=list)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    prompt_tokens: int = 0  # of the last request

    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        self.calls.append(("add", {"a": a, "b": b}))
        error, self.error = self.error, None
        if error:
            raise error
        return a + b

    def look(self, where: str) -> str:
        """Looks somewhere."""
        self.calls.append(("look", {"where": where}))
        return "nothing"


class PydanticAi:
    retry = pydantic_ai.ModelRetry("again")

    def model(self, served: Served, api: str):
        provider = OpenAIProvider(base_url=f"{served.url}/v1", api_key="any")
        return {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[api](
            served.name, provider=provider
        )

    async def stream(self, model) -> list[str]:
        async with pydantic_ai.Agent(model).run_stream("Hi") as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    async def converse(self, model, talk: Talk, stream: bool, parallel: bool) -> None:
        settings = {} if parallel else {"parallel_tool_calls": False}
        agent = pydantic_ai.Agent(
            model, instructions=SYSTEM, tools=[talk.add, talk.look], model_settings=settings
        )
        history: list[pydantic_ai.ModelMessage] = []
        for question in QUESTIONS:
            if stream:
                async with agent.run_stream_events(question, message_history=history) as events:
                    result = [event async for event in events][-1].result
            else:
                result = await agent.run(question, message_history=history)
            history = result.all_messages()
            talk.answers.append(result.output)
        talk.prompt_tokens = history[-1].usage.input_tokens

    async def sum_of(self, model, schema: type[pydantic.BaseModel]):
        output = pydantic_ai.ToolOutput(schema, name="add")
        return (await pydantic_ai.Agent(model, output_type=output).run("2 + 40")).output

    async def constrained(self, model, schema: type[pydantic.BaseModel]) -> None:
        await pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(schema)).run("2 + 40")


class LangChain:
    retry = ToolException("again")

    def model(self, served: Served, api: str) -> ChatOpenAI:
        # LangChain keeps streamed reasoning only in its encrypted form.
        options = {
            "chat": {"stream_usage": True},
            "responses": {"include": ["reasoning.encrypted_content"]},
        }[api]
        return ChatOpenAI(model=served.name, base_url=f"{served.url}/v1", api_key="any", **options)

    async def stream(self, model: ChatOpenAI) -> list[str]:
        return [piece.text for piece in model.stream("Hi")]

    async def converse(self, model: ChatOpenAI, talk: Talk, stream: bool, parallel: bool) -> None:
        tools = {
            each.__name__: StructuredTool.from_function(each, handle_tool_error=True)
            for each in (talk.add, talk.look)
        }
        options = {} if parallel else {"parallel_tool_calls": False}
        bound = model.bind_tools(list(tools.values()), **options)
        messages: list[BaseMessage] = [SystemMessage(SYSTEM)]
        for question in QUESTIONS:
            messages.append(HumanMessage(question))
            while True:
                answer = reduce(plus, bound.stream(messages)) if stream else bound.invoke(messages)
                messages.append(answer)
                if not answer.tool_calls:
                    break
                messages += [tools[call["name"]].invoke(call) for call in answer.tool_calls]
            talk.answers.append(answer.text)
        talk.prompt_tokens = answer.usage_metadata["input_tokens"]

    async def sum_of(self, model: ChatOpenAI, schema: type[pydantic.BaseModel]):
        return model.with_structured_output(schema, method="function_calling").invoke("2 + 40")

    async def constrained(self, model: ChatOpenAI, schema: type[pydantic.BaseModel]) -> None:
        model.with_structured_output(schema).invoke("2 + 40")


class OpenAiAgents:
    retry = ValueError("again")

    def model(self, served: Served, api: str):
        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any")
        kinds = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
        return kinds[api](served.name, client)

    async def stream(self, model) -> list[str]:
        result = agents.Runner.run_streamed(agents.Agent(name="agent", model=model), "Hi")
        events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        return [event.delta for event in events if isinstance(event, ResponseTextDeltaEvent)]

    async def converse(self, model, talk: Talk, stream: bool, parallel: bool) -> None:
        agent = agents.Agent(
            name="agent",
            instructions=SYSTEM,
            model=model,
            tools=[agents.function_tool(each) for each in (talk.add, talk.look)],
            model_settings=agents.ModelSettings(
                parallel_tool_calls=None if parallel else False, include_usage=True
            ),
        )
        history: list[Any] = []
        for question in QUESTIONS:
            history.append({"role": "user", "content": question})
            if stream:
                result = agents.Runner.run_streamed(agent, history)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, history)
            history = result.to_input_list()
            talk.answers.append(result.final_output)
        talk.prompt_tokens = result.raw_responses[-1].usage.input_tokens

    async def constrained(self, model, schema: type[pydantic.BaseModel]) -> None:
        await agents.Runner.run(agents.Agent(name="agent", model=model, output_type=schema), "2 + 40")


FRAMEWORKS = {"pydantic-ai": PydanticAi(), "langchain-openai": LangChain(), "openai-agents": OpenAiAgents()}
# They send no reasoning back in chat completions.
WITHOUT_REASONING = [("langchain-openai", "chat"), ("openai-agents", "chat")]


def call_of(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "id": name, "function": {"name": name, "arguments": arguments}}


def prompt_tokens(script_model: Path, called: list[tuple[str, dict[str, Any]]], reasoning: bool) -> int:
    """The length of the last prompt in Talk, by transformers."""
    asked = {"role": "assistant", "content": "\n\n", "tool_calls": [call_of(*call) for call in called]}
    if reasoning:
        asked["reasoning_content"] = "Two tools."
    results = [{"role": "tool", "tool_call_id": name, "content": RESULTS[name]} for name, _ in called]
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages += [{"role": "user", "content": question}, asked, *results]
        messages += [{"role": "assistant", "content": text_of(ANSWER)}]
    tokenizer = AutoTokenizer.from_pretrained(script_model)
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
    return len(tokenizer.encode(prompt, add_special_tokens=False))


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_streams(scripted: Served, name: str, api: str):
    framework = FRAMEWORKS[name]
    pieces = [piece for piece in asyncio.run(framework.stream(framework.model(scripted, api))) if piece]
    assert "".join(pieces) == HELLO
    assert len(pieces) > 2


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_tools_over_several_turns(
    scripted: Served, script_model: Path, name: str, api: str, stream: bool, parallel: bool
):
    framework, talk = FRAMEWORKS[name], Talk()
    asyncio.run(framework.converse(framework.model(scripted, api), talk, stream, parallel))
    called = CALLS if parallel else CALLS[:1]
    assert talk.answers == [text_of(ANSWER)] * 2
    assert sorted(talk.calls, key=str) == sorted(called * 2, key=str)
    reasoning = (name, api) not in WITHOUT_REASONING
    assert talk.prompt_tokens == prompt_tokens(script_model, called, reasoning)


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_tool_that_fails(scripted: Served, name: str, api: str):
    framework = FRAMEWORKS[name]
    talk = Talk(error=framework.retry)
    asyncio.run(framework.converse(framework.model(scripted, api), talk, stream=False, parallel=True))
    assert talk.answers == [text_of(ANSWER)] * 2


class Sum(pydantic.BaseModel):
    a: int
    b: int


Sum.__name__ = "add"  # the tool that the scripted model calls


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("name", ["pydantic-ai", "langchain-openai"])
def test_objects_by_tools(scripted: Served, name: str, api: str):
    framework = FRAMEWORKS[name]
    assert asyncio.run(framework.sum_of(framework.model(scripted, api), Sum)) == Sum(a=2, b=40)


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_constrained_answers_are_refused_with_the_remedy(scripted: Served, name: str, api: str):
    framework = FRAMEWORKS[name]
    with pytest.raises(Exception, match=r"(response_|text\.)format\.type: .*offer a tool with its schema"):
        asyncio.run(framework.constrained(framework.model(scripted, api), Sum))


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_calling_agent_of_smolagents(scripted: Served, stream: bool):
    """The agent gives answers and results back as text, so that the model calls both tools in each step."""
    talk = Talk()

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: one
            b: the other
        """
        return talk.add(a, b)

    @tool
    def look(where: str) -> str:
        """Looks somewhere.

        Args:
            where: a place
        """
        return talk.look(where)

    model = smolagents.OpenAIModel(model_id=scripted.name, api_base=f"{scripted.url}/v1", api_key="any")
    agent = smolagents.ToolCallingAgent([add, look], model, max_steps=1, stream_outputs=stream)
    assert [agent.run(question, reset=False) for question in QUESTIONS] == [HELLO] * 2
    assert sorted(talk.calls, key=str) == sorted(CALLS * 2, key=str)
    message = [{"role": "user", "content": [{"type": "text", "text": "bytes"}]}]
    assert model(message).content == "😀é"
    assert [delta.content for delta in model.generate_stream(message) if delta.content] == ["😀", "é"]

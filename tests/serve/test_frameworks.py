"""An agent framework from PyPI, smolagents, given a base_url and nothing else."""

import smolagents
from script_model import ANSWER, text_of
from serve_util import Served


def test_a_tool_calling_agent_of_smolagents(scripted: Served):
    """The model calls both tools at once. The agent runs them and sends the results in its next request."""
    seen = []

    class Add(smolagents.Tool):
        name = "add"
        description = "Adds two numbers."
        inputs = {
            "a": {"type": "number", "description": "one"},
            "b": {"type": "number", "description": "the other"},
        }
        output_type = "number"

        def forward(self, a: float, b: float) -> float:
            seen.append((a, b))
            return a + b

    class Look(smolagents.Tool):
        name = "look"
        description = "Looks somewhere."
        inputs = {"where": {"type": "string", "description": "a place"}}
        output_type = "string"

        def forward(self, where: str) -> str:
            seen.append(where)
            return "nothing"

    model = smolagents.OpenAIModel(model_id=scripted.name, api_base=f"{scripted.url}/v1", api_key="any")
    agent = smolagents.ToolCallingAgent(tools=[Add(), Look()], model=model, max_steps=1)
    agent.run("What is 2 + 40?")
    assert sorted(seen, key=str) == [(2, 40), "über"]
    said = model([{"role": "user", "content": "bytes"}])
    assert said.content == "😀é"
    history = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "I ask."},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    assert model.client.chat.completions.create(model=scripted.name, messages=history).choices[
        0
    ].message.content == text_of(ANSWER)

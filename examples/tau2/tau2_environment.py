"""tau2-bench's conversations as an environment of Bough. tau2's orchestrator holds them and its evaluator
gives the reward; Bough's model is the agent.

bough train ... environment.type=python environment.path=examples/tau2/tau2_environment.py:Tau2Environment

The field `tau2` of a problem (tau2_problems.py writes them) has `domain`, `task` and, unless the agent works
alone (tau2's solo mode), `user`: the URL of a served model, or `scripted`.
"""

import queue
import threading

import tau2_library  # first: it prepares the imports below
from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT, LLMSoloAgent
from tau2.data_model.message import AssistantMessage, MultiToolMessage, ToolCall
from tau2.data_model.simulation import SimulationRun, TerminationReason
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.gym.gym_agent import GymAgent
from tau2.orchestrator.orchestrator import Orchestrator
from tau2.utils.llm_utils import to_litellm_messages
from tau2_users import make_user

MAX_STEPS = 200  # messages of a conversation, tau2's DEFAULT_MAX_STEPS
MALFORMED = {"reward": 0.0, "rewards": {"malformed": 1.0}, "invalid_calls": 1, "done": True}


class Closed(Exception):
    """Ends the orchestrator's thread if nobody continues the conversation."""


class AnswersFromOutside:
    """Makes an agent of tau2 wait for turns from outside. `events` gets the messages that are new to it."""

    def prepare(self, events):
        self.events, self.turns, self.shown = events, queue.SimpleQueue(), 0
        return self

    def set_seed(self, seed):
        pass  # Bough samples

    def generate_next_message(self, message, state):
        if isinstance(message, MultiToolMessage):
            state.messages.extend(message.tool_messages)
        elif message is not None:  # None: the beginning in solo mode
            state.messages.append(message)
        self.events.put(state.messages[self.shown :])
        turn = self.turns.get()
        if turn is None:
            raise Closed
        if turn.is_tool_call():
            turn = self._check_if_stop_toolcall(turn)
        state.messages.append(turn)
        self.shown = len(state.messages)
        return turn, state


class SoloAgent(AnswersFromOutside, LLMSoloAgent):
    pass


class ServiceAgent(AnswersFromOutside, GymAgent):
    """Talks to a user. Like tau2's gym agent it may end the conversation with the tool `done`."""

    @property
    def system_prompt(self):
        return SYSTEM_PROMPT.format(agent_instruction=AGENT_INSTRUCTION, domain_policy=self.domain_policy)


@tau2_library.cached_once
def agent_tools(domain, solo):
    """The tools that an agent sees. Only environments call tools, so all agents of a domain share these."""
    environment = tau2_library.make_environment(domain, solo)
    tools = environment.get_tools()
    if solo and environment.user_tools:
        tools += environment.get_user_tools()
    return tools


class Tau2Environment:
    def reset(self, problem, seed):
        self.spec = problem["tau2"]
        self.domain, self.solo = self.spec["domain"], not self.spec.get("user")
        tau2_library.check_domain(self.domain, self.solo)
        self.task = tau2_library.find_task(self.domain, self.spec["task"])
        environment = tau2_library.make_environment(self.domain, self.solo)
        # Messages for the agent, or the end: a SimulationRun or an exception.
        self.events = queue.SimpleQueue()
        tools, policy = list(agent_tools(self.domain, self.solo)), environment.get_policy()
        if self.solo:
            if not LLMSoloAgent.check_valid_task(self.task) or self.task.ticket is None:
                raise ValueError(
                    f"tau2: the task {self.task.id!r} of {self.domain} has no ticket for solo mode"
                )
            self.agent = SoloAgent(tools, policy, self.task)
        else:
            self.agent = ServiceAgent(tools, policy)
        self.agent.prepare(self.events)
        self.orchestrator = Orchestrator(
            domain=self.domain,
            agent=self.agent,
            user=make_user(self.spec, environment, self.task),
            environment=environment,
            task=self.task,
            max_steps=self.spec.get("max_steps", MAX_STEPS),
            seed=seed % 2**31,
            solo_mode=self.solo,
        )
        threading.Thread(target=self.run, daemon=True).start()
        messages = self.next_event()
        if isinstance(messages, SimulationRun):
            raise RuntimeError(f"tau2 ended {self.task.id!r} before the agent's first turn")
        system = {"role": "system", "content": self.agent.system_prompt}
        schemas = [tool.openai_schema for tool in self.agent.tools]
        return {"messages": [system, *to_litellm_messages(messages)], "tools": schemas}

    def run(self):
        try:
            self.events.put(self.orchestrator.run())
        except Exception as error:
            self.events.put(error)

    def next_event(self):
        event = self.events.get()
        if isinstance(event, Exception):  # tau2 failed, or the user's server: the conversation failed
            raise RuntimeError(f"tau2: {type(event).__name__}: {event}") from event
        return event

    def step(self, action):
        content = action["content"].strip() or None
        calls = [
            ToolCall(id=call["id"], name=call["name"], arguments=call["arguments"])
            for call in action["calls"]
        ]
        if content is None and not calls:  # tau2 takes an empty turn for an error of the model's server
            self.close()
            return MALFORMED
        turn = AssistantMessage(role="assistant", content=content, tool_calls=calls or None, cost=0.0)
        self.agent.turns.put(turn)
        event = self.next_event()
        if not isinstance(event, SimulationRun):
            return {"messages": to_litellm_messages(event)}
        if event.termination_reason == TerminationReason.AGENT_ERROR:  # text in solo mode
            return MALFORMED
        result = evaluate_simulation(event, self.task, EvaluationType.ALL, self.solo, self.domain)
        parts = {kind.value.lower(): value for kind, value in (result.reward_breakdown or {}).items()}
        return {"reward": result.reward, "rewards": {"malformed": 0.0, **parts}, "done": True}

    def close(self):
        if hasattr(self, "agent"):
            self.agent.turns.put(None)

"""The users of conversations with tau2's domains: a served model, or in telecom a script."""

import re

from tau2.data_model.message import ToolMessage, UserMessage
from tau2.data_model.tasks import Task
from tau2.environment.environment import Environment
from tau2.user.user_simulator import DummyUser, UserSimulator
from tau2.utils.tools import parse_functional_tool_call

NOT_UNDERSTOOD = "I did not understand. Which one action should I do on my phone? Please name it."


class ScriptedUser(UserSimulator):
    """A telecom customer who opens with the task's reason for the call, and then does exactly the device
    action that the agent names, such as toggle_roaming() or grant_app_permission(app_name="messaging",
    permission="sms"), and reports the phone's answer. If the agent names no action or several, the user says
    that it did not understand. The user does nothing unasked and never ends the conversation: the agent does.
    """

    def __init__(self, tools, task: Task):
        super().__init__(tools=tools, instructions=task.user_scenario)
        told = task.user_scenario.instructions
        self.opening = f"{told.reason_for_call} {told.known_info}"
        names = "|".join(sorted((tool.name for tool in tools), key=len, reverse=True))
        self.action = re.compile(rf"\b({names})\b(\([^()]*\))?")

    def set_seed(self, seed: int) -> None:
        pass  # nothing is random

    def _generate_next_message(self, message, state):
        state.messages.append(message)
        if isinstance(message, ToolMessage):
            answer = UserMessage(role="user", content=message.content)
        elif not any(isinstance(earlier, UserMessage) for earlier in state.messages):
            answer = UserMessage(role="user", content=self.opening)
        else:
            answer = self.obey(message.content)
        answer.cost = 0.0
        state.messages.append(answer)
        return answer, state

    def obey(self, request: str) -> UserMessage:
        named = {name + (arguments or "()") for name, arguments in self.action.findall(request)}
        if len(named) == 1:
            try:
                call = parse_functional_tool_call(named.pop(), requestor="user")
                return UserMessage(role="user", tool_calls=[call])
            except ValueError:
                pass  # arguments that are none
        return UserMessage(role="user", content=NOT_UNDERSTOOD)


def make_user(spec: dict, environment: Environment, task: Task) -> UserSimulator:
    """The user of `spec`, the field `tau2` of a problem: none in solo mode, else its `user`."""
    user = spec.get("user")
    if not user:
        return DummyUser()
    tools = environment.get_user_tools() if environment.user_tools else None
    if user == "scripted":
        if spec["domain"] != "telecom":
            raise ValueError(
                f"tau2: the scripted user does device actions, and {spec['domain']} has none; "
                "set the URL of a served model"
            )
        return ScriptedUser(tools, task)
    arguments = {"api_base": user, "api_key": spec.get("user_key", "none"), "temperature": 0.0}
    return UserSimulator(
        tools=tools,
        instructions=task.user_scenario,
        llm=f"openai/{spec.get('user_model', 'user')}",
        llm_args=arguments | spec.get("user_arguments", {}),
    )

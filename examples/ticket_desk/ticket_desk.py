"""A tool environment in Python: find the owner of a ticket, then assign the ticket to that person.

bough train ... environment.type=python environment.path=examples/ticket_desk/ticket_desk.py:TicketDesk
"""

import json
import random
import sys

COMPONENTS = ["api", "web", "app", "docs", "mail", "login"]
PEOPLE = ["ann", "bob", "eve", "kim", "max", "zoe"]


def tool(name, description, **parameters):
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def question(component):
    return f"A ticket about {component} came in. Assign it to the owner."


class TicketDesk:
    """One conversation. `reset` opens it, and `step` answers each turn until it is done."""

    def reset(self, problem, seed):
        self.owners = problem["owners"]  # component -> person; a field of the problem's line
        self.component = problem["component"]
        tools = [
            tool("owner", "Who owns a component", component="its name"),
            tool("assign", "Assign the ticket", person="to whom"),
        ]
        return {"messages": question(self.component), "tools": tools}

    def step(self, action):
        answers, reward, done = [], 0.0, not action["calls"]  # a turn without a call ends the conversation
        for call in action["calls"]:
            if call["name"] == "owner":
                answers.append(self.owners.get(call["arguments"].get("component"), "unknown component"))
            else:
                right = call["arguments"].get("person") == self.owners[self.component]
                answers.append("assigned")
                reward, done = float(right), True
        return {"messages": answers, "reward": reward, "done": done}


def problem(draw):
    owners = {component: draw.choice(PEOPLE) for component in COMPONENTS}
    component = draw.choice(COMPONENTS)
    return {"question": component, "answer": owners[component], "owners": owners, "component": component}


def demonstration(draw):
    """A conversation for `bough sft`, up to each of its two calls. In one of three, a call is wrong."""

    def call(name, **arguments):
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    line = problem(draw)
    mistake = draw.choice(["", "", "", "", "owner", "assign"])
    asked = draw.choice(COMPONENTS) if mistake == "owner" else line["component"]
    owner = line["owners"][asked]
    person = draw.choice(PEOPLE) if mistake == "assign" else owner
    messages = [
        {"role": "user", "content": question(line["component"])},
        {"role": "assistant", "content": call("owner", component=asked)},
        {"role": "tool", "content": owner},
        {"role": "assistant", "content": call("assign", person=person)},
    ]
    return [{"messages": messages[:2]}, {"messages": messages}]


if __name__ == "__main__":  # python ticket_desk.py [problems | demonstrations] [NUMBER] [SEED]
    kind, number, seed = (sys.argv[1:] + ["problems", "64", "1"][len(sys.argv) - 1 :])[:3]
    draw = random.Random(f"{kind} {seed}")
    for _ in range(int(number)):
        for line in demonstration(draw) if kind == "demonstrations" else [problem(draw)]:
            print(json.dumps(line))

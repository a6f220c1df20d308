"""A tool environment in Python: find the owner of a ticket, then assign the ticket to that person.

bough train ... environment.type=python environment.path=examples/ticket_desk/ticket_desk.py:TicketDesk
"""

import json


def tool(name, description, **parameters):
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


class TicketDesk:
    """One conversation. `reset` opens it, and `step` answers each turn until it is done."""

    def reset(self, problem, seed):
        self.owners = problem["owners"]  # component -> person; a field of the problem's line
        self.component = problem["component"]
        question = f"A ticket about {self.component} came in. Assign it to the owner."
        tools = [
            tool("owner", "Who owns a component", component="its name"),
            tool("assign", "Assign the ticket", person="to whom"),
        ]
        return {"messages": question, "tools": tools}

    def step(self, action):
        answers, reward, done = [], 0.0, not action["calls"]  # a turn without a call ends the conversation
        for call in action["calls"]:
            if call["name"] == "owner":
                answers.append(self.owners.get(call["arguments"]["component"], "unknown component"))
            else:
                right = call["arguments"]["person"] == self.owners[self.component]
                answers.append("assigned")
                reward, done = float(right), True
        return {"messages": answers, "reward": reward, "done": done}


if __name__ == "__main__":  # python ticket_desk.py > tickets.jsonl
    for number in range(64):
        owners = {"api": ["ann", "bob", "eve"][number % 3], "web": ["bob", "eve", "ann"][number // 3 % 3]}
        component = "api" if number % 2 else "web"
        line = {"question": component, "answer": owners[component], "owners": owners, "component": component}
        print(json.dumps(line))

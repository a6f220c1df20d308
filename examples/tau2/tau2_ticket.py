"""The best script for telecom that reads only the ticket: a fixed list of calls for each kind of ticket. It
sees no answer, so its success is what a model can reach without checking anything.

  python tau2_play.py choose --problems train.jsonl --out lists.json
  python tau2_play.py success --problems test.jsonl --agent ticket --lists lists.json

The customer and the line are the same in all tasks, so a list has them in full. The calls are all that mend
something in any task, in an order in which a later call undoes no earlier one. For each kind of ticket all
subsets of the switches are tried, beside all other calls. Then each call in turn is left out or added if
success rises, or stays and the list gets shorter, until nothing changes.
"""

import itertools
import sys

LINE = {"customer_id": "C1001", "line_id": "L1002"}
BILL = {"customer_id": "C1001", "bill_id": "B1234321"}
CALLS = [
    ("toggle_airplane_mode", {}),
    ("reseat_sim_card", {}),
    ("send_payment_request", BILL),
    ("make_payment", {}),
    ("resume_line", LINE),
    ("reset_apn_settings", {}),
    ("reboot_device", {}),
    ("toggle_data", {}),
    ("toggle_roaming", {}),
    ("enable_roaming", LINE),
    ("refuel_data", {**LINE, "gb_amount": 2.0}),
    ("set_network_mode_preference", {"mode": "4g_5g_preferred"}),
    ("toggle_data_saver_mode", {}),
    ("disconnect_vpn", {}),
    ("toggle_wifi_calling", {}),
    ("grant_app_permission", {"app_name": "messaging", "permission": "storage"}),
    ("grant_app_permission", {"app_name": "messaging", "permission": "sms"}),
    ("transfer_to_human_agents", {"summary": "I cannot fix the issue."}),
]
# A switch that is called although it is right becomes wrong. The other calls do no harm, or an error.
SWITCHES = [number for number, (name, _) in enumerate(CALLS) if name.startswith("toggle_")]


def kind_of(ticket):
    """The kind of a ticket. All tickets of a kind have the same text."""
    issue = next(word for word in ("phone service", "MMS", "mobile data") if word in ticket)
    return f"{issue}, abroad" if "abroad" in ticket else issue


class Script:
    """Makes the calls of a list and is done."""

    def __init__(self, numbers):
        self.turns = [*(CALLS[number] for number in sorted(numbers)), ("done", {})]

    def call(self):
        return self.turns.pop(0)

    def answered(self, name, arguments, answer):
        pass


def choose(success):
    """The best list. success(list) is its number of successes; a list is a set of indices of CALLS."""
    others = frozenset(range(len(CALLS))) - set(SWITCHES)
    subsets = [
        others.union(chosen)
        for count in range(len(SWITCHES) + 1)
        for chosen in itertools.combinations(SWITCHES, count)
    ]
    best = max(subsets, key=success)
    while True:
        before = best
        for number in range(len(CALLS)):
            best = max(best, best ^ {number}, key=lambda numbers: (success(numbers), -len(numbers)))
        if best == before:
            return best


def choose_all(problems, ticket_of, reward_of):
    """The lists of all kinds of ticket, with their success. reward_of(problem, agent): plays."""
    kinds = {}
    for problem in problems:
        kinds.setdefault(kind_of(ticket_of(problem)), []).append(problem)
    lists = {}
    for kind, tasks in sorted(kinds.items()):
        known = {}

        def success(numbers, tasks=tasks, known=known):
            if numbers not in known:
                known[numbers] = sum(reward_of(problem, Script(numbers)) > 0 for problem in tasks)
            return known[numbers]

        best = choose(success)
        lists[kind] = sorted(best)
        names = ", ".join(CALLS[number][0] for number in lists[kind])
        print(f"{kind}: {success(best)} of {len(tasks)} tasks by {names}", file=sys.stderr, flush=True)
    return lists

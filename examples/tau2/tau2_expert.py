"""A scripted agent for telecom in solo mode: it checks, fixes what it found, and is done. Its next call is a
function of what the agent sees: the ticket, its calls and their answers.
"""

import json
import random
import re
from dataclasses import dataclass, field

REFUEL_GB = 2.0  # the most that the policy allows; all tickets that name an amount name this one
FIXES_LEFT_OUT, ENDS_EARLY = (
    0.6,
    0.2,
)  # shares of the mistakes; the others are calls that change a wrong setting
STRAY_CALLS = (
    "toggle_data",
    "toggle_roaming",
    "toggle_data_saver_mode",
    "toggle_wifi_calling",
    "toggle_wifi",
)


@dataclass
class Seen:
    """What the answers so far have told. A missing key is not known yet."""

    facts: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)  # names of the calls so far

    def read(self, name: str, arguments: dict, answer: str) -> None:
        self.asked.append(name)
        reader = globals().get(f"read_{name}")
        if reader and not answer.startswith("Error:"):
            self.facts.update(reader(arguments, answer, self.facts))

    def __getitem__(self, key):
        return self.facts.get(key)

    def __contains__(self, key):
        return key in self.facts


# ---- What an answer tells: one function for each call, named after it.


def read_get_customer_by_phone(_, answer, __):
    customer = json.loads(answer)
    return {"customer": customer["customer_id"], "lines": customer["line_ids"], "line_details": {}}


def read_get_details_by_id(arguments, answer, facts):
    details = json.loads(answer)
    if arguments["id"].startswith("B"):
        return {"bill_status": details["status"]}
    return {"line_details": {**facts["line_details"], arguments["id"]: details}}


def read_check_network_status(_, answer, __):
    status = dict(line.split(": ", 1) for line in answer.splitlines())
    return {
        "airplane": status["Airplane Mode"] == "ON",
        "sim": status["SIM Card Status"],
        "data": status["Mobile Data Enabled"] == "Yes",
        "roaming": status["Data Roaming Enabled"] == "Yes",
    }


def switch(key, *settled):
    """Reads the answer of a call that turns a setting on or off."""
    return lambda _, answer, __: {key: "now ON" in answer, **dict.fromkeys(settled, True)}


read_toggle_airplane_mode = switch("airplane")
read_toggle_data = switch("data")
read_toggle_roaming = switch("roaming")
read_toggle_data_saver_mode = switch("saver")
read_toggle_wifi_calling = switch("wifi_calling")


def read_reseat_sim_card(*_):
    return {"sim": "reseated"}


def read_check_sim_status(_, answer, __):
    return {"sim": "locked" if "locked" in answer else "active"}


def read_check_apn_settings(_, answer, __):
    return {
        "apn_wrong": "MMSC URL (for picture messages): Not Set" in answer or "Name: internet" not in answer
    }


def read_reset_apn_settings(*_):
    return {"apn_wrong": False, "needs_reboot": True}


def read_reboot_device(*_):
    return {"needs_reboot": False}


def read_get_bills_for_customer(_, answer, __):
    overdue = [bill["bill_id"] for bill in json.loads(answer) if bill["status"] == "Overdue"]
    return {"overdue_bill": overdue[0] if overdue else None}


def read_resume_line(*_):
    return {"resumed": True, "needs_reboot": True}


def read_get_data_usage(_, answer, __):
    usage = json.loads(answer)
    used, limit, refueled = (float(usage[f"data_{key}_gb"]) for key in ("used", "limit", "refueling"))
    return {"exceeded": used >= limit + refueled}


def read_refuel_data(*_):
    return {"exceeded": False}


def read_enable_roaming(*_):
    return {"line_roaming": True}


def read_check_data_restriction_status(_, answer, __):
    return {"saver": "is ON" in answer}


def read_check_vpn_status(_, answer, __):
    return {"slow_vpn": "'server_performance': <PerformanceLevel.POOR" in answer or "'poor'" in answer}


def read_disconnect_vpn(*_):
    return {"slow_vpn": False}


def read_check_network_mode_preference(_, answer, __):
    return {"old_mode": "2g" in answer or "3g" in answer}


def read_set_network_mode_preference(*_):
    return {"old_mode": False}


def read_check_wifi_calling_status(_, answer, __):
    return {"wifi_calling": "turned ON" in answer}


def read_check_app_permissions(_, answer, __):
    return {
        "missing": [name for name in ("storage", "sms") if name not in answer.split("permission for:")[-1]]
    }


def read_grant_app_permission(arguments, _, facts):
    return {"missing": [name for name in facts["missing"] if name != arguments["permission"]]}


# ---- The next call.


def next_call(ticket: str, seen: Seen, left_out: frozenset = frozenset()) -> tuple[str, dict]:
    """The expert's next call. `left_out`: fixes that it forgets."""
    for name, arguments in plan(ticket, seen):
        if name not in left_out:
            return name, arguments
    return "done", {}


def plan(ticket: str, seen: Seen):
    """The calls that are still to make, by what is known now. Only the first is made before the next
    answer."""
    phone = re.search(r"phone number: ([\d-]+)", ticket)[1]
    if "transfer_to_human_agents" in seen.asked:
        return
    if "customer" not in seen:
        yield "get_customer_by_phone", {"phone_number": phone}
        return
    line = next((d for d in seen["line_details"].values() if d["phone_number"] == phone), None)
    if line is None:
        unread = [line_id for line_id in seen["lines"] if line_id not in seen["line_details"]]
        if unread:
            yield "get_details_by_id", {"id": unread[0]}
            return
    account = {"customer_id": seen["customer"], "line_id": line["line_id"]}
    yield from service_calls(seen, line, account)
    if "phone service" in ticket:
        yield from last_check(seen, "check_status_bar")
        return
    yield from data_calls(seen, line, account, abroad="abroad" in ticket)
    if "MMS" not in ticket:
        yield from speed_calls(seen)
        yield from last_check(seen, "run_speed_test")
        return
    yield from mms_calls(seen)
    yield from last_check(seen, "can_send_mms")


def last_check(seen, name):
    if seen.asked[-1] != name:
        yield name, {}


def service_calls(seen, line, account):
    if "airplane" not in seen:
        yield "check_network_status", {}
    if seen["airplane"]:
        yield "toggle_airplane_mode", {}
    if seen["sim"] == "missing":
        yield "reseat_sim_card", {}
    if seen["sim"] == "reseated":
        yield "check_sim_status", {}
    ended = (line["contract_end_date"] or "9999") < "2025-02-25"  # the policy's current time
    suspended = line["status"] == "Suspended" and not seen["resumed"]
    if (seen["sim"] or "").startswith("locked") or (suspended and ended):
        yield "transfer_to_human_agents", {"summary": "I cannot fix the issue."}
    elif suspended:
        yield from suspension_calls(seen, account)
    if "apn_wrong" not in seen:
        yield "check_apn_settings", {}
    if seen["apn_wrong"]:
        yield "reset_apn_settings", {}
    if seen["needs_reboot"]:
        yield "reboot_device", {}


def suspension_calls(seen, account):
    if "overdue_bill" not in seen:
        yield "get_bills_for_customer", {"customer_id": account["customer_id"]}
    elif seen["overdue_bill"] and "send_payment_request" not in seen.asked:
        bill = {"customer_id": account["customer_id"], "bill_id": seen["overdue_bill"]}
        yield "send_payment_request", bill
    elif seen["overdue_bill"] and "check_payment_request" not in seen.asked:
        yield "check_payment_request", {}
    elif seen["overdue_bill"] and "make_payment" not in seen.asked:
        yield "make_payment", {}
    elif seen["overdue_bill"] and "bill_status" not in seen:
        yield "get_details_by_id", {"id": seen["overdue_bill"]}
    else:
        yield "resume_line", account


def data_calls(seen, line, account, abroad):
    if not seen["data"]:
        yield "toggle_data", {}
    if abroad and not seen["roaming"]:
        yield "toggle_roaming", {}
    if abroad and not line["roaming_enabled"] and "line_roaming" not in seen:
        yield "enable_roaming", account
    if "exceeded" not in seen:
        yield "get_data_usage", account
    if seen["exceeded"]:
        yield "refuel_data", {**account, "gb_amount": REFUEL_GB}
    if "old_mode" not in seen:
        yield "check_network_mode_preference", {}
    if seen["old_mode"]:
        yield "set_network_mode_preference", {"mode": "4g_5g_preferred"}


def speed_calls(seen):
    if "saver" not in seen:
        yield "check_data_restriction_status", {}
    if seen["saver"]:
        yield "toggle_data_saver_mode", {}
    if "slow_vpn" not in seen:
        yield "check_vpn_status", {}
    if seen["slow_vpn"]:
        yield "disconnect_vpn", {}


def mms_calls(seen):
    if "wifi_calling" not in seen:
        yield "check_wifi_calling_status", {}
    if seen["wifi_calling"]:
        yield "toggle_wifi_calling", {}
    if "missing" not in seen:
        yield "check_app_permissions", {"app_name": "messaging"}
    for permission in seen["missing"] or ():
        yield "grant_app_permission", {"app_name": "messaging", "permission": permission}


class Expert:
    """Plays one conversation. `slips`: the share of turns in which it makes a mistake: it forgets a fix for
    good, ends the conversation, or changes a setting that nobody asked for."""

    def __init__(self, ticket: str, slips: float = 0.0, seed: int = 0):
        self.ticket, self.slips, self.random = ticket, slips, random.Random(seed)
        self.seen, self.left_out = Seen(), frozenset()

    def call(self) -> tuple[str, dict]:
        name, arguments = next_call(self.ticket, self.seen, self.left_out)
        if self.random.random() >= self.slips:
            return name, arguments
        kind = self.random.random()
        if kind < FIXES_LEFT_OUT:
            self.left_out |= {name} if self.can_be_left_out(name) else set()
            return next_call(self.ticket, self.seen, self.left_out)
        if kind < FIXES_LEFT_OUT + ENDS_EARLY:
            return "done", {}
        return self.random.choice(STRAY_CALLS), {}

    @staticmethod
    def can_be_left_out(name: str) -> bool:
        return not name.startswith(("check_", "get_")) or name in ("check_status_bar",)

    def answered(self, name: str, arguments: dict, answer: str) -> None:
        self.seen.read(name, arguments, answer)

"""tau2-bench in this process: its domains, tasks and environments, without any change to its files.

Import this module before any other that imports tau2. It sets what tau2 and litellm read at their import, and
mends four things in memory that matter if one process holds many conversations (mend()).
"""

import functools
import hashlib
import os
import threading

os.environ.setdefault(
    "LITELLM_LOCAL_MODEL_COST_MAP", "True"
)  # else litellm fetches a price list at its import

from loguru import logger

logger.disable("tau2")  # tau2 logs every message of every conversation

from tau2.data_model.tasks import Task  # noqa: E402
from tau2.domains.telecom.tools import TelecomTools  # noqa: E402
from tau2.domains.telecom.user_tools import TelecomUserTools  # noqa: E402
from tau2.environment.db import DB  # noqa: E402
from tau2.environment.environment import Environment  # noqa: E402
from tau2.registry import registry  # noqa: E402

DOMAINS = ("telecom", "airline", "retail", "mock")
SOLO_DOMAINS = ("telecom", "mock")  # tau2's environments of the others refuse solo mode


def check_domain(domain: str, solo: bool) -> None:
    """Throws ValueError if tau2 has no such domain, or if the domain has no solo mode."""
    if domain not in DOMAINS:
        raise ValueError(f"tau2: got the domain {domain!r}, expected one of {', '.join(DOMAINS)}")
    if solo and domain not in SOLO_DOMAINS:
        raise ValueError(
            f"tau2: {domain} has no solo mode, only {' and '.join(SOLO_DOMAINS)} have it; "
            "set a user: the URL of a served model"
        )


def cached_once(function):
    """functools.cache whose callers wait for the first one: the conversations of a batch begin together, and
    each would compute the value."""
    lock, cached = threading.Lock(), functools.cache(function)

    @functools.wraps(function)
    def call(*arguments):
        with lock:
            return cached(*arguments)

    call.cache_clear = cached.cache_clear
    return call


@cached_once
def tasks(domain: str) -> dict[str, Task]:
    """All tasks of a domain by id. The 14 MB of telecom are parsed once a process."""
    return {task.id: task for task in registry.get_tasks_loader(domain)(None)}


def find_task(domain: str, task_id: str) -> Task:
    if task_id not in tasks(domain):
        raise ValueError(f"tau2: {domain} has no task {task_id!r}; it has {len(tasks(domain))} others")
    return tasks(domain)[task_id]


def task_ids(domain: str, split: str = "", without: tuple[str, ...] = ()) -> list[str]:
    """The ids of a split (all tasks if it is empty) that are in none of `without`, in the order of their
    hash. So the first n are a sample that depends on nothing else."""
    load_splits = registry.get_task_splits_loader(domain)
    splits = load_splits() if load_splits else {}
    for name in (split, *without):
        if name and name not in splits:
            raise ValueError(f"tau2: {domain} has no split {name!r}; it has: {', '.join(splits) or 'none'}")
    left_out = {task_id for name in without for task_id in splits[name]}
    found = [task_id for task_id in (splits[split] if split else tasks(domain)) if task_id not in left_out]
    return sorted(found, key=lambda task_id: hashlib.sha256(task_id.encode()).hexdigest())


def make_environment(domain: str, solo: bool) -> Environment:
    check_domain(domain, solo)
    return registry.get_env_constructor(domain)(solo_mode=solo)


@functools.cache
def mend() -> None:
    """Changes tau2 in memory, once a process:
    - A data base is read from its file once. Each environment gets its own copy, as before.
    - Each environment has its own details of the telecom phone's VPN. tau2 shares one object between all
      environments, so that a task with a broken VPN breaks it in all other conversations.
    - A bill that a refuel opens is numbered. tau2 draws a random id. Its evaluation replays the conversation
      and fails if an answer that shows the id differs.
    - That agent and user have no tool of one name is checked once for each domain. The check builds a model
      class for every tool, and takes most of tau2's time otherwise.
    """

    @cached_once
    def database_text(kind: type[DB], path: str) -> str:
        return load(kind, path).model_dump_json()

    load = DB.load.__func__
    DB.load = classmethod(lambda kind, path: kind.model_validate_json(database_text(kind, str(path))))

    make_user_tools = TelecomUserTools.__init__

    def with_own_vpn(self, db):
        make_user_tools(self, db)
        self.default_vpn_details = self.default_vpn_details.model_copy()

    TelecomUserTools.__init__ = with_own_vpn

    charge = TelecomTools._apply_one_time_charge

    def with_numbered_bill(self, customer_id, amount, description):
        customer = self.get_customer_by_id(customer_id)
        known = len(customer.bill_ids)
        charge(self, customer_id, amount, description)
        for position, bill_id in enumerate(customer.bill_ids[known:], known):
            self._get_bill_by_id(bill_id).bill_id = f"B{len(self.db.bills):08d}"
            customer.bill_ids[position] = f"B{len(self.db.bills):08d}"

    TelecomTools._apply_one_time_charge = with_numbered_bill

    validate, lock, valid = Environment.validate_solo_mode, threading.Lock(), set()

    def validate_once(self):
        kinds = type(self.tools), type(self.user_tools)
        with lock:
            if kinds not in valid:
                validate(self)
                valid.add(kinds)

    Environment.validate_solo_mode = validate_once


mend()

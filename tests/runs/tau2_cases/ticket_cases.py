"""The best script that reads only the ticket, whole demonstrations, and the tokenizer of byte pairs."""

import json

import pytest
import tau2_library
from tau2_fixtures import AIRPLANE, problem
from tau2_play import choose, play
from tau2_ticket import CALLS, SWITCHES, kind_of
from tau2_ticket import choose as choose_list
from tau2_tokenizer import END_OF_TURN, SPECIAL, make_tokenizer, renderer, save, texts_of

SIM = "[service_issue]unseat_sim_card[PERSONA:Easy]"
NUMBERS = {name: number for number, (name, _) in enumerate(CALLS)}


def test_all_tickets_of_a_kind_have_one_text():
    texts = {}
    for task in tau2_library.tasks("telecom").values():
        texts.setdefault(kind_of(task.ticket), set()).add(task.ticket)
    assert len(texts) == 5
    assert all(len(found) == 1 for found in texts.values())


def test_the_agent_ticket_makes_the_calls_of_its_list_and_is_done():
    lists = {"phone service": [NUMBERS["toggle_airplane_mode"]]}
    solved, missed = (play(problem("telecom", task), "ticket", lists=lists) for task in (AIRPLANE, SIM))
    assert (solved.reward, missed.reward) == (1.0, 0.0)
    assert solved.turns == missed.turns == 2, "the list does not depend on the task"


def test_the_chosen_list_wins_the_most_tasks_with_the_fewest_calls():
    """A task needs its faults' calls and no other switch. Two of three tasks have the airplane mode on."""
    sim, airplane = NUMBERS["reseat_sim_card"], NUMBERS["toggle_airplane_mode"]
    tasks = [{sim, airplane}, {airplane}, {sim}]

    def success(numbers):
        return sum(faults <= numbers and not numbers & (set(SWITCHES) - faults) for faults in tasks)

    assert choose_list(success) == {sim, airplane}


def test_lists_are_chosen_by_playing_tasks():
    lists = choose([problem("telecom", AIRPLANE)])
    assert lists == {"phone service": [NUMBERS["toggle_airplane_mode"]]}


@pytest.fixture(scope="module")
def examples():
    return [play(problem("telecom", task)).whole(renderer()) for task in (AIRPLANE, SIM)]


def test_a_whole_conversation_is_one_example(examples):
    """The prompt is that of the first turn, and what `bough sft` adds ends the last turn."""
    conversation = play(problem("telecom", AIRPLANE))
    text = examples[0]["prompt"] + examples[0]["completion"] + END_OF_TURN
    assert text == renderer()(conversation.messages, conversation.tools).removesuffix("\n")
    assert examples[0]["prompt"].endswith("<|im_start|>assistant\n")
    assert examples[0]["completion"].count("<tool_call>") == conversation.turns
    assert examples[0]["completion"].endswith('{"name": "done", "arguments": {}}\n</tool_call>')


def test_prompts_of_all_tasks_differ_only_in_the_ticket(examples):
    mms = play(problem("telecom", "[mms_issue]bad_wifi_calling[PERSONA:Easy]")).whole(renderer())
    begin = examples[0]["prompt"].index("<ticket>")
    assert mms["prompt"][:begin] == examples[0]["prompt"][:begin]
    assert mms["prompt"] != examples[0]["prompt"]


def test_byte_pairs_give_the_text_back_and_end_at_lines_and_commas(examples):
    tokenizer = make_tokenizer(texts_of(examples, 2), 1500)
    for example in examples:
        ids = tokenizer.encode(example["prompt"] + example["completion"]).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == example["prompt"] + example["completion"]
    pieces = [tokenizer.decode([number]) for number in range(tokenizer.get_vocab_size())]
    assert not [piece for piece in pieces if "\n" in piece[:-1] or "," in piece[:-1]]
    assert any(" " in piece.strip() for piece in pieces), "pairs reach over words"


def test_a_tokenizer_needs_a_model_with_as_many_rows(tmp_path, examples):
    tokenizer = make_tokenizer(texts_of(examples, 1), 400)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 400}))
    save(tokenizer, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == SPECIAL.index(END_OF_TURN)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300}))
    with pytest.raises(SystemExit, match="300 rows for 400 tokens"):
        save(tokenizer, tmp_path)

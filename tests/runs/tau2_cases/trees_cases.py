"""bench/tau2_trees.py: conversations as rows of a batch, and the sets of bench/step_vs_peers.py."""

import json
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "bench"))

import tau2_trees  # noqa: E402
from tau2_sets import SETS, Batch  # noqa: E402

EXPERT = Batch("telecom", "", "expert", 1, 3)
WITH_USER = Batch("telecom", "scripted", "expert", 2)


@cache
def encoder():
    return tau2_trees.Encoder(tau2_trees.train_pairs(), tau2_trees.TEMPLATE)


@cache
def held(batch):
    return list(tau2_trees.hold(batch))


def rows(tmp_path, conversations, every_turn):
    tau2_trees.write_rows(tmp_path / "rows.jsonl", conversations, encoder(), every_turn)
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def trained_texts(row):
    """The texts of the runs of trained tokens."""
    texts, run = [], []
    for token, trained in [*zip(row["input_ids"], row["loss_mask"], strict=True), (0, 0)]:
        if trained:
            run.append(token)
        elif run:
            texts.append(encoder().tokenizer.decode(run, skip_special_tokens=False))
            run = []
    return texts


def test_a_row_is_the_text_of_its_conversation(tmp_path):
    for conversation in held(WITH_USER):
        (row,) = rows(tmp_path, [conversation], every_turn=False)
        text = encoder().render(conversation["messages"], conversation["tools"])
        assert encoder().tokenizer.decode(row["input_ids"], skip_special_tokens=False) == text.rstrip("\n")
        assert len(row["input_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
        assert [value != 0 for value in row["logprobs"]] == [mask == 1 for mask in row["loss_mask"]]


def test_the_agents_turns_are_trained_and_nothing_else(tmp_path):
    (conversation,) = held(WITH_USER)[:1]
    assert [m["role"] for m in conversation["messages"][:3]] == ["system", "assistant", "user"], "a greeting"
    turns = [m for m in conversation["messages"][3:] if m["role"] == "assistant"]
    (row,) = rows(tmp_path, [conversation], every_turn=False)
    texts = trained_texts(row)
    assert len(texts) == len(turns) > 4
    for text, turn in zip(texts, turns, strict=True):
        assert text.endswith("<|im_end|>")
        for call in turn.get("tool_calls", []):
            assert f'"name": "{call["function"]["name"]}"' in text
        assert text.startswith(turn["content"])


def test_each_turn_as_a_sequence_is_a_prefix_of_its_conversation(tmp_path):
    conversation = max(held(EXPERT), key=lambda held: len(held["messages"]))
    (whole,) = rows(tmp_path, [conversation], every_turn=False)
    turns = rows(tmp_path, [conversation], every_turn=True)
    assert len(turns) == sum(message["role"] == "assistant" for message in conversation["messages"]) > 4
    trained = [0] * len(whole["input_ids"])
    for row in turns:
        length = len(row["input_ids"])
        assert row["input_ids"] == whole["input_ids"][:length]
        assert len(trained_texts(row)) == 1 and row["loss_mask"][-1] == 1
        trained[:length] = [a + b for a, b in zip(trained[:length], row["loss_mask"], strict=True)]
    assert trained == whole["loss_mask"], "each turn is trained by one row"


def test_conversations_of_a_task_share_its_prompt_and_fork(tmp_path):
    first, second, third = (row["input_ids"] for row in rows(tmp_path, held(EXPERT), every_turn=False))
    (prompt, _), *_ = encoder().turns(held(EXPERT)[0])
    length = sum(segment.count for segment, _ in prompt)
    assert length > 8000 and first[:length] == second[:length] == third[:length]
    assert len({tuple(first), tuple(second), tuple(third)}) > 1, "mistakes differ"


def test_the_sets_have_at_most_200000_tokens_of_the_models_vocabulary(tmp_path):
    for name, (batch, every_turn) in SETS.items():
        found = rows(tmp_path, held(batch), every_turn)
        tokens = [token for row in found for token in row["input_ids"]]
        assert 50_000 < len(tokens) <= 200_000, name
        assert max(tokens) < tau2_trees.VOCAB, name
        assert all(-1 <= row["advantage"] < 1 for row in found)


def test_conversations_are_held_once(tmp_path):
    batch = Batch("mock", "", "gold", 2)
    first = tau2_trees.conversations(batch, tmp_path)
    (kept,) = tmp_path.iterdir()
    assert kept.name == "mock_alone_gold_2x1.jsonl" and len(first) == 2
    kept.write_text(kept.read_text().replace('"reward": 1.0', '"reward": 0.5'))
    assert [c["reward"] for c in tau2_trees.conversations(batch, tmp_path)] == [0.5, 0.5]


def test_byte_pairs_encode_any_text():
    text = 'Grüße, 你好 \n\t{"a": 12.5}  <|im_start|>'
    tokenizer = encoder().tokenizer
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text and ids[-1] == 1
    assert tokenizer.get_vocab_size() == tau2_trees.VOCAB

"""Tokens that a model directory names outside tokenizer.json, and their names in chat templates, against
transformers' AutoTokenizer."""

import json
import shutil

import pytest
from test_tokenizer import ask
from tiny_models import MODEL_TYPES, write_byte_tokenizer
from transformers import AutoTokenizer

TEXT = "a <|im_start|> b <mark> c <|im_end|><two> d"
NAMES = ["bos", "eos", "unk", "sep", "pad", "cls", "mask", "own", "other"]
TEMPLATE = "{% set all = [" + ", ".join(f"{name}_token" for name in NAMES) + "] %}{{ all | join('|') }}"


def token(content, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False,
            "special": True, **flags}  # fmt: skip


STANDARD = {str(i): token(text) for i, text in enumerate(["<|endoftext|>", "<|im_end|>", "<|im_start|>"])}


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain") / "model"
    directory.mkdir()
    write_byte_tokenizer(directory, 311)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return directory


def write(plain, directory, files, lacks=(), plain_ids=()):
    """A copy of the directory. `files`: keys that are added to its files, or new files. `lacks`: added tokens
    that tokenizer.json does not have. `plain_ids`: added tokens that are not special there."""
    shutil.copytree(plain, directory)
    for name, keys in files.items():
        path = directory / name
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | keys))
    path = directory / "tokenizer.json"
    file = json.loads(path.read_text())
    file["added_tokens"] = [
        entry | {"special": entry["id"] not in plain_ids}
        for entry in file["added_tokens"]
        if entry["content"] not in lacks
    ]
    path.write_text(json.dumps(file))
    return directory


CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
DECODER = "added_tokens_decoder"
CASES = {
    "nothing more": {},
    "a decoder": {CONFIG: {DECODER: {**STANDARD, "267": token("<mark>")}}},
    "a decoder out of order": {CONFIG: {DECODER: {
        "268": token("<two>"), "267": token("<mark>", special=False, normalized=True)}}},
    "a decoder with other flags": {CONFIG: {DECODER: {"2": token("<|im_start|>", lstrip=True)}}},
    "a decoder with a token that is not special": {CONFIG: {DECODER: {
        **STANDARD, "2": token("<|im_start|>", special=False)}}},
    "a named token that the decoder says is plain": {CONFIG: {
        DECODER: {"267": token("<mark>", special=False)}, "pad_token": "<mark>"}},
    "additional tokens": {CONFIG: {"additional_special_tokens": ["<mark>", "<two>"]}},
    "extra tokens": {CONFIG: {"extra_special_tokens": ["<mark>", "<two>"]}},
    "extra tokens hide additional ones": {CONFIG: {
        "extra_special_tokens": ["<mark>"], "additional_special_tokens": ["<two>"]}},
    "tokens with names of their own": {CONFIG: {
        "extra_special_tokens": {"own_token": "<mark>"}, "other_token": "<two>"}},
    "a new pad": {CONFIG: {"pad_token": "<mark>"}},
    "a word of the vocabulary": {CONFIG: {"eos_token": "a"}},
    "an object as a token": {CONFIG: {
        "bos_token": {"__type": "AddedToken", "content": "<mark>", "lstrip": True, "normalized": False}}},
    "null": {CONFIG: {"eos_token": None}},
    "a map": {MAP: {"bos_token": {"content": "<mark>", "lstrip": True, "rstrip": False, "normalized": True,
                                  "single_word": False}, "eos_token": "<two>"}},
    "a map with null": {MAP: {"eos_token": None}},
    "a map with additional tokens": {MAP: {"additional_special_tokens": ["<mark>"], "own_token": "<two>"}},
    "a map with extra tokens": {CONFIG: {"extra_special_tokens": ["<two>"]},
                                MAP: {"extra_special_tokens": ["<mark>", "<two>"]}},
    "a decoder hides a map": {CONFIG: {DECODER: {}}, MAP: {"bos_token": "<mark>"}},
    "added tokens": {ADDED: {"<mark>": 267}},
    "added tokens in another order": {ADDED: {"<mark>": 268, "<two>": 267}},
    "added tokens that are named": {
        CONFIG: {"additional_special_tokens": ["<mark>"]}, ADDED: {"<mark>": 267}},
    "added tokens that a map lists": {MAP: {"additional_special_tokens": ["<mark>"]}, ADDED: {"<mark>": 267}},
    "a decoder hides added tokens": {CONFIG: {DECODER: {}}, ADDED: {"<mark>": 267}},
}  # fmt: skip
LACKING = {
    "the decoder has it": {CONFIG: {DECODER: STANDARD}},
    "added_tokens.json has it": {ADDED: {"<|im_start|>": 2}},
    "an additional token": {CONFIG: {"additional_special_tokens": ["<|im_start|>"]}},
    "a plain token of the decoder": {
        CONFIG: {DECODER: {**STANDARD, "2": token("<|im_start|>", special=False)}}
    },
    "no file has it": {},
}


def assert_equal(directory):
    theirs = AutoTokenizer.from_pretrained(directory)
    ids = theirs(TEXT)["input_ids"]
    loaded, encoded, kept, skipped, chat = ask(
        {"op": "load", "name": "t", "path": str(directory)},
        {"op": "encode", "name": "t", "text": TEXT, "add_special_tokens": True},
        {"op": "decode", "name": "t", "ids": ids, "skip_special_tokens": False},
        {"op": "decode", "name": "t", "ids": ids},
        {"op": "chat", "path": str(directory), "messages": [{"role": "user", "content": ""}]},
    )
    assert loaded["vocab_size"] == len(theirs)
    assert encoded["ids"] == ids
    assert kept["text"] == theirs.decode(ids)
    assert skipped["text"] == theirs.decode(ids, skip_special_tokens=True)
    assert chat["text"] == theirs.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_other_files(plain, tmp_path, case):
    assert_equal(write(plain, tmp_path / "model", CASES[case]))


@pytest.mark.parametrize("case", CASES)
def test_flags_over_a_plain_token(plain, tmp_path, case):
    assert_equal(write(plain, tmp_path / "model", CASES[case], plain_ids=(1, 2)))


@pytest.mark.parametrize("case", LACKING)
def test_tokens_that_tokenizer_json_lacks(plain, tmp_path, case):
    assert_equal(write(plain, tmp_path / "model", LACKING[case], lacks=("<|im_start|>",)))


CLASSES = [
    "",
    "PreTrainedTokenizerFast",
    "LlamaTokenizerFast",
    "LlamaTokenizer",
    "CodeLlamaTokenizer",
    "Qwen2Tokenizer",
    "Qwen3_5Tokenizer",
    "GPT2TokenizerFast",
    "GPTNeoXTokenizerFast",
    "GemmaTokenizer",
    "CohereTokenizerFast",
    "NoSuchTokenizer",
]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_defaults_of_the_classes(plain, tmp_path, model_type):
    """A null in the file is no token. An absent key is the class's default."""
    for index, name in enumerate(CLASSES):
        for keys in ({}, {"eos_token": None, "unk_token": "<|im_end|>"}):
            directory = write(
                plain, tmp_path / f"{index}{len(keys)}", {"config.json": {"model_type": model_type}}
            )
            config = ({"tokenizer_class": name} if name else {}) | keys
            (directory / CONFIG).write_text(json.dumps(config))
            named = AutoTokenizer.from_pretrained(directory).special_tokens_map
            expected = "|".join(named.get(f"{kind}_token", "") for kind in NAMES)
            messages = [{"role": "user", "content": ""}]
            (answer,) = ask({"op": "chat", "path": str(directory), "messages": messages})
            assert answer["text"] == expected, (name, keys)


REFUSED = {
    "another id": (
        {CONFIG: {DECODER: {"500": token("<mark>")}}},
        [CONFIG, DECODER, "<mark>", "500", "expected 267"],
    ),
    "two ids": (
        {CONFIG: {DECODER: {"3": token("<|im_start|>")}}},
        [CONFIG, "<|im_start|>", "id 3", "tokenizer.json"],
    ),
    "no token": ({CONFIG: {"eos_token": 5}}, [CONFIG, "eos_token", "'5'"]),
    "no id": ({CONFIG: {DECODER: {"x": token("<mark>")}}}, [CONFIG, DECODER, "'x'"]),
    "no flag": ({MAP: {"eos_token": token("<mark>", lstrip=1)}}, [MAP, "eos_token", "lstrip"]),
    "an id that is no number": ({ADDED: {"<mark>": "267"}}, [ADDED, "<mark>", "267"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_files_are_refused(plain, tmp_path, case):
    files, words = REFUSED[case]
    directory = write(plain, tmp_path / "model", files)
    (answer,) = ask({"op": "load", "name": "t", "path": str(directory)})
    for word in words:
        assert word in answer["error"], answer

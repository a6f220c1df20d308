"""Our tokenizer against `tokenizers`, on files that `tokenizers` writes: ten families, and random ones."""

import functools
import json
import os
import random
import subprocess
import unicodedata
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = Path(os.environ.get("BOUGH_BUILD_DIR", REPOSITORY / "build")) / "bin" / "tokenizer_tool"

NUM_STRINGS = 10_000
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def ask(*requests):
    """Returns the tool's answers, one for each request."""
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run([TOOL], input=lines, capture_output=True, text=True, check=True, encoding="utf-8")
    answers = [json.loads(line) for line in done.stdout.split("\n") if line]
    assert len(answers) == len(requests)
    return answers


# -- texts ---------------------------------------------------------------------------------------------

ASSIGNED = [c for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
# Assigned after Unicode 14, known to `tokenizers`: letters, digits, marks and symbols of versions 15 and 16.
NEWER = [*range(0x105C0, 0x105F4), *range(0x10D40, 0x10D50), 0x10D69, 0x10EFD, 0x897, *range(0x1C89, 0x1C8B),
         *range(0x1E4D0, 0x1E4FA), 0x11F41, 0x11F42, *range(0x1FAF7, 0x1FAF9), *range(0x2EBF0, 0x2EC00), 0x1171E]  # fmt: skip
ODD = "\u180e\u0085\u00a0\u200b\u200d\u2028\u3000\ufeff\x1c\x00\ufb01\u017f\u212a\u0130\u00df\u0149\u1e9e"
MARKS = [c for c in ASSIGNED if unicodedata.category(chr(c)) in ("Mn", "Mc", "Me")]
WORDS = (
    "the quick brown fox jumps over lazy dogs don't we'll I'M it's you'D THEY'VE naïve Straße piña".split()
)
# Texts that Metaspace, byte tokens and added tokens could handle wrongly.
MARKED = ["▁", " ▁", "▁ ", "<s>", "</s>", "<unk>", "<0x41>", "<0xE2>", "<0xC3><0xA9>", "[INST]", "[/INST] ", "<|user|>\n",
          "<|end|>", "<tag>", "\n\n", "    ", "of the ", "x", "antidisestablishmentarianism"]  # fmt: skip
CODE = [
    "def f(x):\n    return x**2",
    "for (int i = 0; i < n; ++i) {",
    "\t\tif x:\r\n\t\t\tpass\r\n",
    "a[i]->b != c;",
]


def pieces(rng):
    """One random piece of text of a random kind."""
    kind = rng.randrange(14)
    if kind == 0:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 8)))
    if kind == 1:
        return rng.choice(CODE)
    if kind == 2:
        return str(rng.randrange(10 ** rng.randint(1, 12))) + rng.choice(["", ".5", "%", "٣٤", "Ⅷ", "½"])
    if kind == 3:
        return "".join(
            rng.choices([" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\n\n"], k=rng.randint(1, 6))
        )
    if kind == 4:
        return "".join(chr(rng.randint(0x4E00, 0x9FA5)) for _ in range(rng.randint(1, 8)))
    if kind == 5:
        return rng.choice(["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪", "❤️", "☺", "🫠"])
    if kind == 6:
        return rng.choice("aeionuAEGJk") + "".join(chr(rng.choice(MARKS)) for _ in range(rng.randint(1, 4)))
    if kind == 7:
        return "".join(chr(rng.choice(ASSIGNED)) for _ in range(rng.randint(1, 6)))
    if kind == 8:
        return rng.choice(
            SPECIAL + ["<tool>", " word", "word", "strip", "<|im_", "|>", "café", "cafe\u0301", "swordword"]
        )
    if kind == 9:
        return "".join(chr(rng.randint(0x20, 0x7E)) for _ in range(rng.randint(1, 10)))
    if kind == 10:
        return "".join(chr(rng.choice(NEWER)) for _ in range(rng.randint(1, 3)))
    if kind == 13:
        return rng.choice(MARKED) * rng.choice([1, 1, 1, 2, 40])
    if kind == 11:
        return (
            "'"
            + rng.choice(["s", "S", "t", "re", "LL", "ve", "m", "D", "ſ", "x"])
            + rng.choice(["", " ", "a"])
        )
    return rng.choice(ODD)


@functools.cache
def texts(seed, count):
    rng = random.Random(seed)
    return ["", " ", "\n"] + [
        rng.choice(["", " "]).join(pieces(rng) for _ in range(rng.randint(1, 9))) for _ in range(count - 3)
    ]


# -- tokenizers ----------------------------------------------------------------------------------------


def trained(pre_tokenizer, vocab_size, normalizer=None, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(7, 4000), trainer)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def byte_level(use_regex=False, add_prefix_space=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)


def split_by(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def qwen2():
    tokenizer = trained(pre_tokenizers.Sequence([split_by(QWEN2), byte_level()]), 3000, normalizers.NFC())
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False, special=False)])
    return tokenizer


def llama3():
    tokenizer = trained(pre_tokenizers.Sequence([split_by(LLAMA3), byte_level()]), 4000)
    tokenizer.model.ignore_merges = True
    bos = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
    template = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[bos])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


@functools.cache
def gpt2_file():
    return trained(byte_level(use_regex=True), 2000).to_str()


def gpt2():
    return Tokenizer.from_str(gpt2_file())


def gpt2_prefix_space():
    tokenizer = trained(byte_level(use_regex=True, add_prefix_space=True), 2000)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")],
    )
    return tokenizer


def flags():
    """Added tokens with every flag, found before and after normalization."""
    tokenizer = trained(pre_tokenizers.Sequence([split_by(QWEN2), byte_level()]), 2500, normalizers.NFC())
    tokenizer.add_tokens(
        [
            AddedToken("word", single_word=True, normalized=False),
            AddedToken("strip", lstrip=True, rstrip=True, normalized=False),
            AddedToken("fox", lstrip=True, normalized=True),
            AddedToken("cafe\u0301", normalized=True),
            AddedToken("dogs", rstrip=True, normalized=True, single_word=True),
            AddedToken("the quick", normalized=True),
            AddedToken("é", normalized=False),
        ]
    )
    return tokenizer


def several_splits():
    steps = [split_by(r"'(?i:[sdmt]|ll|ve|re)"), split_by(r"\p{N}{1,3}")]
    steps += [split_by(r"[一-龥぀-ゟ゠-ヿ]+"), pre_tokenizers.Digits(individual_digits=True)]
    steps += [
        pre_tokenizers.Split("->", "merged_with_previous"),
        split_by(r"[\p{P}\p{S}]+", "merged_with_next"),
    ]
    return trained(pre_tokenizers.Sequence([*steps, byte_level(use_regex=True)]), 2500)


def removing_splits():
    steps = [split_by(r"\s+", "removed"), split_by(r"\p{L}+|x*", "contiguous", invert=True)]
    steps += [split_by(r"\p{Lu}", "merged_with_next"), pre_tokenizers.Digits(individual_digits=False)]
    return trained(pre_tokenizers.Sequence([*steps, byte_level()]), 2500)


def deepseek():
    words = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    words += r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    steps = [split_by(r"\p{N}{1,3}"), split_by(r"[一-龥぀-ゟ゠-ヿ]+"), split_by(words), byte_level()]
    tokenizer = trained(pre_tokenizers.Sequence(steps), 2500)
    tokenizer.add_tokens([AddedToken("<tag>", normalized=True, special=False)])
    return tokenizer


def without_bytes(missing, **model):
    """A byte-level tokenizer without tokens for some bytes, and with other model settings."""
    steps = [pre_tokenizers.Digits(individual_digits=True), byte_level(use_regex=True)]
    content = json.loads(trained(pre_tokenizers.Sequence(steps), 2000).to_str())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    gone = set(random.Random(3).sample(alphabet, missing)) | {"Ð", "Ø"}  # bytes of Cyrillic and Arabic
    kept = [token for token in content["model"]["vocab"] if not gone & set(token)]
    content["model"] |= {
        "vocab": {token: i for i, token in enumerate(kept)},
        "merges": [pair for pair in content["model"]["merges"] if not gone & set("".join(pair))],
        **model,
    }
    for i, token in enumerate(content["added_tokens"]):
        token["id"] = kept.index(token["content"]) if token["content"] in kept else len(kept) + i
    return Tokenizer.from_str(json.dumps(content))


def smollm2():
    """Text whose bytes have no token is lost."""
    return without_bytes(19)


def gguf():
    """The form that GGUF converters write: byte_fallback without any <0xNN> token."""
    tokenizer = without_bytes(60, byte_fallback=True)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary["<|unknown|>"] = len(vocabulary)
    content["model"]["unk_token"] = "<|unknown|>"
    for token in content["added_tokens"]:
        token["id"] += 1
    return Tokenizer.from_str(json.dumps(content))


BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


@functools.cache
def sentencepiece_model(across):
    """Vocabulary and merges as SentencePiece trains them. `across`: merges may cross spaces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    words = r"[^\n]{1,30}|\n" if across else r"▁+[^▁\n]*|[^▁\n]+|\n"
    tokenizer.pre_tokenizer = split_by(words)
    lines = [*texts(7, 2500)]
    for name in ("heapq.py", "textwrap.py", "string.py", "shutil.py", "abc.py"):
        lines += (Path(os.__file__).parent / name).read_text().splitlines(keepends=True)
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        limit_alphabet=300,
        special_tokens=["<unk>", "<s>", "</s>", *BYTE_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator([" " + line for line in lines], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


LEGACY = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
TO_TEXT = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def sentencepiece(across=False, normalizer=None, pre_tokenizer=None, strips=True, bos=True, **model):
    vocabulary, merges = sentencepiece_model(across)
    model = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True} | model
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, **model))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Sequence(TO_TEXT + [decoders.Strip(" ", 1, 0)] * strips)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


def llama2():
    """A space is put before every stretch between added tokens. </s> is found only after a space."""
    tokenizer = sentencepiece(normalizer=normalizers.Sequence(LEGACY))
    tokenizer.add_special_tokens([AddedToken("</s>", normalized=True)])
    return tokenizer


def mistral():
    """A space is put only at the true beginning of the text."""
    tokenizer = sentencepiece(
        pre_tokenizer=pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("[INST]", "[/INST]")])
    return tokenizer


def gemma():
    """No space in front, merges that cross spaces, and added tokens that are ordinary text."""
    tokenizer = sentencepiece(
        across=True,
        normalizer=normalizers.Replace(" ", "▁"),
        pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
        strips=False,
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("\n\n", "<tag>", "▁▁▁▁")])
    return tokenizer


def phi3():
    """Like Llama 2, with added tokens that include the white space after them. There is no BOS."""
    tokenizer = sentencepiece(normalizer=normalizers.Sequence(LEGACY), bos=False)
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, rstrip=True) for t in ("<|user|>", "<|end|>", "</s>")]
    )
    return tokenizer


def spaces():
    """Words without the white space around them, and the Strip normalizer."""
    steps = [pre_tokenizers.WhitespaceSplit(), byte_level()]
    return trained(pre_tokenizers.Sequence(steps), 1500, normalizers.Strip())


def merges_as_text(tokenizer):
    """The older form of the file: merges "a b"."""
    content = json.loads(tokenizer.to_str())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    return content


FAMILIES = [gpt2, qwen2, llama3, smollm2, gguf, llama2, mistral, gemma, phi3, deepseek]
VARIANTS = [gpt2_prefix_space, flags, several_splits, removing_splits]


@pytest.mark.parametrize("make", FAMILIES + VARIANTS, ids=lambda make: make.__name__)
def test_ids_and_texts_equal(make, tmp_path):
    theirs = make()
    file = tmp_path / "tokenizer.json"
    if make is gpt2:
        file.write_text(json.dumps(merges_as_text(theirs)))
    else:
        theirs.save(str(file))
    check_equal(theirs, file, texts(11, NUM_STRINGS if make in FAMILIES else NUM_STRINGS // 8))


def check_equal(theirs, file, inputs):
    """Compares ids with and without special tokens, and the texts of these ids, of truncated and random
    ids."""
    rng = random.Random(13)
    size = theirs.get_vocab_size()
    count = min(1000, len(inputs))
    noise = [[rng.randrange(size + 5) for _ in range(rng.randint(0, 12))] for _ in range(count)]
    byte_ids = [theirs.token_to_id(token) for token in (*BYTE_TOKENS[0xB0:0xF5], "▁", "<s>")]
    byte_ids = [i for i in byte_ids if i is not None]
    if len(byte_ids) > 2:  # runs of bytes, most of them invalid UTF-8
        noise += [rng.choices(byte_ids, k=rng.randint(1, 8)) for _ in range(count)]
    requests, expected = [{"op": "load", "name": "t", "path": str(file)}], [{"vocab_size": size}]
    for special in (False, True):
        requests += [{"op": "encode", "name": "t", "text": t, "add_special_tokens": special} for t in inputs]
        ids = [e.ids for e in theirs.encode_batch(inputs, add_special_tokens=special)]
        expected += [{"ids": i} for i in ids]
    ids = ids[: len(ids) // 2] + [i[rng.randrange(9) :] for i in ids[::4]] + noise
    for skip in (False, True):
        requests += [{"op": "decode", "name": "t", "ids": i, "skip_special_tokens": skip} for i in ids]
        decoded = theirs.decode_batch(ids, skip_special_tokens=skip)
        expected += [{"text": text, "streamed": text} for text in decoded]
    wrong = [a for a in zip(requests, ask(*requests), expected, strict=True) if a[1] != a[2]]
    assert not wrong, f"{len(wrong)} of {len(requests)}, the first: {wrong[0]}"


def random_parts(rng):
    """A normalizer, pre-tokenizer, decoder and model options of tokenizer.json in unusual combinations."""
    mark = rng.choice(["▁", "▁", "_", "é"])
    metaspace = {
        "type": "Metaspace",
        "replacement": mark,
        "prepend_scheme": rng.choice(["first", "always", "never"]),
    }
    normalizer_parts = [
        {"type": "NFC"},
        {"type": "Prepend", "prepend": rng.choice(["▁", "a b", " "])},
        {"type": "Replace", "pattern": {"String": rng.choice([" ", "the", "é"])}, "content": mark},
        {"type": "Replace", "pattern": {"Regex": rng.choice([r" {2,}", r"\p{Lu}+", r"[\n\t ]+"])}, "content": " "},
        {"type": "Replace", "pattern": {"String": rng.choice(["a", "  ", "▁"])}, "content": ""},
        {"type": "Strip", "strip_left": rng.random() < 0.5, "strip_right": rng.random() < 0.5},
    ]  # fmt: skip
    behavior = rng.choice(["Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"])
    cutters = [
        {"type": "ByteLevel", "add_prefix_space": rng.random() < 0.5, "trim_offsets": False, "use_regex": rng.random() < 0.5},
        metaspace | {"split": rng.random() < 0.5},
        {"type": "Digits", "individual_digits": rng.random() < 0.5},
        {"type": "WhitespaceSplit"},
        {"type": "Split", "pattern": {"String": rng.choice([" ", mark, "e"])}, "behavior": behavior, "invert": False},
        {"type": "Split", "pattern": {"Regex": rng.choice([r"\s+", r"\p{L}+", r"."]).replace(".", "[^a]")},
         "behavior": behavior, "invert": rng.random() < 0.5},
    ]  # fmt: skip
    steps = [
        metaspace,
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": rng.choice([" ", mark]), "start": rng.randint(0, 2), "stop": 0},
        {"type": "Replace", "pattern": {"String": rng.choice([mark, "the", "\ufffd"])}, "content": rng.choice([" ", ""])},
        {"type": "Replace", "pattern": {"Regex": r"\p{N}+| \p{L}"}, "content": "#"},
    ]  # fmt: skip
    some = lambda kind, key, parts: {"type": "Sequence", key: rng.choices(parts, k=rng.randint(1, 3))}  # noqa: E731
    return {
        "normalizer": rng.choice([None, some("normalizer", "normalizers", normalizer_parts)]),
        "pre_tokenizer": rng.choice([None, *[some("pre_tokenizer", "pretokenizers", cutters)] * 3]),
        "decoder": some("decoder", "decoders", steps),
    }


@pytest.mark.parametrize("seed", range(4))
def test_random_combinations(seed, tmp_path):
    rng = random.Random(seed)
    vocabulary, merges = sentencepiece_model(seed % 2 == 1)
    byte_level_model = json.loads(gpt2_file())["model"]
    for round in range(8):
        content = json.loads(sentencepiece().to_str()) | random_parts(rng)
        model = content["model"]
        if "ByteLevel" in json.dumps(content["pre_tokenizer"]):
            model |= {key: byte_level_model[key] for key in ("vocab", "merges")}
            model["vocab"] = dict(model["vocab"])
            for token in ("<unk>", "<s>", "</s>", *rng.sample(BYTE_TOKENS, 200)):
                model["vocab"][token] = len(model["vocab"])
        else:
            model["vocab"], model["merges"] = dict(vocabulary), [*merges]
        used = set().union(*map(set, model["merges"])) | {"".join(pair) for pair in model["merges"]}
        gone = [t for t in model["vocab"] if t not in used and len(t) in (1, 6) and rng.random() < 0.2]
        kept = [token for token in model["vocab"] if token not in gone]
        model["vocab"] = {token: i for i, token in enumerate(kept)}
        model["byte_fallback"] = rng.random() < 0.7
        model["fuse_unk"] = rng.random() < 0.5
        model["unk_token"] = rng.choice(["<unk>", None])
        model["ignore_merges"] = rng.random() < 0.3
        content["post_processor"] = None
        added = [
            AddedToken(t, normalized=rng.random() < 0.5, lstrip=rng.random() < 0.2, rstrip=rng.random() < 0.2)
            for t in ("<s>", "the", "cafe\u0301", "word", "[INST]")
        ]
        content["added_tokens"] = []
        theirs = Tokenizer.from_str(json.dumps(content))
        theirs.add_tokens(added[1:])
        theirs.add_special_tokens(added[:1])
        file = tmp_path / f"{round}.json"
        theirs.save(str(file))
        check_equal(theirs, file, texts(100 * seed + round, 150))


@pytest.mark.parametrize("make", [qwen2, smollm2, spaces], ids=lambda make: make.__name__)
def test_every_code_point(make, tmp_path):
    """Each code point alone and between letters, where its class and normal form matter."""
    theirs = make()
    theirs.save(str(tmp_path / "tokenizer.json"))
    # Planes 0, 1 and 14, and a sample of the ideographs in planes 2 and 3. The other planes hold nothing.
    code_points = [
        *range(0xD800),
        *range(0xE000, 0x20000),
        *range(0x20000, 0x40000, 37),
        *range(0xE0000, 0xE0200),
    ]
    # A line break separates neighbours, so one text can hold many cases.
    inputs = []
    for begin in range(0, len(code_points), 500):
        chars = [chr(c) for c in code_points[begin : begin + 500]]
        inputs.append("".join(f"a{c}1 {c}\u0301b\u0334{c} \n" for c in chars))
    requests = [{"op": "encode", "name": "t", "text": t} for t in inputs]
    answers = ask({"op": "load", "name": "t", "path": str(tmp_path)}, *requests)[1:]
    for text, answer in zip(inputs, answers, strict=True):
        assert answer["ids"] == theirs.encode(text, add_special_tokens=False).ids, hex(ord(text[1]))


@pytest.mark.parametrize("make", [qwen2, gemma], ids=lambda make: make.__name__)
def test_a_megabyte_of_one_word(make, tmp_path):
    theirs = make()
    theirs.save(str(tmp_path / "tokenizer.json"))
    inputs = [text * 1_000_000 for text in ("a", " ")]
    inputs += [text * 100_000 for text in ("\n", "1", "é", "字", "ab", "a ", "  \n")]
    requests = [{"op": "encode", "name": "t", "text": text} for text in inputs]
    answers = ask({"op": "load", "name": "t", "path": str(tmp_path)}, *requests)[1:]
    for text, answer in zip(inputs, answers, strict=True):
        assert answer["ids"] == theirs.encode(text, add_special_tokens=False).ids, text[:9]


@pytest.mark.parametrize(
    ("part", "value", "named"),
    [
        ("model", models.WordPiece({"a": 0}, unk_token="a"), "WordPiece"),
        ("model", models.Unigram([("a", 0.0)]), "Unigram"),
        ("model", models.WordLevel({"a": 0}, "a"), "WordLevel"),
        ("normalizer", normalizers.Lowercase(), "Lowercase"),
        ("normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()]), "NFKC"),
        ("pre_tokenizer", pre_tokenizers.Whitespace(), "Whitespace"),
        (
            "pre_tokenizer",
            pre_tokenizers.Sequence([byte_level(), pre_tokenizers.Punctuation()]),
            "Punctuation",
        ),
        ("pre_tokenizer", pre_tokenizers.Sequence([split_by(r"\w+"), byte_level()]), "the escape"),
        ("pre_tokenizer", pre_tokenizers.Sequence([split_by(r"\p{Han}+"), byte_level()]), "Han"),
        ("pre_tokenizer", pre_tokenizers.Sequence([split_by(r"^a"), byte_level()]), "anchor"),
        ("pre_tokenizer", pre_tokenizers.Sequence([split_by(r"(?<=a)b"), byte_level()]), "a group"),
        ("pre_tokenizer", pre_tokenizers.Sequence([split_by(r"[a-z&&[^b]]"), byte_level()]), "intersection"),
        ("decoder", decoders.WordPiece(), "WordPiece"),
        ("post_processor", processors.BertProcessing(("a", 0), ("b", 1)), "BertProcessing"),
    ],
)
def test_unsupported_parts_are_refused_by_name(part, value, named, tmp_path):
    tokenizer = gpt2()
    setattr(tokenizer, part, value)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (answer,) = ask({"op": "load", "name": "t", "path": str(tmp_path)})
    assert named in answer["error"] and "tokenizer.json" in answer["error"]

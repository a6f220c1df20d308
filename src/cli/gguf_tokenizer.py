"""Converts a GGUF file's vocabulary to tokenizer.json, tokenizer_config.json and the token ids of the
configs.

`tokenizer.ggml.model` names the kind:

  gpt2    byte-level BPE. The file has tokens, token types and merges. It only names the pre-tokenizer
          (tokenizer.ggml.pre); PRE_TOKENIZERS has its steps.
  llama   SentencePiece BPE. Merges follow from the scores. Bytes without a token become <0xNN>.

The script refuses other kinds, and pre-tokenizers missing from PRE_TOKENIZERS: wrong words give wrong ids.
docs/import.md lists the differences from transformers' own conversion."""

from typing import NamedTuple

from gguf_container import FLAG, LIST, TEXT, WHOLE, Refused, compact, damaged, quoted

TOKENS, TYPES, SCORES, MERGES, PRE = (
    f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges", "pre")
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # values of token_type
SPACE = "\u2581"  # SentencePiece's spelling of a space

# The expressions of the original tokenizer.json files.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
) + SPACES
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS = {"type": "Digits", "individual_digits": True}


class PreTokenizer(NamedTuple):
    """The steps that cut text into words before byte-level BPE."""

    splits: tuple = ()  # expressions whose matches stand alone, or DIGITS
    gpt2: bool = False  # ByteLevel cuts by the GPT-2 expression too
    nfc: bool = False  # the normalizer
    ignore_merges: bool = False  # a word that is a token becomes that token, regardless of the merges
    add_bos: bool = False  # used if the file does not specify it


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(gpt2=True),
    "smollm": PreTokenizer((DIGITS,), gpt2=True),
    "starcoder": PreTokenizer((DIGITS,), gpt2=True),
    "refact": PreTokenizer((DIGITS,), gpt2=True),
    "qwen2": PreTokenizer((QWEN2,), nfc=True),
    "llama-bpe": PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True),
    "llama-v3": PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True),
    "llama3": PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGITS)),
    # llama.cpp's choice for a model with an unknown pre-tokenizer.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def byte_level(prefix_space, trim_offsets, use_regex):
    return {
        "type": "ByteLevel",
        "add_prefix_space": prefix_space,
        "trim_offsets": trim_offsets,
        "use_regex": use_regex,
    }


class Vocabulary:
    """The file's tokens, checked."""

    def __init__(self, file):
        self.file = file
        self.tokens = tokens = file.get(TOKENS, LIST)
        self.types = file.get(TYPES, LIST, [NORMAL] * len(tokens))
        self.ids = {}  # by spelling, without the fillers for embedding rows that have no token
        if len(self.types) != len(tokens):
            raise damaged(
                f"metadata '{TYPES}': got {len(self.types)} types; expected {len(tokens)}, one per token"
            )
        for token, kind in enumerate(self.types):
            if type(kind) is not int or not NORMAL <= kind <= BYTE:
                raise damaged(
                    f"metadata '{TYPES}': got {quoted(compact(kind))} for token {token}; expected a number "
                    "from 1 to 6"
                )
        if not tokens:
            raise damaged(f"metadata '{TOKENS}': got no token; expected a vocabulary")
        for token, name in enumerate(tokens):
            if not isinstance(name, str):
                raise damaged(
                    f"metadata '{TOKENS}': got {quoted(compact(name))} for token {token}; expected a text"
                )
            # llama.cpp's converter names embedding rows beyond the vocabulary [PAD151936] and so on.
            if self.types[token] == UNUSED and name == f"[PAD{token}]":
                continue
            if self.ids.setdefault(name, token) != token:
                raise Refused(
                    f"metadata '{TOKENS}': got the token {quoted(name)} twice (ids {self.ids[name]} and "
                    f"{token}); expected each token once: tokenizer.json cannot store this vocabulary"
                )

    def special(self, name):
        """A special token's id; None if the file names none."""
        key = f"tokenizer.ggml.{name}_token_id"
        token = self.file.get(key, WHOLE, None)
        if token is not None and (token >= len(self.tokens) or self.tokens[token] not in self.ids):
            raise Refused(
                f"metadata {quoted(key)}: got {token}; expected the id of one of the {len(self.tokens)} "
                "tokens"
            )
        return token

    def special_text(self, name):
        token = self.special(name)
        return None if token is None else self.tokens[token]

    def added_tokens(self):
        """Tokens that are matched in raw text first: control tokens and <unk>, which are special, and
        user-defined tokens, which are not special."""
        added = []
        for token, kind in enumerate(self.types):
            if kind not in (CONTROL, UNKNOWN, USER_DEFINED):
                continue
            if not self.tokens[token]:
                raise Refused(
                    f"metadata '{TOKENS}': got an empty text for the special token {token}; expected its "
                    "spelling"
                )
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            flags["special"] = kind != USER_DEFINED
            added.append({"id": token, "content": self.tokens[token], **flags})
        return added

    def merges(self):
        """The file's merges, "left right" each."""
        merges = []
        for rank, merge in enumerate(self.file.get(MERGES, LIST)):
            text = merge if isinstance(merge, str) else ""
            space = text.find(" ", 1)
            left, right = (text[:space], text[space + 1 :]) if space > 0 else ("", "")
            if not left or not right or any(part not in self.ids for part in (left, right, left + right)):
                raise Refused(
                    f"metadata '{MERGES}': got {quoted(compact(merge))} for merge {rank}; expected two "
                    "tokens with a space between them, which together are a third token"
                )
            merges.append([left, right])
        return merges

    def merges_by_score(self):
        """The merges of a SentencePiece vocabulary: every way to make a normal or user-defined token of two
        others.

        The best score comes first. Equal scores keep the order of the vocabulary, and merges of one token are
        ordered by the scores of left and right, as in transformers' converter."""
        scores = self.file.get(SCORES, LIST)
        if len(scores) != len(self.tokens):
            raise damaged(
                f"metadata '{SCORES}': got {len(scores)} scores; expected {len(self.tokens)}, one per token"
            )
        for score in scores:
            if type(score) not in (int, float) or score != score:
                raise damaged(f"metadata '{SCORES}': got {quoted(compact(score))}; expected a number")
        merges = []
        for token, name in enumerate(self.tokens):
            if self.types[token] not in (NORMAL, USER_DEFINED) or name not in self.ids:
                continue
            pairs = ((self.ids.get(name[:cut]), self.ids.get(name[cut:])) for cut in range(1, len(name)))
            pairs = [pair for pair in pairs if None not in pair]
            pairs.sort(key=lambda pair: (scores[pair[0]], scores[pair[1]]), reverse=True)
            merges += [(scores[token], *pair) for pair in pairs]
        merges.sort(key=lambda merge: merge[0], reverse=True)
        return [[self.tokens[left], self.tokens[right]] for _, left, right in merges]

    def model(self, merges, **more):
        empty = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
        off = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
        return {"type": "BPE", **empty, **off, "vocab": self.ids, "merges": merges, **more}


def byte_level_parts(vocabulary, asked):
    """Parts of tokenizer.json for byte-level BPE, whether a BOS is added by default, and a description."""
    name = asked or vocabulary.file.get(PRE, TEXT, "")
    if name not in PRE_TOKENIZERS:
        where = "--pre" if asked else f"metadata '{PRE}'"
        raise Refused(
            f"{where}: got {quoted(name) if name else 'nothing'}; expected one of "
            f"{', '.join(PRE_TOKENIZERS)}: they say how text is cut into words. If the model's tokenizer "
            "cuts text as one of these does, name it with --pre"
        )
    pre = PRE_TOKENIZERS[name]
    steps = [
        split if split is DIGITS
        else {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        for split in pre.splits
    ] + [byte_level(False, False, pre.gpt2)]  # fmt: skip
    parts = {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "decoder": byte_level(True, True, True),
        "model": vocabulary.model(vocabulary.merges(), ignore_merges=pre.ignore_merges),
    }
    return parts, pre.add_bos, f"gpt2/{name}"


def sentencepiece_parts(vocabulary):
    """As byte_level_parts(), for SentencePiece BPE: bytes without a token become <0xNN>."""
    file = vocabulary.file
    if file.get("tokenizer.ggml.remove_extra_whitespaces", FLAG, False):
        raise Refused(
            "metadata 'tokenizer.ggml.remove_extra_whitespaces': got true; expected false: a tokenizer that "
            "drops spaces is not supported"
        )
    if "tokenizer.ggml.precompiled_charsmap" in file.metadata:
        raise Refused(
            "metadata 'tokenizer.ggml.precompiled_charsmap': a tokenizer with a table of characters to "
            "replace is not supported; use the model's original directory"
        )
    prefix = file.get("tokenizer.ggml.add_space_prefix", FLAG, True)
    steps = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    undo = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        undo.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    merges = vocabulary.merges() if MERGES in file.metadata else vocabulary.merges_by_score()
    unknown = vocabulary.special_text("unknown")
    if unknown is None and UNKNOWN in vocabulary.types:
        unknown = vocabulary.tokens[vocabulary.types.index(UNKNOWN)]
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": undo},
        "model": vocabulary.model(merges, byte_fallback=True, fuse_unk=True, unk_token=unknown),
    }
    return parts, True, "llama (SentencePiece)"


def post_processor(vocabulary, add_bos):
    """Puts the BOS before and the EOS after each text, as the file says."""
    file = vocabulary.file
    before = file.get("tokenizer.ggml.add_bos_token", FLAG, add_bos)
    after = file.get("tokenizer.ggml.add_eos_token", FLAG, False)
    if not before and not after:
        return None
    special = {}

    def around(sequence, type_id):
        steps = [("bos", before), (sequence, True), ("eos", after)]
        return [part(name, type_id) for name, wanted in steps if wanted]

    def part(name, type_id):
        if name in ("A", "B"):
            return {"Sequence": {"id": name, "type_id": type_id}}
        text = vocabulary.special_text(name)
        if text is None:
            raise Refused(
                f"metadata 'tokenizer.ggml.{name}_token_id': got nothing; expected the token that "
                f"'tokenizer.ggml.add_{name}_token' puts around a text"
            )
        special[text] = {"id": text, "ids": [vocabulary.special(name)], "tokens": [text]}
        return {"SpecialToken": {"id": text, "type_id": type_id}}

    single, pair = around("A", 0), around("A", 0) + around("B", 1)
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


class Tokenizer(NamedTuple):
    tokenizer: dict  # tokenizer.json
    tokenizer_config: dict  # tokenizer_config.json
    special: dict[str, int | None]  # the ids of bos, eos and pad
    stops: list[int]  # the EOS and the other tokens that end an answer
    num_tokens: int
    description: str


def read_tokenizer(file, asked_pre):
    model = file.get("tokenizer.ggml.model", TEXT)
    if model not in ("gpt2", "llama"):
        raise Refused(
            f"metadata 'tokenizer.ggml.model': got a tokenizer of type {quoted(model)}; expected gpt2 "
            "(byte-level BPE) or llama (SentencePiece BPE): no other type is supported"
        )
    if model == "llama" and asked_pre:
        raise Refused(
            "--pre: got a pre-tokenizer for a SentencePiece vocabulary, which has none; leave it out"
        )
    vocabulary = Vocabulary(file)
    parts, add_bos, description = (
        byte_level_parts(vocabulary, asked_pre) if model == "gpt2" else sentencepiece_parts(vocabulary)
    )
    stops = [vocabulary.special(name) for name in ("eos", "eot", "eom")]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        "post_processor": post_processor(vocabulary, add_bos),
        **parts,
    }
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    config = {f"{name}_token": vocabulary.special_text(key) for name, key in names.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if "tokenizer.chat_template" in file.metadata:
        config["chat_template"] = file.get("tokenizer.chat_template", TEXT)
    special = {name: vocabulary.special(names[name]) for name in ("bos", "eos", "pad")}
    stops = list(dict.fromkeys(stop for stop in stops if stop is not None))
    return Tokenizer(tokenizer, config, special, stops, len(vocabulary.tokens), description)

"""Makes a tokenizer of byte pairs from tau2's text. Writes it and chat_template.jinja to a model's folder.

  python tau2_tokenizer.py --examples traces.jsonl --model MODEL

A pair never reaches over the end of a line or a comma, but over the end of a word. So a line of an answer, or
the name of a call, is few tokens. Instructions and tools of a conversation are the same for all tasks of a
domain and count as --prompts conversations.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TURN = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
PARTS_OF_LINES = pre_tokenizers.Split(Regex(r"[^\n,]*[\n,]|[^\n,]+"), "isolated")


def renderer(template: Path = TEMPLATE):
    """Returns a function that renders a conversation as transformers and Bough render it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    compiled = environment.from_string(template.read_text())

    def render(messages, tools, opens_turn=False):
        return compiled.render(messages=messages, tools=tools, add_generation_prompt=opens_turn)

    return render


def make_tokenizer(texts, vocab_size, split=PARTS_OF_LINES, words=False):
    """split: pairs stay within its pieces. words: and within words."""
    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def texts_of(examples, prompts):
    """The texts to learn from: `prompts` times what all prompts begin with, then what differs."""
    shared = os.path.commonprefix([example["prompt"] for example in examples])
    shared = shared[: shared.rindex("\n") + 1]
    texts = [shared] * prompts
    for example in examples:
        texts += [example["prompt"][len(shared) :], example["completion"]]
    # Special tokens are no text.
    return [
        part for text in texts for part in text.replace(END_OF_TURN, SPECIAL[1]).split(SPECIAL[1]) if part
    ]


def save(tokenizer, folder):
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / TEMPLATE.name).write_text(TEMPLATE.read_text())
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TURN}
    (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[END_OF_TURN]}))
    config = json.loads((folder / "config.json").read_text())
    if config["vocab_size"] < tokenizer.get_vocab_size():
        raise SystemExit(
            f"{folder}: the model has {config['vocab_size']} rows for {tokenizer.get_vocab_size()} tokens; "
            "make it with a larger --vocab-size"
        )
    config |= {"eos_token_id": ids[END_OF_TURN], "pad_token_id": ids[SPECIAL[0]]}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--examples", required=True, help="file of tau2_play.py traces --whole")
    parser.add_argument("--model", required=True, type=Path, help="folder of `bough init`")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=20)
    args = parser.parse_args()
    with open(args.examples) as file:
        examples = [json.loads(line) for line in file]
    tokenizer = make_tokenizer(texts_of(examples, args.prompts), args.vocab_size)
    save(tokenizer, args.model)
    mean = [
        round(sum(len(tokenizer.encode(example[key]).ids) for example in examples) / len(examples))
        for key in ("prompt", "completion")
    ]
    print(
        f"{tokenizer.get_vocab_size()} tokens; prompt {mean[0]}, turns and answers {mean[1]}", file=sys.stderr
    )


if __name__ == "__main__":
    main()

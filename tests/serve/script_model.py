"""A model that generates fixed scripts: each token has one successor. The weights are one-hot embeddings,
layers that add nothing, and an lm_head that is the table of successors. Tests therefore know the generated
tokens exactly.

The chat template ends a prompt with a token that begins one of the scripts:
  <|calls|>     if there are tools: reasoning, then a Hermes call, then a second call
  <|answer|>    if the last message is a tool's
  <|bytes|>     if the last message is "bytes": characters of which each token has one byte
  <|broken|>    if the last message is "broken": a call that cannot be read
  <|think|>     else: reasoning and an answer
"""

from pathlib import Path

CALLS = [
    "<thi", "nk>", "Two ", "tools", ".</th", "ink>", "\n\n", "<tool", "_call>", '\n{"name": "add", ',
    '"arguments"', ': {"a": 2, "b"', ": 40}", "}\n</tool_", "call>\n<tool_call>\n",
    '{"name": "look", "arguments": {"where"',
    ': "über"}}', "\n</tool_call>",
]  # fmt: skip
ANSWER = ["The ", "answer ", "is ", "42."]
BROKEN = ["Calling ", '<tool_call>{"name": ', "nonsense</tool_call>"]
THINK = ["<think", ">Hm, ", "well.</", "think>Hel", "lo, ", "world", "!"]
EMOJI = "😀é"  # all bytes differ

SCRIPTS = {"<|calls|>": CALLS, "<|answer|>": ANSWER, "<|broken|>": BROKEN, "<|think|>": THINK}

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ '(' + message.reasoning_content + ')' if message.reasoning_content }}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if messages[-1].role == 'tool' %}<|answer|>"
    "{% elif messages[-1].content == 'bytes' %}<|bytes|>"
    "{% elif messages[-1].content == 'broken' %}<|broken|>"
    "{% elif tools %}<|calls|>{% else %}<|think|>{% endif %}{% endif %}"
)


def write_script_model(directory: Path) -> None:
    import torch
    from tiny_models import write_byte_tokenizer
    from tokenizers import AddedToken
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    write_byte_tokenizer(directory, 270)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(
        [AddedToken(text, special=True) for text in [*SCRIPTS, "<|bytes|>"]], special_tokens=True
    )
    for script in SCRIPTS.values():
        # With "normalized" the tokenizer would find these tokens in normalized text. They never occur in a
        # prompt.
        added = tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in script])
        assert added == len(script), "each piece belongs to one script"
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)

    vocab = len(tokenizer)
    successor = {}
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    byte_ids = [tokenizer.backend_tokenizer.encode(EMOJI).ids]
    chains = [
        [tokenizer.convert_tokens_to_ids(start), *map(tokenizer.convert_tokens_to_ids, script), eos]
        for start, script in SCRIPTS.items()
    ] + [[tokenizer.convert_tokens_to_ids("<|bytes|>"), *byte_ids[0], eos]]
    for chain in chains:
        for token, following in zip(chain, chain[1:], strict=False):
            assert successor.setdefault(token, following) == following
    width = -(-vocab // 16) * 16
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab, width))
        head = torch.zeros(vocab, width)
        for token in range(vocab):
            head[successor.get(token, eos), token] = 60 / width**0.5
        model.lm_head.weight.copy_(head)
    model.save_pretrained(directory)


def text_of(script: list[str]) -> str:
    return "".join(script)

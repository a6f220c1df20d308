"""bough.plan: what a batch would gain from its prefix tree, without computing it. No torch is imported."""

from __future__ import annotations

import html
import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bough.runs import run_for_json


@dataclass(frozen=True)
class PlanReport:
    """The report of `bough plan`. data: its JSON (docs/formats.md): tokens, tree_tokens, compression,
    work_ratio (W), strategies with predicted_seconds and predicted_peak_bytes, chosen. print() shows the
    table, a notebook the picture of the plan, too."""

    data: dict[str, Any]
    text: str = field(repr=False)
    svg: str = field(repr=False)

    @property
    def headline(self) -> str:
        """The gain in one sentence."""
        auto, dense = (self.data["strategies"][name] for name in ("auto", "dense"))
        times = dense.get("predicted_seconds", 0.0) / auto["predicted_seconds"]
        return (
            f"A gradient step of this batch would be {times:.1f} times as fast with its prefix tree: "
            f"{self.data['tree_tokens']:,} of {self.data['tokens']:,} tokens are computed, the work is "
            f"{self.data['work_ratio']:.1f} times less."
        )

    def __str__(self) -> str:
        return f"{self.headline}\n\n{self.text}"

    def _repr_html_(self) -> str:
        return (
            f"<p><b>{html.escape(self.headline)}</b></p>{self.svg}"
            f"<details><summary>All strategies</summary><pre>{html.escape(self.text)}</pre></details>"
        )


def plan(
    rollouts: Any,
    *,
    model: Any = None,
    device: str = "cpu",
    dtype: str | None = None,
    memory: float | str | None = None,
    max_tokens_per_pass: int | None = None,
    tokenizer: Any = None,
) -> PlanReport:
    """Plans a batch as training would, and says what the tree saves.

    Args:
        rollouts: one of
            - a file: .jsonl or .jsonl.zst (docs/formats.md), or .parquet with the columns input_ids (and
              loss_mask) or prompt_ids and completion_ids;
            - a list of token ids: (prompt, response), {"input_ids": ..., "loss_mask": ...}, or lists of ids;
            - a list of texts, or of (prompt, response) texts, with `tokenizer`;
            - TRL's inputs, a mapping with prompt_ids, prompt_mask, completion_ids, completion_mask;
            - verl's DataProto, with input_ids, attention_mask and responses in its batch.
        model: a transformers model or config, a Hugging Face directory, or a shape: small, qwen3-0.6b,
            qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-14b. None: qwen3-0.6b.
        device: cpu (this machine, measured once), h100, h200 or a100.
        dtype: fp32 or bf16. None: fp32 on the CPU, else bf16.
        memory: bytes beyond weights and gradients, such as 40e9 or "40GiB". None: what the device has.
        max_tokens_per_pass: the most tokens that go through the model at once. None: by device.

    Raises:
        ValueError: rollouts are of none of these forms. The message says which item.
        ProgramError: the program refused them.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        file = _rollout_file(rollouts, tokenizer, folder)
        words = ["plan", "--rollouts", str(file), "--device", device, *_model_words(model, folder)]
        if dtype:
            words += ["--dtype", dtype]
        if memory:
            words += ["--memory", memory if isinstance(memory, str) else str(int(memory))]
        if max_tokens_per_pass:
            words += ["--max-tokens-per-mb", str(max_tokens_per_pass)]
        data = run_for_json([*words, "--json", "--svg", str(folder / "plan.svg")])
        return PlanReport(data, data.pop("text"), (folder / "plan.svg").read_text())


def _model_words(model: Any, folder: Path) -> list[str]:
    if model is None:
        return []
    if isinstance(model, (str, Path)):
        return ["--model", str(model)] if Path(model).is_dir() else ["--shape", str(model)]
    config = getattr(model, "config", model)
    if not hasattr(config, "to_json_string"):
        raise ValueError(
            f"model: got {type(model).__name__}, expected a model or config of transformers, or a name"
        )
    values = json.loads(config.to_json_string(use_diff=False))
    if config is not model:
        values["architectures"] = [type(getattr(model, "get_base_model", lambda: model)()).__name__]
    (folder / "config.json").write_text(json.dumps(values))
    return ["--model", str(folder)]


def _rollout_file(rollouts: Any, tokenizer: Any, folder: Path) -> Path:
    if isinstance(rollouts, (str, Path)):
        path = Path(rollouts)
        if path.suffix != ".parquet":
            return path
        import pyarrow.parquet

        rollouts = pyarrow.parquet.read_table(path).to_pylist()
    elif isinstance(rollouts, Mapping):
        rollouts = list(_from_trl(rollouts))
    elif hasattr(rollouts, "batch") and hasattr(rollouts, "non_tensor_batch"):
        rollouts = list(_from_verl(rollouts.batch))
    path = folder / "rollouts.jsonl"
    with path.open("w") as file:
        for index, rollout in enumerate(rollouts):
            ids, mask = _ids_and_mask(rollout, tokenizer, f"rollout {index}")
            line = {"group": "0", "input_ids": ids, "loss_mask": mask, "logprobs": [0.0] * len(ids)}
            file.write(json.dumps(line) + "\n")
    return path


def _list(values: Any) -> list[int]:
    """A tensor, an array or a list as a list."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _ids_and_mask(rollout: Any, tokenizer: Any, where: str) -> tuple[list[int], list[int]]:
    def ids_of(text: Any) -> list[int]:
        if not isinstance(text, str):
            return _list(text)
        if tokenizer is None:
            raise ValueError(f"{where}: got a text, expected token ids, or the argument `tokenizer`")
        encoded = tokenizer(text, add_special_tokens=False)
        return list(encoded["input_ids"])

    if isinstance(rollout, Mapping) and "input_ids" in rollout:
        ids = ids_of(rollout["input_ids"])
        return ids, _list(rollout["loss_mask"]) if "loss_mask" in rollout else _all_but_the_first(ids)
    if isinstance(rollout, Mapping):
        if not {"prompt_ids", "completion_ids"} <= rollout.keys():
            raise ValueError(
                f"{where}: got the keys {', '.join(map(str, rollout))}, expected input_ids, or prompt_ids "
                f"and "
                "completion_ids"
            )
        rollout = (rollout["prompt_ids"], rollout["completion_ids"])
    if isinstance(rollout, (tuple, list)) and len(rollout) == 2 and not isinstance(rollout[0], int):
        prompt, response = map(ids_of, rollout)
        return prompt + response, [0] * len(prompt) + [1] * len(response)
    if isinstance(rollout, (int, float)) or not (hasattr(rollout, "__iter__") or hasattr(rollout, "tolist")):
        raise ValueError(f"{where}: got {type(rollout).__name__}, expected token ids, a pair, or a mapping")
    ids = ids_of(rollout)
    return ids, _all_but_the_first(ids)


def _all_but_the_first(ids: list[int]) -> list[int]:
    return [int(i > 0) for i in range(len(ids))]


def _kept(ids: Any, mask: Any) -> list[int]:
    return [token for token, keep in zip(_list(ids), _list(mask), strict=True) if keep]


def _from_trl(inputs: Mapping[str, Any]) -> Iterable[Any]:
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    if missing := [name for name in names if name not in inputs]:
        raise ValueError(f"rollouts: got a mapping without {', '.join(missing)}, expected TRL's inputs")
    for row in zip(*(inputs[name] for name in names), strict=True):
        yield _kept(row[0], row[1]), _kept(row[2], row[3])


def _from_verl(batch: Any) -> Iterable[Any]:
    for name in ("input_ids", "attention_mask", "responses"):
        if name not in set(batch.keys()):
            raise ValueError(f"rollouts: got a DataProto whose batch has no {name}")
    length = len(_list(batch["responses"][0]))
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        yield _kept(ids[:-length], mask[:-length]), _kept(ids[-length:], mask[-length:])

"""Sequences in the forms that users have them, as the flat arrays that the engine reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bough.native import UserError


@dataclass
class Flat:
    """All sequences, one after another. tokens: int32 [N], lengths: int64 [S], trained: uint8 [N]; on the
    CPU."""

    tokens: Tensor
    lengths: Tensor
    trained: Tensor

    def row_sequences(self) -> Tensor:
        """The sequence of each loss row (trained token), int64 [R]."""
        of_token = torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)
        return of_token[self.trained.bool()]


def _vector(value: Any, where: str) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.tensor(list(value))
    if tensor.dim() != 1:
        raise UserError(
            f"{where}: got shape {tuple(tensor.shape)}, expected a list or tensor with one dimension"
        )
    if tensor.is_floating_point() and tensor.numel() > 0:
        raise UserError(f"{where}: got {tensor.dtype}, expected integers")
    return tensor.detach().cpu()


def flatten(sequences: Iterable[Any]) -> Flat:
    """Reads a list of sequences. Each is one of
    - a pair (prompt, response) of token ids: all tokens of the response are trained;
    - a mapping with input_ids and loss_mask (1: trained), as in a rollout file.
    Token ids are lists or integer tensors of one dimension. A sequence's first token cannot be trained.
    """
    tokens, trained, lengths = [], [], []
    for s, sequence in enumerate(sequences):
        where = f"sequence {s}"
        if isinstance(sequence, Mapping):
            for key in ("input_ids", "loss_mask"):
                if key not in sequence:
                    raise UserError(f"{where}: has no {key}; got the keys {', '.join(map(str, sequence))}")
            ids = _vector(sequence["input_ids"], f"{where}, input_ids")
            mask = _vector(sequence["loss_mask"], f"{where}, loss_mask")
            if len(mask) != len(ids):
                raise UserError(f"{where}: got {len(mask)} loss_mask values for {len(ids)} input_ids")
        elif isinstance(sequence, (tuple, list)) and len(sequence) == 2 and not isinstance(sequence[0], int):
            prompt, response = (_vector(part, where) for part in sequence)
            ids = torch.cat([prompt, response]) if len(prompt) else response
            mask = torch.zeros(len(ids), dtype=torch.uint8)
            mask[len(prompt) :] = 1
            if len(prompt) == 0 and len(mask):
                raise UserError(
                    f"{where}: its prompt is empty, so no token comes before its first trained token; "
                    "expected at least one token, such as BOS"
                )
        else:
            raise UserError(
                f"{where}: got {type(sequence).__name__}, expected (prompt, response), both token ids, or a "
                "mapping with input_ids and loss_mask"
            )
        if len(ids) and not -1 <= int(ids.min()) <= int(ids.max()) < 2**31:
            raise UserError(
                f"{where}: got token ids from {int(ids.min())} to {int(ids.max())}, expected 32 bits"
            )
        tokens.append(ids.to(torch.int32))
        trained.append((mask != 0).to(torch.uint8))
        lengths.append(len(ids))
    if not tokens:
        raise UserError("sequences: got none, expected at least one")
    return Flat(torch.cat(tokens), torch.tensor(lengths), torch.cat(trained))


def sequences_from_padded(
    input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor
) -> list[dict[str, Tensor]]:
    """Sequences from padded batches, padding on either side. All arguments: [S, T]. Rows of the result hold
    only the tokens whose attention_mask is not 0."""
    if not input_ids.shape == attention_mask.shape == loss_mask.shape or input_ids.dim() != 2:
        raise UserError(
            f"sequences_from_padded: got shapes {tuple(input_ids.shape)}, {tuple(attention_mask.shape)} and "
            f"{tuple(loss_mask.shape)}, expected three equal ones [S, T]"
        )
    ids, real, trained = (x.detach().cpu() for x in (input_ids, attention_mask.bool(), loss_mask))
    return [{"input_ids": ids[s, real[s]], "loss_mask": trained[s, real[s]]} for s in range(len(ids))]

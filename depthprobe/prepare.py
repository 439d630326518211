"""What every verb begins with: a model, a corpus for it, and the proof that its stream was found."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn

from depthprobe.checkpoint import Checkpoint, load
from depthprobe.corpus import DEFAULT_SEQ_LEN, Corpus, read
from depthprobe.errors import CheckpointError, CorpusError, VerificationError
from depthprobe.fingerprint import sampled
from depthprobe.processes import collected, count, together, told
from depthprobe.verify import Anatomy, open_stream

__all__ = ["prepare"]


def prepare(
    model: str | Path | nn.Module | Checkpoint,
    data: Any = None,
    *,
    tokens: int = 8192,
    seq_len: int | None = None,
    seed: int = 0,
    bos: Literal["auto", "always", "never"] = "auto",
    text_field: str = "text",
    usual_len: int = DEFAULT_SEQ_LEN,
    **loading: Any,
) -> tuple[Checkpoint, Corpus, Anatomy]:
    """Load the model, read the corpus for it, and verify the model's anatomy on the first sequences.

    Of several processes the first one reads the corpus for all.
    """
    checkpoint = together(lambda: load(model, **loading))
    if count() > 1:
        together(lambda: _check_same(checkpoint))

    def text() -> Corpus:
        if checkpoint.inputs == "states" and data is None:
            raise CorpusError(
                f"{checkpoint.name} takes float states, not token ids",
                "data of shape [sequences, tokens, width]",
                "pass a float array, or a .npy of it with --data",
            )
        found = read(
            data,
            checkpoint.tokenizer,
            tokens=tokens,
            seq_len=seq_len,
            max_positions=checkpoint.max_positions,
            vocab_size=checkpoint.vocab_size,
            bos=bos,
            text_field=text_field,
            seed=seed,
            usual_len=usual_len,
        )
        if found.is_states != (checkpoint.inputs == "states"):
            kinds = ("float states", "token ids")
            wants, got = kinds if checkpoint.inputs == "states" else kinds[::-1]
            raise CorpusError(f"the data holds {got}", f"{wants}, which {checkpoint.name} takes")
        return found

    corpus = told(text)
    dtype = checkpoint.dtype if corpus.is_states else torch.int64
    anatomy = together(lambda: open_stream(checkpoint, corpus.inputs[:4].to(checkpoint.device, dtype)))
    if count() > 1:
        together(lambda: _check_alike(anatomy))
    return checkpoint, corpus, anatomy


def _check_same(checkpoint: Checkpoint) -> None:
    """Whether all processes have opened the same weights, in the same way.

    Raises:
        CheckpointError: they have not.
    """
    if len(set(collected(sampled(checkpoint.model)))) > 1:
        raise CheckpointError(
            "the processes hold different weights", "the same checkpoint in each", "look at its copies on each machine"
        )
    mine = {"kind of device": checkpoint.device.type, "dtype": str(checkpoint.dtype), "torch": torch.__version__,
            "transformers": transformers.__version__, "depthprobe": metadata.version("depthprobe")}  # fmt: skip
    every = collected(mine)
    for name in mine:
        if len(found := {one[name] for one in every}) > 1:
            raise CheckpointError(
                f"the processes have {', '.join(sorted(found))} as their {name}", "the same in each",
                "give --device and --dtype, and the same environment on each machine",
            )  # fmt: skip


def _check_alike(anatomy: Anatomy) -> None:
    """Whether all processes found the same branches: rounding differs from machine to machine.

    Raises:
        VerificationError: they did not.
    """
    if any(blocks != anatomy.blocks for blocks in collected(anatomy.blocks)):
        raise VerificationError("the processes found different branches in the model", "the same in each",
                                "run it on machines of one kind, or with --dtype float32")  # fmt: skip

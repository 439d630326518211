"""What every verb begins with: a model, a corpus for it, and the proof that its stream was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from depthprobe.checkpoint import Checkpoint, load
from depthprobe.corpus import DEFAULT_SEQ_LEN, Corpus, read
from depthprobe.errors import CorpusError
from depthprobe.processes import together, told
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
    if checkpoint.inputs == "states" and data is None:
        raise CorpusError(
            f"{checkpoint.name} takes float states, not token ids",
            "data of shape [sequences, tokens, width]",
            "pass a float array, or a .npy of it with --data",
        )
    corpus = told(
        lambda: read(
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
    )
    if corpus.is_states != (checkpoint.inputs == "states"):
        wants, got = ("float states", "token ids") if checkpoint.inputs == "states" else ("token ids", "float states")
        raise CorpusError(f"the data holds {got}", f"{wants}, which {checkpoint.name} takes")
    dtype = checkpoint.dtype if corpus.is_states else torch.int64
    anatomy = together(lambda: open_stream(checkpoint, corpus.inputs[:4].to(checkpoint.device, dtype)))
    return checkpoint, corpus, anatomy

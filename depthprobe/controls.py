"""What a trained model on real text is held against: its randomly initialised twin, and random tokens."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import torch

from depthprobe.checkpoint import Checkpoint
from depthprobe.corpus import Corpus
from depthprobe.fresh import fresh_twin
from depthprobe.prepare import prepare
from depthprobe.probes.base import key_rng
from depthprobe.verify import Anatomy

__all__ = ["random_init", "random_tokens"]

_TOKENS = 1 << 27  # key of the random draws


def random_init(anatomy: Anatomy, corpus: Corpus, seed: int) -> Anatomy:
    """The verified twin with random weights, see `fresh_twin`.

    Raises:
        UsageError: nothing says how the model is initialised.
        CheckpointError, VerificationError: the twin cannot be built, or its stream was not found.
    """
    return prepare(fresh_twin(anatomy.stream.checkpoint, seed), corpus)[2]


def random_tokens(checkpoint: Checkpoint, corpus: Corpus, seed: int) -> Corpus:
    """As many sequences of as many tokens, each id drawn evenly from the vocabulary by (seed, sequence).

    An id that every sequence begins with, such as BOS, stays where it is. Of float states, each dimension is drawn from
    a normal distribution with its mean and spread in the corpus.
    """
    inputs, rows = corpus.inputs, range(corpus.sequences)
    if corpus.is_states:
        flat = inputs.double().flatten(0, -2)
        shape = tuple(inputs.shape[1:])
        noise = np.stack([key_rng(seed, row, _TOKENS).standard_normal(shape) for row in rows])
        made = (flat.mean(0) + flat.std(0) * torch.from_numpy(noise)).to(inputs.dtype)
    else:
        size = checkpoint.vocab_size or int(inputs.max()) + 1
        drawn = [key_rng(seed, row, _TOKENS).integers(0, size, corpus.tokens) for row in rows]
        made = torch.from_numpy(np.stack(drawn)).to(inputs.dtype)
        if corpus.sequences > 1 and bool((inputs[:, 0] == inputs[0, 0]).all()):
            made[:, 0] = inputs[:, 0]
    sha256 = hashlib.sha256(made.numpy().tobytes()).hexdigest()
    return replace(corpus, inputs=made, documents=None, name="random tokens", sha256=sha256, notes=())

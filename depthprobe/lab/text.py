"""What the lab trains on: one stream of token ids, a part of it for validation, drawn from by seed and step."""

from __future__ import annotations

import hashlib
import math
import platform
import re
import sysconfig
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.corpus import Corpus, read
from depthprobe.documents import Document, documents, manual_topics
from depthprobe.errors import CorpusError
from depthprobe.lab.byte_tokens import byte_ids, is_byte_tokenizer

__all__ = ["Source", "Text", "is_ids", "library_texts", "read_text"]

HELD_OUT_BYTES = 13  # of 256: a document is for validation if the first byte of its hash is below, 5 % of all
FEWEST_DOCUMENTS = 20  # with less, a split by documents would be a lottery
MASKED_SHARE = 0.15
IGNORED = -100  # the label of a position that no loss is taken at, as in transformers
Ids = NDArray[np.int32]
_BOUNDARY = re.compile(r'(\n\s*\n|""")')  # of paragraphs, and of docstrings, whose last one code follows at once


class Source(Protocol):
    """What a training run draws its batches from. `Text` is one; a task of your own may be another.

    Attributes:
        name: what stands in the record of the run.
        sha256: of the text or the ids.
        vocab_size: ids are below it.
        frequencies: of every id in training, `[vocabulary]`, none of them 0: a model that is not better than these
            alone has failed. None where that says nothing.
        validation: ids and labels `[sequences, tokens]`, of which the first are taken, as many as asked for.
    """

    @property
    def name(self) -> str:
        """What stands in the record of the run."""
        ...

    @property
    def sha256(self) -> str:
        """Of the text or the ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        ...

    @property
    def frequencies(self) -> NDArray[np.float64] | None:
        """Of every id in training, `[vocabulary]`; None where they say nothing."""
        ...

    @property
    def validation(self) -> tuple[Tensor, Tensor]:
        """Ids and labels, int64 `[sequences, tokens]`."""
        ...

    def batch(self, seed: int, step: int, rows: int) -> tuple[Tensor, Tensor]:
        """Ids and labels, int64 `[rows, tokens]`: a function of the seed and the step alone.

        Labels stand at the position of their token (a causal model shifts them itself), −100 where there is no loss,
        and every row has as many as any other.
        """
        ...


@dataclass(frozen=True, eq=False)
class Text:
    """A text that is cut into sequences as they are drawn.

    Attributes:
        name: where it comes from.
        sha256: of all its documents, validation included (utf-8, a zero byte between documents), or of the ids.
        stream: training ids `[tokens]`, an end-of-text token before each document where the tokenizer has one.
        starts: where a sequence may begin, `[choices]`; None for anywhere.
        held_out: validation ids `[sequences, tokens]`.
        vocab_size: ids are below it.
        tokenizer: goes with the checkpoint; None for ids.
        split: a sentence on how training and validation were told apart.
        mask: id of the mask token for masked prediction; None for the prediction of the next token.
    """

    name: str
    sha256: str
    stream: Ids
    starts: NDArray[np.int64] | None
    held_out: Tensor
    vocab_size: int
    tokenizer: Any | None
    split: str
    mask: int | None = None

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return self.held_out.shape[1]

    @cached_property
    def frequencies(self) -> NDArray[np.float64]:
        """Of every id in the training text, `[vocabulary]`; one is added to each count, so that none is zero."""
        counts = np.bincount(self.stream, minlength=self.vocab_size) + 1.0
        return np.asarray(counts / counts.sum())

    @property
    def entropy(self) -> float:
        """The unigram entropy of the training text, nats a token."""
        counts = np.unique(self.stream, return_counts=True)[1] / len(self.stream)
        return float(-(counts * np.log(counts)).sum())

    def batch(self, seed: int, step: int, rows: int) -> tuple[Tensor, Tensor]:
        """Ids and labels, int64 `[rows, tokens]`, drawn with replacement by (seed, step)."""
        rng = np.random.default_rng((seed, step))
        if self.starts is None:
            starts = rng.integers(0, len(self.stream) - self.seq_len + 1, rows)
        else:
            starts = self.starts[rng.integers(0, len(self.starts), rows)]
        ids = torch.from_numpy(self.stream[starts[:, None] + np.arange(self.seq_len)].astype(np.int64))
        return self._labelled(ids, rng)

    @cached_property
    def validation(self) -> tuple[Tensor, Tensor]:
        """Ids and labels `[sequences, tokens]`, in an order by lot. That and the masks are the same in every run."""
        rng = np.random.default_rng(0)
        return self._labelled(self.held_out[torch.from_numpy(rng.permutation(len(self.held_out)))], rng)

    def _labelled(self, ids: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Ids and what is to be predicted: the ids, or those at a masked 15 % of each row's positions."""
        if self.mask is None:
            return ids, ids
        # as many in each row: then the mean over a batch is the mean over its parts, however it is divided
        count = max(1, round(MASKED_SHARE * self.seq_len))
        chosen = torch.from_numpy(rng.random(tuple(ids.shape)).argsort(axis=1)[:, :count])
        hidden = torch.zeros_like(ids, dtype=torch.bool).scatter_(1, chosen, True)
        return ids.masked_fill(hidden, self.mask), ids.masked_fill(~hidden, IGNORED)

    def describe(self) -> dict[str, Any]:
        """What stands in the record of a run."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "split": self.split,
            "training_tokens": len(self.stream),
            "validation_tokens": self.held_out.numel(),
            "vocabulary": self.vocab_size,
            "unigram_entropy": self.entropy,
        }


def read_text(
    data: Any,
    tokenizer: Any | None,
    *,
    seq_len: int = 64,
    objective: Literal["causal", "masked"] = "causal",
    text_field: str = "text",
) -> Text:
    """The text to train on.

    Args:
        data: None for the standard library's text and source (see `library_texts`), or what `analyze` takes: a text
            file, `-`, `.jsonl`, `.npy` of ids `[sequences, tokens]`, a `.bin`, a dataset, or from Python texts or ids.
        tokenizer: a transformers tokenizer; only text needs one.
        seq_len: tokens of a sequence.
        objective: `masked` hides 15 % of the tokens, and needs a tokenizer with a mask token.
        text_field: the field of a `.jsonl` or a dataset that holds the text.

    Raises:
        CorpusError: the data cannot be read, or is shorter than two sequences.
    """
    mask = getattr(tokenizer, "mask_token_id", None) if objective == "masked" else None
    if objective == "masked" and mask is None:
        raise CorpusError("the tokenizer has no mask token, which masked prediction needs", fix="use another tokenizer")
    if is_ids(data):
        return _of_rows(read(data, None, tokens=2**62, seq_len=_row_length(data, seq_len)), seq_len, tokenizer, mask)
    if tokenizer is None:
        raise CorpusError("text needs a tokenizer", fix="pass one, or token ids")
    name, given = _library() if data is None else documents(data, text_field)
    digest = hashlib.sha256()
    parts: list[Ids] = []
    held: list[bool] = []
    for document in given:
        text = _whole(document)
        if text.strip():
            key = hashlib.sha256(text.encode())
            digest.update((b"\0" if parts else b"") + text.encode())
            parts.append(_encode(text, tokenizer))
            held.append(key.digest()[0] < HELD_OUT_BYTES)
    by_document = len(parts) >= FEWEST_DOCUMENTS and any(held) and not all(held)
    if by_document:
        stream = np.concatenate([part for part, out in zip(parts, held, strict=True) if not out])
        rest = np.concatenate([part for part, out in zip(parts, held, strict=True) if out])
        split = f"{sum(held):,} of {len(parts):,} documents are for validation: the first byte of their sha256 is "
        split += f"below {HELD_OUT_BYTES} of 256."
    else:
        whole = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
        stream, rest, split = _tail(whole, seq_len)
    return Text(
        name, digest.hexdigest(), *_checked(stream, rest, seq_len, name), len(tokenizer), tokenizer, split, mask
    )


def _checked(stream: Ids, rest: Ids, seq_len: int, name: str) -> tuple[Ids, None, Tensor]:
    count = len(rest) // seq_len
    if len(stream) < seq_len or count == 0:
        raise CorpusError(
            f"{name} has {len(stream) + len(rest):,} tokens",
            f"at least one sequence of {seq_len:,} for training and one for validation",
            "give more text, or lower --seq-len",
        )
    return stream, None, torch.from_numpy(rest[: count * seq_len].reshape(count, seq_len).astype(np.int64))


def _tail(stream: Ids, seq_len: int) -> tuple[Ids, Ids, str]:
    size = max(seq_len, math.ceil(len(stream) * HELD_OUT_BYTES / 256))
    return stream[:-size], stream[-size:], f"The last {size:,} tokens are for validation."


def _encode(text: str, tokenizer: Any) -> Ids:
    front = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if is_byte_tokenizer(tokenizer):
        ids = byte_ids(text)
    else:
        ids = np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)
    return np.concatenate([np.array(front, dtype=np.int32), ids])


def _whole(document: Document) -> str:
    """All of a document, which is read as far as one asks."""
    size, (text, ended) = 2**20, document(2**20)
    while not ended:
        size *= 2
        text, ended = document(size)
    return text


# Token ids


def is_ids(data: Any) -> bool:
    """Whether the data are token ids, or states, by their type or their name."""
    if isinstance(data, str | Path):
        return Path(data).suffix in (".npy", ".npz", ".bin")
    return isinstance(data, Corpus | Tensor | np.ndarray)


def _row_length(data: Any, seq_len: int) -> int | None:
    """What `corpus.read` is to cut to: a `.bin` has no rows of its own."""
    return seq_len if isinstance(data, str | Path) and Path(data).suffix == ".bin" else None


def _of_rows(corpus: Corpus, seq_len: int, tokenizer: Any | None, mask: int | None) -> Text:
    """Rows of ids: each is cut into sequences, none goes over the end of a row; the last rows are for validation."""
    if corpus.is_states:
        raise CorpusError(f"{corpus.name} holds float states", "token ids, or text")
    if corpus.tokens < seq_len:
        found = f"{corpus.name} has sequences of {corpus.tokens:,} tokens"
        raise CorpusError(found, f"at least {seq_len:,}", f"pass --seq-len {corpus.tokens}")
    ids = corpus.inputs.numpy().astype(np.int32)
    held = max(1, math.ceil(len(ids) * HELD_OUT_BYTES / 256))
    if held >= len(ids):
        raise CorpusError(f"{corpus.name} has one sequence", "at least two, one of them for validation")
    pieces = corpus.tokens // seq_len
    rest = ids[-held:, : pieces * seq_len].reshape(-1, seq_len)
    rows, places = np.meshgrid(np.arange(len(ids) - held), np.arange(pieces), indexing="ij")
    starts = (rows * corpus.tokens + places * seq_len).ravel()
    size = max(int(ids.max()) + 1, 0 if tokenizer is None else len(tokenizer))
    split = f"The last {held:,} of {len(ids):,} sequences are for validation."
    stream, held_out = ids[:-held].ravel(), torch.from_numpy(rest.astype(np.int64))
    return Text(corpus.name, corpus.sha256, stream, starts, held_out, size, tokenizer, split, mask)


# The standard library


def library_texts() -> dict[str, str]:
    """The default training text: the standard library's top-level modules and the training share of the manual.

    Only modules that lie directly in the library's folder, so no packages, tests or data tables; not
    `_sysconfigdata…`, which is about one machine. `analyze` reads the analysis share of the manual: no paragraph of
    that is in here. Keys are names, in a fixed order: modules by name, then topics.

    Raises:
        CorpusError: this Python comes without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    analysed = {_words(part) for topic in manual_topics("analysis") for part in topic.split("\n\n")} - {""}
    texts = {}
    for path in sorted(root.glob("*.py")):
        if not path.name.startswith("_sysconfigdata"):
            with tokenize.open(path) as file:
                texts[path.name] = file.read()
    if not texts:
        raise CorpusError(
            "this Python comes without the sources of its standard library", fix="pass a text with --data"
        )
    texts |= {f"topic {number}": topic for number, topic in enumerate(manual_topics("training"))}
    kept = {name: _without(text, analysed) for name, text in texts.items()}
    return {name: text for name, text in kept.items() if text.strip()}


def _without(text: str, analysed: set[str]) -> str:
    parts = _BOUNDARY.split(text)  # what is between boundaries, and in turn the boundaries themselves
    return "".join("" if _words(part) in analysed else part for part in parts)


def _words(paragraph: str) -> str:
    return " ".join(paragraph.split())


def _library() -> tuple[str, Iterable[Document]]:
    return f"the standard library's text and source (Python {platform.python_version()})", map(
        _document, library_texts().values()
    )


def _document(text: str) -> Document:
    return lambda size: (text[:size], size >= len(text))

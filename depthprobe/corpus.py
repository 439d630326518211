"""From text, token ids or float states to equally long sequences without padding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from depthprobe.arrays import checked, cut, opened, refuse_padding, refuse_wide, sha256_of, windows
from depthprobe.documents import Document, documents, manual_topics
from depthprobe.errors import CorpusError, UsageError

__all__ = ["Corpus", "halves", "manual_topics", "read"]

DEFAULT_SEQ_LEN = 256
_BEHIND = " and ends with "


@dataclass(frozen=True, eq=False)
class Corpus:
    """Sequences of one length, ready for a model.

    Attributes:
        inputs: int64 ids `[sequences, tokens]`, or float states `[sequences, tokens, width]`.
        documents: int64 `[sequences]`, the document that holds most of a sequence's tokens; None if there is only
            one, or if that is not known.
        name: what stands in the report.
        sha256: of the text that was tokenised (utf-8, a zero byte between documents), or of the ids or states used.
        bos: a sentence on what was put in front of every sequence and behind it.
        notes: what a reader should know besides, a sentence each.
        owners: int32 `[sequences, tokens]`, the document of each token, -1 of what was put in front and behind; None as
            `documents`.
        cuttable: whether a sequence is as long as it was asked for, a piece of text or of a stream, so that a shorter
            one is such a piece too. Ids and states that were given as sequences are not: an image, a task, a sentence
            with its SEP.
    """

    inputs: torch.Tensor
    documents: np.ndarray | None
    name: str
    sha256: str
    bos: str
    notes: tuple[str, ...] = ()
    owners: np.ndarray | None = None
    cuttable: bool = False

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.inputs.shape[0]

    @property
    def tokens(self) -> int:
        """Number of tokens (positions) of each sequence."""
        return self.inputs.shape[1]

    @property
    def first_ids(self) -> list[int]:
        """The first 16 ids, by which two tokenizers or ways of cutting a text can be told apart; none of states."""
        return [] if self.is_states else [int(each) for each in self.inputs[0, :16]]

    @property
    def same_end(self) -> bool:
        """Whether something was put behind every sequence, an encoder's SEP."""
        return _BEHIND in self.bos

    def take(self, rows: slice | np.ndarray) -> Corpus:
        """Some of the sequences."""
        documents, owners = (None if of is None else of[rows] for of in (self.documents, self.owners))
        inputs = self.inputs[rows if isinstance(rows, slice) else torch.from_numpy(rows)]
        return replace(self, inputs=inputs, documents=documents, owners=owners)

    def spread(self, tokens: int) -> Corpus:
        """An evenly spread part with about so many tokens, at least one sequence."""
        count = max(1, min(self.sequences, tokens // self.tokens))
        return self.take(np.linspace(0, self.sequences - 1, count).round().astype(np.int64))

    def cut(self, length: int) -> Corpus:
        """The first `length` tokens of every sequence, and the document of those; an encoder's last one stays."""
        if length >= self.tokens:
            return self
        places = np.arange(length)
        if self.same_end:
            places[-1] = self.tokens - 1
        owners = None if self.owners is None else self.owners[:, places]
        documents = self.documents if owners is None else _mode(owners)
        return replace(self, inputs=self.inputs[:, torch.from_numpy(places)], documents=documents, owners=owners)

    @property
    def is_states(self) -> bool:
        """Whether the sequences are float states instead of token ids."""
        return self.inputs.is_floating_point()


def halves(corpus: Corpus) -> np.ndarray:
    """Which sequences choose, or are fitted on, bool `[sequences]`; the others score. A document is in one half alone.

    The longest documents are dealt out first, each to the half that has less; of one document, or where none is known,
    every second sequence.
    """
    owners = np.arange(corpus.sequences) if corpus.documents is None else corpus.documents
    names, counts = np.unique(owners, return_counts=True)
    if len(names) < 2:
        owners = names = np.arange(corpus.sequences)
        counts = np.ones(corpus.sequences, dtype=np.int64)
    taken, sizes = [], [0, 0]
    for place in np.argsort(-counts, kind="stable"):
        half = int(sizes[1] < sizes[0])
        sizes[half] += int(counts[place])
        taken += [names[place]] if half == 0 else []
    return np.isin(owners, taken)


def read(
    data: Any,
    tokenizer: Any,
    *,
    tokens: int = 8192,
    seq_len: int | None = None,
    max_positions: int | None = None,
    vocab_size: int | None = None,
    bos: Literal["auto", "always", "never"] = "auto",
    text_field: str = "text",
    seed: int = 0,
    usual_len: int = DEFAULT_SEQ_LEN,
) -> Corpus:
    """Read about `tokens` tokens as sequences of one length.

    Args:
        data: None for the analysis share of Python's own manual; the path of a text file, `-`, a `.jsonl`, a `.npy` of
            ids `[sequences, tokens]` or float states `[sequences, tokens, width]`, a nanoGPT `.bin`, a folder saved by
            `datasets`; `hf:NAME[[:CONFIG]:SPLIT]`; or from Python a list of documents, a tensor or array of ids or
            states, a `datasets.Dataset`, or a `Corpus`, which is returned as it is.
        tokenizer: a transformers tokenizer; only text needs one.
        tokens: how many tokens to read; of ids and states it limits the number of sequences.
        seq_len: tokens of a sequence, special tokens included; 256, or less if the model or `tokens` has less.
        max_positions: the most positions that the model takes.
        vocab_size: ids must be below it.
        bos: `auto` puts in front (behind, for encoders) what the tokenizer itself would; `always` its BOS or CLS.
        text_field: the field of a `.jsonl` or a dataset that holds the text.
        seed: chooses the windows of a `.bin`.
        usual_len: tokens of a sequence of text where `seq_len` does not say.

    Raises:
        UsageError: a length that is too small, or beyond the model's positions.
        CorpusError: the data cannot be read, or does not fit the model.
    """
    if isinstance(data, Corpus):
        return data
    if bos not in ("auto", "always", "never"):
        raise UsageError(f"bos is {bos!r}", "auto, always or never")
    if tokens < 2:
        raise UsageError(f"tokens is {tokens}", "at least 2", "a prediction needs a token before it")
    if seq_len is not None and seq_len < 2:
        raise UsageError(f"the sequence length is {seq_len}", "at least 2", "a prediction needs a token before it")
    if seq_len is not None and max_positions is not None and seq_len > max_positions:
        raise UsageError(
            f"the sequence length is {seq_len:,}", f"at most the model's {max_positions:,} positions", "lower --seq-len"
        )

    array = opened(data)
    if array is not None:
        if bos == "always":
            raise UsageError("bos is 'always'", "'auto' with token ids or states", "they are taken as they are")
        name = str(data) if isinstance(data, str | Path) else "passed from Python"
        if isinstance(array, np.ndarray) and name.endswith(".bin"):
            width = _default_length(seq_len or usual_len, tokens, max_positions)
            refuse_wide(array, vocab_size, name)
            kept, notes = windows(array, width, tokens // width, seed, name)
        else:
            kept, notes = cut(array, tokens, seq_len, max_positions, name)
        inputs = checked(kept, vocab_size, name, "give ids of this model's own tokenizer")
        refuse_padding(inputs, tokenizer, name)
        said, stream = "Taken as they are: nothing was put in front.", name.endswith(".bin")
        return Corpus(inputs, None, name, sha256_of(inputs), said, notes, cuttable=stream)

    if tokenizer is None:
        raise CorpusError(
            "this model comes without a tokenizer, so it cannot read text",
            fix="pass token ids as a .npy of shape [sequences, tokens], or a tokenizer with --tokenizer",
        )
    name, texts = documents(data, text_field)
    length = _default_length(seq_len or usual_len, tokens, max_positions)
    packed, owners, found, sentence = _pack(texts, tokenizer, length, tokens // length, bos, name)
    notes = ()
    if packed.shape[1] < length:
        notes = (f"The text is shorter than a sequence of {length:,}: one sequence of {packed.shape[1]:,} tokens.",)
    elif packed.shape[0] < tokens // length:
        notes = (f"Asked for {tokens:,} tokens, the text gives {packed.size:,} in whole sequences.",)
    elif seq_len is not None and length < seq_len:
        notes = (
            f"Asked for sequences of {seq_len:,} tokens, and for {tokens:,} tokens in all: one sequence of those.",
        )
    ids = checked(packed, vocab_size, name, "the tokenizer does not belong to this model: pass --tokenizer")
    held = None if owners is None else _mode(owners)
    return Corpus(ids, held, name, found, sentence, notes, owners, cuttable=True)


def _default_length(seq_len: int, tokens: int, max_positions: int | None) -> int:
    return min(seq_len, tokens, max_positions or tokens)


# Text


def _pack(
    texts: Iterable[Document], tokenizer: Any, length: int, count: int, bos: str, name: str
) -> tuple[np.ndarray, np.ndarray | None, str, str]:
    """Ids and their documents `[sequences, length]`, the hash of the text, the sentence on special tokens."""
    ids: list[int] = []
    owners: list[int] = []
    digest = hashlib.sha256()
    front: list[int] = []
    back: list[int] = []
    sentence, body = "", length
    for index, document in enumerate(texts):
        if not sentence:
            # "a": a document may be empty, and what an empty text is put between cannot be told apart from it
            front, back, sentence = _specials(tokenizer, document(4096)[0].strip()[:64] or "a", bos)
            body = length - len(front) - len(back)
            if body < 1:
                raise UsageError(f"the sequence length is {length}", f"more than the {length - body} special tokens")
        text, more = _encode(document, tokenizer, count * body - len(ids))
        if not text.strip():
            continue
        digest.update((b"\0" if ids else b"") + text.encode())
        ids += more
        owners += [index] * len(more)
        if len(ids) >= count * body:
            break
    if len(ids) < 2:
        raise CorpusError(f"{name} holds {'one token' if ids else 'no text'}", "at least two tokens of text")
    body = min(len(ids), body)
    count = len(ids) // body
    rows = np.array(ids[: count * body], dtype=np.int64).reshape(count, body)
    held = np.array(owners[: count * body], dtype=np.int32).reshape(count, body)
    ends = [np.tile(np.array(part, dtype=np.int64), (count, 1)) for part in (front, back)]
    several = len(np.unique(held)) > 1
    held = np.pad(held, ((0, 0), (len(front), len(back))), constant_values=-1)
    return np.hstack([ends[0], rows, ends[1]]), held if several else None, digest.hexdigest(), sentence


def _mode(held: np.ndarray) -> np.ndarray:
    """The document that holds most tokens of each row, -1 where none of them is a document's."""
    counted = (np.unique(row[row >= 0], return_counts=True) for row in held)
    return np.array([values[counts.argmax()] if len(values) else -1 for values, counts in counted], dtype=np.int64)


def _encode(document: Document, tokenizer: Any, need: int) -> tuple[str, list[int]]:
    """The front of a document and its first `need` ids. Tokenises no more than about twice what is needed."""
    size = 6 * need + 64
    while True:
        text, whole = document(size)
        if not whole:
            text = text[: max(text.rfind(" "), text.rfind("\n"))] if " " in text or "\n" in text else text
        ids = _ids(tokenizer, text, special=False)
        if whole or len(ids) >= need:
            return text, ids[:need]
        size *= 2


def _ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    # verbose=False: the tokenizer's warning about its maximal length is about sequences, not about a text to be packed
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _specials(tokenizer: Any, sample: str, bos: str) -> tuple[list[int], list[int], str]:
    """What goes in front of a sequence, what behind it, and a sentence that says so."""
    if bos == "never":
        return [], [], "Nothing was put in front of the sequences (asked for)."
    plain, full = _ids(tokenizer, sample, special=False), _ids(tokenizer, sample, special=True)
    starts = range(len(full) - len(plain) + 1)
    start = next((i for i in starts if full[i : i + len(plain)] == plain), None)
    front = full[:start] if start else []
    # a decoder's trailing end-of-text would say that the text ends here; an encoder has always seen its last token
    encoder = bool(front) and front[-1] == tokenizer.cls_token_id
    back = full[len(front) + len(plain) :] if encoder else []
    why = "as the tokenizer itself does"
    if bos == "always" and not front:
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
        if first is None:
            raise UsageError("bos is 'always', and the tokenizer has no BOS or CLS token", fix="use --bos auto")
        front, why = [first], "asked for; the tokenizer itself does not"
    if not front:
        return [], [], "Nothing was put in front of the sequences: the tokenizer adds nothing to a plain text."
    shown = [" ".join(f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in part) for part in (front, back)]
    return front, back, f"Every sequence starts with {shown[0]}{f'{_BEHIND}{shown[1]}' if back else ''}, {why}."

"""From text, token ids or float states to equally long sequences without padding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from depthprobe.documents import Document, documents, existing, manual_topics
from depthprobe.errors import CorpusError, UsageError

__all__ = ["Corpus", "manual_topics", "read"]

DEFAULT_SEQ_LEN = 256
Array = np.ndarray | torch.Tensor


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
    """

    inputs: torch.Tensor
    documents: np.ndarray | None
    name: str
    sha256: str
    bos: str
    notes: tuple[str, ...] = ()

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.inputs.shape[0]

    @property
    def tokens(self) -> int:
        """Number of tokens (positions) of each sequence."""
        return self.inputs.shape[1]

    def take(self, rows: slice | np.ndarray) -> Corpus:
        """Some of the sequences."""
        documents = None if self.documents is None else self.documents[rows]
        inputs = self.inputs[rows if isinstance(rows, slice) else torch.from_numpy(rows)]
        return replace(self, inputs=inputs, documents=documents)

    def spread(self, tokens: int) -> Corpus:
        """An evenly spread part with about so many tokens, at least one sequence."""
        count = max(1, min(self.sequences, tokens // self.tokens))
        return self.take(np.linspace(0, self.sequences - 1, count).round().astype(np.int64))

    @property
    def is_states(self) -> bool:
        """Whether the sequences are float states instead of token ids."""
        return self.inputs.is_floating_point()


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
            `datasets`; `hf:NAME[:SPLIT]`; or from Python a list of documents, a tensor or array of ids or states, a
            `datasets.Dataset`, or a `Corpus`, which is returned as it is.
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

    array = _as_array(data)
    if array is not None:
        if bos == "always":
            raise UsageError("bos is 'always'", "'auto' with token ids or states", "they are taken as they are")
        name = str(data) if isinstance(data, str | Path) else "passed from Python"
        if isinstance(array, np.ndarray) and name.endswith(".bin"):
            width = _default_length(seq_len or usual_len, tokens, max_positions)
            kept, notes = _windows(array, width, tokens // width, seed, name)
        else:
            kept, notes = _cut(array, tokens, seq_len, max_positions, name)
        inputs = _checked(kept, vocab_size, name, "give ids of this model's own tokenizer")
        return Corpus(inputs, None, name, _digest(inputs), "Taken as they are: nothing was put in front.", notes)

    if tokenizer is None:
        raise CorpusError(
            "this model comes without a tokenizer, so it cannot read text",
            fix="pass token ids as a .npy of shape [sequences, tokens], or a tokenizer with --tokenizer",
        )
    name, texts = documents(data, text_field)
    length = _default_length(seq_len or usual_len, tokens, max_positions)
    packed, owners, digest, sentence = _pack(texts, tokenizer, length, tokens // length, bos, name)
    notes = ()
    if packed.shape[1] < length:
        notes = (f"The text is shorter than a sequence of {length:,}: one sequence of {packed.shape[1]:,} tokens.",)
    elif packed.shape[0] < tokens // length:
        notes = (f"Asked for {tokens:,} tokens, the text gives {packed.size:,} in whole sequences.",)
    elif seq_len is not None and length < seq_len:
        notes = (
            f"Asked for sequences of {seq_len:,} tokens, and for {tokens:,} tokens in all: one sequence of those.",
        )
    checked = _checked(packed, vocab_size, name, "the tokenizer does not belong to this model: pass --tokenizer")
    return Corpus(checked, owners, name, digest, sentence, notes)


def _default_length(seq_len: int, tokens: int, max_positions: int | None) -> int:
    return min(seq_len, tokens, max_positions or tokens)


# Token ids and states


def _as_array(data: Any) -> Array | None:
    """Ids or states, `[sequences, tokens(, width)]`, or the one-dimensional memmap of a `.bin`; None for text."""
    if isinstance(data, torch.Tensor | np.ndarray):
        return data.detach().cpu() if isinstance(data, torch.Tensor) else np.asarray(data)
    if not isinstance(data, str | Path) or Path(data).suffix not in (".npy", ".npz", ".bin"):
        return None
    path = existing(data)
    if path.suffix == ".npz":
        raise CorpusError(f"{path} is an archive of arrays", "one array in a .npy", "save it with numpy.save")
    if path.suffix == ".bin":
        if path.stat().st_size == 0 or path.stat().st_size % 2:
            raise CorpusError(
                f"{path} has {path.stat().st_size:,} bytes", "a stream of 16-bit ids", "write it as uint16, as nanoGPT"
            )
        return np.memmap(path, dtype="<u2", mode="r")
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise CorpusError(f"{path} is no array that can be read ({error})", "a .npy of numbers") from error


def _cut(
    array: Array, tokens: int, seq_len: int | None, max_positions: int | None, name: str
) -> tuple[Array, tuple[str, ...]]:
    """The first sequences, cut to seq_len, and notes on what was left out."""
    shape = tuple(array.shape)
    kind = array.dtype.kind if isinstance(array, np.ndarray) else _kind(array)
    expected = "integer ids [sequences, tokens] or float states [sequences, tokens, width]"
    if (kind, len(shape)) not in (("i", 2), ("u", 2), ("f", 3)):
        raise CorpusError(f"{name}: {array.dtype} of shape {list(shape)}", expected, "convert or reshape the array")
    if shape[0] == 0 or shape[1] < 2 or 0 in shape:
        raise CorpusError(f"{name}: shape {list(shape)}", "at least one sequence of two tokens")
    if seq_len is not None and seq_len > shape[1]:
        raise UsageError(f"the sequence length is {seq_len:,}", f"at most the {shape[1]:,} of {name}")
    width = seq_len or shape[1]
    if max_positions is not None and width > max_positions:
        raise CorpusError(
            f"{name}: sequences of {width:,} tokens",
            f"at most the model's {max_positions:,} positions",
            f"cut them with --seq-len {max_positions}",
        )
    count = min(shape[0], max(1, tokens // width))
    notes = (
        *((f"The first {count:,} of {shape[0]:,} sequences.",) if count < shape[0] else ()),
        *((f"Sequences of {shape[1]:,} tokens cut to {width:,}.",) if width < shape[1] else ()),
    )
    return array[:count, :width], notes


def _kind(tensor: torch.Tensor) -> str:
    if tensor.is_floating_point():
        return "f"
    return "b" if tensor.dtype == torch.bool or tensor.is_complex() else "i"


def _windows(stream: np.ndarray, width: int, count: int, seed: int, name: str) -> tuple[Array, tuple[str, ...]]:
    """`[sequences, width]`: windows of a stream that do not overlap, drawn by the seed, in the order of the stream."""
    if len(stream) < 2:
        raise CorpusError(f"{name} holds one token id", "at least 2")
    if len(stream) < width:
        return stream[None], (f"The stream is shorter than a sequence of {width:,}: one of {len(stream):,} tokens.",)
    whole = len(stream) // width
    if whole <= count:
        short = (f"Asked for {count * width:,} tokens, the stream gives {whole * width:,} in whole sequences.",)
        return stream[: whole * width].reshape(whole, width), short if whole < count else ()
    starts = np.sort(np.random.default_rng(seed).choice(whole, count, replace=False)) * width
    windows = np.stack([stream[start : start + width] for start in starts])
    return windows, (f"{count:,} of the stream's {whole:,} windows, drawn with seed {seed}.",)


def _checked(array: Array, vocab_size: int | None, name: str, fix: str) -> torch.Tensor:
    """A copy as int64 ids within the vocabulary, or as finite states."""
    if isinstance(array, np.ndarray):
        native = array.astype(array.dtype.newbyteorder("=") if array.dtype.kind == "f" else np.int64)
        values = torch.from_numpy(native)
    else:
        values = array.clone() if array.is_floating_point() else array.to(torch.int64, copy=True)
    if values.is_floating_point():
        bad = ~torch.isfinite(values)
        if bad.any():
            place = bad.nonzero()[0].tolist()
            raise CorpusError(f"{name}: the state at {place} is {values[tuple(place)].item()}", "finite numbers")
        return values.contiguous()
    outside = values < 0 if vocab_size is None else (values < 0) | (values >= vocab_size)
    if outside.any():
        row, column = outside.nonzero()[0].tolist()
        limit = "ids from 0" if vocab_size is None else f"ids from 0 to {vocab_size - 1:,} (vocabulary {vocab_size:,})"
        raise CorpusError(f"{name}: id {values[row, column]:,} at sequence {row}, position {column}", limit, fix)
    return values.contiguous()


def _digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()


# Text


def _pack(
    texts: Iterable[Document], tokenizer: Any, length: int, count: int, bos: str, name: str
) -> tuple[np.ndarray, np.ndarray | None, str, str]:
    """Ids `[sequences, length]`, each sequence's document, the hash of the text, the sentence on special tokens."""
    ids: list[int] = []
    owners: list[int] = []
    digest = hashlib.sha256()
    front: list[int] = []
    back: list[int] = []
    sentence, body = "", length
    for index, document in enumerate(texts):
        if not sentence:
            front, back, sentence = _specials(tokenizer, document(4096)[0].strip()[:64], bos)
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
    held = np.array(owners[: count * body], dtype=np.int64).reshape(count, body)
    ends = [np.tile(np.array(part, dtype=np.int64), (count, 1)) for part in (front, back)]
    several = len(np.unique(held)) > 1
    return np.hstack([ends[0], rows, ends[1]]), _mode(held) if several else None, digest.hexdigest(), sentence


def _mode(held: np.ndarray) -> np.ndarray:
    """The most frequent value of each row."""
    counted = (np.unique(row, return_counts=True) for row in held)
    return np.array([values[counts.argmax()] for values, counts in counted], dtype=np.int64)


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
    return front, back, f"Every sequence starts with {shown[0]}{f' and ends with {shown[1]}' if back else ''}, {why}."

"""Token ids and states as arrays: opened, cut into sequences of one length, and checked."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from depthprobe.documents import existing
from depthprobe.errors import CorpusError, UsageError

__all__ = ["checked", "cut", "opened", "refuse_padding", "refuse_wide", "sha256_of", "windows"]

Array = np.ndarray | torch.Tensor


def opened(data: Any) -> Array | None:
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


def cut(
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


def windows(stream: np.ndarray, width: int, count: int, seed: int, name: str) -> tuple[Array, tuple[str, ...]]:
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


def checked(array: Array, vocab_size: int | None, name: str, fix: str) -> torch.Tensor:
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


def sha256_of(values: torch.Tensor) -> str:
    """The hash of the bytes of ids or states."""
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()


def refuse_wide(stream: np.ndarray, vocab_size: int | None, name: str) -> None:
    """Ids of 32 bits, read as 16, would be half ids, all of them within the vocabulary: every second one is small."""
    upper = stream[1 : 1 << 20 : 2]
    if len(upper) >= 16 and (upper < -(-(vocab_size or 1 << 16) // (1 << 16))).all():
        raise CorpusError(f"{name} looks like ids of 32 bits", "a stream of 16-bit ids", "save them as a .npy")


def refuse_padding(inputs: torch.Tensor, tokenizer: Any, name: str) -> None:
    """Padding would be measured as if it were text, and attended to."""
    names = ("pad_token_id", "eos_token_id", "bos_token_id", "unk_token_id")
    pad, *others = (getattr(tokenizer, each, None) for each in names)
    if inputs.is_floating_point() or pad is None or pad in others:
        return
    if padded := int(((inputs[:, -1] == pad) | (inputs[:, 0] == pad)).sum()):
        raise CorpusError(
            f"{name}: {padded:,} of {len(inputs):,} sequences begin or end with padding (id {pad})",
            "sequences of one length without padding",
            "leave them out, or cut all with --seq-len",
        )

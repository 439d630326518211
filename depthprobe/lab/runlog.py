"""What a training run leaves: its log, its record, its loss figure, and the state that a killed run goes on from."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from depthprobe.errors import OutputError
from depthprobe.formats import undisturbed

__all__ = ["COLUMNS", "Log", "draw", "errors_of", "load_state", "read_json", "save_model", "save_state", "write_json"]

COLUMNS = ("step", "loss", "lr", "grad_norm", "tokens", "seconds", "val_loss")
Row = dict[str, Any]


class Log:
    """One JSON object a line.

    Args:
        path: of the file.
        size: what a killed run wrote after so many bytes is cut off, since the resumed one writes it again.
        writes: whether this process does; another only keeps the rows.

    Attributes:
        rows: all of the run, those of before a resumption included; a number that is not finite is None.
        size: bytes that are safely on the disk.
    """

    def __init__(self, path: Path, size: int = 0, writes: bool = True) -> None:
        self.path, self.size = path, size
        self.file: IO[bytes] | None = None
        with errors_of(path):
            before = path.read_bytes()[:size] if size else b""
            self.rows: list[Row] = [json.loads(line) for line in before.splitlines()]
            if writes:
                self.file = path.open("r+b" if path.exists() else "w+b")
                self.file.truncate(size)
                self.file.seek(size)

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows, each with a value for every column."""
        for row in rows:
            plain = {name: _plain(row.get(name)) for name in COLUMNS}
            self.rows.append(plain)
            if self.file is not None:
                self.file.write(json.dumps(plain).encode() + b"\n")
        if self.file is not None:
            with errors_of(self.path):
                self.file.flush()

    def sync(self) -> None:
        """Onto the disk."""
        if self.file is not None:
            with errors_of(self.path):
                self.file.flush()
                os.fsync(self.file.fileno())
                self.size = self.file.tell()

    def close(self) -> None:
        """The last of it."""
        self.sync()
        if self.file is not None:
            self.file.close()


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all."""
    _replace(path, (json.dumps(content, indent=1) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote.

    Raises:
        OutputError: something else is there.
    """
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise OutputError(f"{path} is not the record of a run", fix="choose another --out") from error


def save_state(path: Path, state: dict[str, Any]) -> None:
    """What a killed run goes on from; whole or not at all."""
    temporary = path.with_suffix(".part")
    with errors_of(path):
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def load_state(path: Path) -> dict[str, Any]:
    """What `save_state` saved, on the CPU.

    Raises:
        OutputError: the file is damaged.
    """
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises what zip files and unpicklers raise
        raise OutputError(f"{path} cannot be read", fix="remove it to start anew") from error


def save_model(model: Any, tokenizer: Any | None, folder: Path, record: dict[str, Any] | None = None) -> None:
    """A checkpoint in transformers' format, its tokenizer, and its record beside it, each file whole or not at all.

    Args:
        record: goes into `run.json`; None leaves that to the caller.
    """
    parts = folder / ".parts"
    with errors_of(folder):
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True)
        with undisturbed(local=True):
            model.save_pretrained(parts)
            if tokenizer is not None:
                tokenizer.save_pretrained(parts)
        (parts / "generation_config.json").unlink(missing_ok=True)  # of sampling, which nobody trained for
        for path in sorted(parts.iterdir()):
            os.replace(path, folder / path.name)
        parts.rmdir()
    if record is not None:
        write_json(folder / "run.json", record)


def draw(rows: Sequence[Row], path: Path, title: str, unigram: float | None) -> None:
    """The losses of a run over its steps, as png: each step's, their running mean, the validation loss, the unigram."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    steps = [(row["step"], row["loss"]) for row in rows if row["loss"] is not None]
    checks = [(row["step"], row["val_loss"]) for row in rows if row["val_loss"] is not None]
    figure = Figure(figsize=(6, 3.6), layout=ConstrainedLayoutEngine())
    axes = figure.subplots()
    if steps:
        x, y = zip(*steps, strict=True)
        axes.plot(x, y, color="#0072b2", alpha=0.25, linewidth=0.8)
        axes.plot(x, _smooth(y), color="#0072b2", linewidth=1.5, label="training")
    if checks:
        axes.plot(*zip(*checks, strict=True), "o-", color="#d55e00", markersize=3, linewidth=1.2, label="validation")
    if unigram is not None:
        axes.axhline(unigram, color="#555555", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.title.set_fontsize(10)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
    temporary = path.with_suffix(".part")
    with errors_of(path):
        figure.savefig(temporary, format="png", dpi=200)
        os.replace(temporary, path)


def _smooth(values: Sequence[float]) -> NDArray[np.float64]:
    """At each place the mean of those around it: a fiftieth part of all values, at least 5; less at the ends."""
    window = np.ones(min(len(values), max(5, len(values) // 50)))
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".part")
    with errors_of(path):
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """One line for whatever the file system refuses."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"cannot write {path}: {reason}", fix="make it writable or choose another --out") from None

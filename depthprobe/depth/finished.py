"""Keep what estimators have found, so that a run which was stopped goes on after the last one that is finished."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers

from depthprobe.ablations.batch import mask_token
from depthprobe.ablations.store import Store
from depthprobe.corpus import Corpus
from depthprobe.depth.base import Depth, DepthSettings, Estimate
from depthprobe.estimate import plain_table
from depthprobe.fingerprint import digest, fingerprint
from depthprobe.processes import told
from depthprobe.verify import Anatomy

__all__ = ["Finished"]


@dataclass(frozen=True, eq=False)
class Finished:
    """The estimates of one model, one corpus and one unit that are kept in a folder.

    Of several processes the first one reads and writes, and all are told.

    Attributes:
        store: the folder.
    """

    store: Store

    @classmethod
    def of(cls, folder: Path, anatomy: Anatomy, corpus: Corpus, unit: str, settings: DepthSettings) -> Finished:
        """The folder, made if it is missing.

        Raises:
            OutputError: it holds estimates of something else, or cannot be written.
        """
        return cls(told(lambda: Store(folder, _identity(anatomy, corpus, unit, settings))))

    def load(self, run: str, name: str) -> tuple[Estimate, float] | None:
        """What an estimator found in a run, and the seconds that it took; None if it was not finished, or is damaged.

        Args:
            run: `model`, or the control.
            name: of the estimator.
        """
        text = told(lambda: self.store.text(f"{run}-{name}"))
        try:
            document = json.loads(text or "")
            return _estimate(document["estimate"]), float(document["seconds"])
        except (ValueError, KeyError, TypeError):
            return None

    def keep(self, run: str, name: str, estimate: Estimate, seconds: float) -> None:
        """Keep it.

        Raises:
            OutputError: it cannot be written.
        """
        document = {"estimate": _plain(estimate), "seconds": seconds}
        told(lambda: self.store.keep(f"{run}-{name}", json.dumps(document)))


def _identity(anatomy: Anatomy, corpus: Corpus, unit: str, settings: DepthSettings) -> dict[str, Any]:
    """Everything that the numbers depend on."""
    checkpoint = anatomy.stream.checkpoint
    batches = {"batch_size", "memory"}  # results do not depend on these
    return {
        "model": checkpoint.name,
        "weights": fingerprint(checkpoint.model, checkpoint.offload),
        "dtype": str(checkpoint.dtype),
        "device": checkpoint.device.type,
        "corpus": digest(corpus.inputs),
        "documents": None if corpus.documents is None else corpus.documents.tolist(),
        "masks": [mask_token(anatomy), *getattr(checkpoint.tokenizer, "all_special_ids", [])],
        "unit": unit,
        **{name: value for name, value in asdict(settings).items() if name not in batches},
        "depthprobe": metadata.version("depthprobe"),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _plain(estimate: Estimate) -> dict[str, Any]:
    """What JSON can hold of an estimate: all but the numbers of each sequence, which nothing asks for afterwards."""
    return {
        "rows": [asdict(row) for row in estimate.rows],
        "curves": {name: plain_table(curve) for name, curve in estimate.curves.items()},
        "cost": [estimate.cost_forward, estimate.cost_backward],
        "notes": estimate.notes,
    }


def _estimate(plain: dict[str, Any]) -> Estimate:
    curves = {name: _table(**table) for name, table in plain["curves"].items()}
    forward, backward = plain["cost"]
    return Estimate([Depth(**row) for row in plain["rows"]], {}, curves, forward, backward, plain["notes"])


def _table(columns: list[str], rows: list[list[Any]]) -> pd.DataFrame:
    """A table as it was before `plain_table`: a column of numbers and None is one of numbers."""
    frame = pd.DataFrame(rows, columns=columns)
    for name in columns:
        if frame[name].dtype == object and not frame[name].map(lambda value: isinstance(value, str)).any():
            frame[name] = frame[name].astype("float64")
    return frame

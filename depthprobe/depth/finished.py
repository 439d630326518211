"""Keep what estimators have found, so that a run which was stopped goes on after the last one that is finished."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers

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
        store: the folder; None in all processes but the first.
    """

    store: Store | None

    @classmethod
    def of(cls, folder: Path, anatomy: Anatomy, corpus: Corpus, unit: str, settings: DepthSettings) -> Finished:
        """The folder, made if it is missing.

        Raises:
            OutputError: it holds estimates of something else, or cannot be written.
        """
        found: list[Store] = []

        def look() -> None:
            found.append(Store(folder, _identity(anatomy, corpus, unit, settings)))

        told(look)
        return cls(found[0] if found else None)

    def load(self, run: str, name: str) -> tuple[Estimate | None, str, float] | None:
        """What became of an estimator in a run, and the seconds that it took; None if it was not finished.

        Args:
            run: `model`, or the control.
            name: of the estimator.
        """
        text = told(lambda: None if self.store is None else self.store.text(f"{run}-{name}"))
        if text is None:
            return None
        document = json.loads(text)
        return _estimate(document["estimate"]), document["reason"], document["seconds"]

    def keep(self, run: str, name: str, estimate: Estimate | None, reason: str, seconds: float) -> None:
        """Keep it.

        Raises:
            OutputError: it cannot be written.
        """
        document = {"estimate": _plain(estimate), "reason": reason, "seconds": seconds}
        told(lambda: None if self.store is None else self.store.keep(f"{run}-{name}", json.dumps(document)))


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
        "unit": unit,
        **{name: value for name, value in asdict(settings).items() if name not in batches},
        "depthprobe": metadata.version("depthprobe"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _plain(estimate: Estimate | None) -> dict[str, Any] | None:
    """What JSON can hold of an estimate: all but the numbers of each sequence, which nothing asks for afterwards."""
    if estimate is None:
        return None
    return {
        "rows": [asdict(row) for row in estimate.rows],
        "curves": {name: plain_table(curve) for name, curve in estimate.curves.items()},
        "cost": [estimate.cost_forward, estimate.cost_backward],
        "notes": estimate.notes,
    }


def _estimate(plain: dict[str, Any] | None) -> Estimate | None:
    if plain is None:
        return None
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

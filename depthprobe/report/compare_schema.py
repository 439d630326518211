"""A comparison as data: one frozen dataclass that goes to JSON and back without losing a digit."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from depthprobe.errors import OutputError
from depthprobe.report.shapes import COMPARISON_SHAPES, fault, fault_of_table, no_constant

__all__ = ["COMPARE_COLUMNS", "COMPARE_VERSION", "DIFFERENCE_COLUMNS", "VERDICT_COLUMNS", "Comparison"]

COMPARE_VERSION = 1
COMPARE_COLUMNS = {
    "run": "str",
    "group": "str",
    "relative_depth": "float64",
    "layer": "Int64",
    "unit": "str",
    "metric": "str",
    "value": "float64",
    "ci_low": "float64",
    "ci_high": "float64",
    "n": "int64",
}
DIFFERENCE_COLUMNS = {
    "a": "str",
    "b": "str",
    "metric": "str",
    "unit": "str",
    "where": "str",
    "value_a": "float64",
    "value_b": "float64",
    "difference": "float64",
    "ci_low": "float64",
    "ci_high": "float64",
    "method": "str",
}
VERDICT_COLUMNS = {
    "claim": "str",
    "run": "str",
    "criterion": "str",
    "source": "str",
    "value": "float64",
    "ci_low": "float64",
    "ci_high": "float64",
    "verdict": "str",
    "reason": "str",
}
_TABLES = {"table": COMPARE_COLUMNS, "differences": DIFFERENCE_COLUMNS, "verdict": VERDICT_COLUMNS}
_AGAIN = "run `depthprobe compare` again to write a new one"


@dataclass(frozen=True, eq=False)
class Comparison:
    """Several models side by side, and what they say of the claims.

    A *line* is what is compared: a run, or all runs of a group, which are seeds of one model.

    Attributes:
        runs: one dict a run: name, group (empty for none), source, how (where its numbers come from), blocks, width,
            parameters, placement, objective, dtype, vocab_size, corpus, sha256, sequences, tokens (per sequence), and
            of its training, None where that is not known: seed, trained_tokens, val_loss, failed (why), checkpoints.
        lines: name, runs (their names), blocks, resolution (metric → the value that rounding alone gives it), gate (the
            estimates of depth, metric and unit, that passed the gate in all of its runs).
        levels: at what the lines were compared, in the order of `differences`: name, words.
        warnings: what makes the comparison unfair, a sentence each.
        notes: what is missing, and how it was done, a sentence each.
        table: the rows of `compare.csv`. In a group's own rows `run` is empty, the value is the mean over its seeds and
            n their number; layer and relative_depth are empty for what is one number a model (unit `model`, or what
            an estimate of depth counts).
        differences: the rows of `differences.csv`: a − b in thirds of the depth, and of what is one number a model.
        verdict: the rows of `verdict.csv`, one or more a claim.
        run: command, depthprobe (its version), created (ISO, UTC).
    """

    runs: list[dict[str, Any]]
    lines: list[dict[str, Any]]
    levels: list[dict[str, Any]]
    warnings: list[str]
    notes: list[str]
    table: pd.DataFrame
    differences: pd.DataFrame
    verdict: pd.DataFrame
    run: dict[str, Any]

    def to_frame(self) -> pd.DataFrame:
        """A copy of the rows of `compare.csv`."""
        return self.table.copy()

    def to_json(self) -> str:
        """All of it as JSON text, which `from_json` reads back; what is not known becomes null, an open end `inf`."""
        document: dict[str, Any] = {"schema_version": COMPARE_VERSION, "kind": "comparison"}
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, pd.DataFrame):
                rows = value.astype(object).where(value.notna(), None).replace({math.inf: "inf", -math.inf: "-inf"})
                value = {"columns": list(value.columns), "rows": rows.to_numpy(dtype=object).tolist()}
            document[part.name] = value
        return json.dumps(document, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, source: str = "the comparison") -> Comparison:
        """The comparison that `to_json` wrote.

        Args:
            text: JSON text.
            source: what to call it in an error message.

        Raises:
            OutputError: not JSON, not a comparison, or one of another schema version.
        """
        try:
            document = json.loads(text, parse_constant=no_constant)
        except ValueError as error:
            raise OutputError(f"{source} is not JSON: {error}", fix=_AGAIN) from None
        if not isinstance(document, dict) or document.get("kind") != "comparison":
            raise OutputError(f"{source} is not a comparison of depthprobe", "what `compare` writes", _AGAIN)
        if document.get("schema_version") != COMPARE_VERSION:
            found = f"{source} has schema version {document.get('schema_version')!r}"
            raise OutputError(
                found, str(COMPARE_VERSION), "read it with the depthprobe that wrote it, or compare again"
            )
        values: dict[str, Any] = {}
        for part in fields(cls):
            try:
                value = document[part.name]
                if part.name in _TABLES:
                    columns = _TABLES[part.name]
                    if value["columns"] != list(columns):
                        raise ValueError(f"its columns are {value['columns']}")
                    needed = ("value",) if part.name == "table" else ()  # a claim may have no number
                    if (broken := fault_of_table(value["rows"], columns, needed)) is not None:
                        raise ValueError(broken)
                    value = pd.DataFrame(value["rows"], columns=list(columns)).astype(columns)
                elif (odd := fault(value, COMPARISON_SHAPES[part.name], part.name)) is not None:
                    raise ValueError(f"{odd[0]}, not {odd[1]}")
            except (KeyError, TypeError, ValueError) as error:
                raise OutputError(f"{part.name!r} of {source} is broken: {error}", fix=_AGAIN) from None
            values[part.name] = value
        return cls(**values)

    def save(self, directory: str | Path, figures: Literal["png", "svg"] = "png") -> Path:
        """Write compare.html, compare.json, the tables and figures/ into `directory`, all or nothing.

        The tables are compare.csv, verdict.csv, and differences.csv where there is more than one line.

        Args:
            directory: made if it is missing; files of other names in it stay as they are.
            figures: format of the files in figures/; the page carries its own copies.

        Returns:
            The path of compare.html.

        Raises:
            OutputError: the directory cannot be written; nothing is left behind.
            UsageError: `figures` is neither png nor svg.
        """
        from depthprobe.report import compare_files

        return compare_files.save(self, Path(directory), figures)

    @classmethod
    def load(cls, directory: str | Path) -> Comparison:
        """Read back what `save` wrote: a comparison's folder, or its compare.json.

        Raises:
            OutputError: there is no comparison, or it cannot be read.
        """
        path = Path(directory)
        path = path / "compare.json" if path.is_dir() else path
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OutputError(f"cannot read {path}: {error}", "a folder that `save` wrote", _AGAIN) from None
        return cls.from_json(text, str(path))

    def __repr__(self) -> str:
        names = ", ".join(line["name"] for line in self.lines)
        return f"Comparison({names}; {len(self.table)} rows, {len(self.differences)} differences)"

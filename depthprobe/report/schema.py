"""The report as data: one frozen dataclass that goes to JSON and back without losing a digit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from depthprobe.errors import NonFiniteError, OutputError
from depthprobe.report.shapes import REPORT_SHAPES, fault, fault_of_table, no_constant

__all__ = ["ABLATION_COLUMNS", "DEPTH_COLUMNS", "LAYER_COLUMNS", "PAIR_COLUMNS", "SCHEMA_VERSION", "Report"]

SCHEMA_VERSION = 1
LAYER_COLUMNS = {
    "layer": "int64",
    "unit": "str",
    "metric": "str",
    "value": "float64",
    "ci_low": "float64",
    "ci_high": "float64",
    "n": "int64",
}
PAIR_COLUMNS = {
    "i": "int64",
    "j": "int64",
    "metric": "str",
    "value": "float64",
    "ci_low": "float64",
    "ci_high": "float64",
    "n": "int64",
}
ABLATION_COLUMNS = {
    "schedule": "str",
    "kind": "str",
    "unit": "str",
    "layers": "str",
    "combine": "str",
    "metric": "str",
    "value": "float64",
    "ci_low": "float64",
    "ci_high": "float64",
    "n": "int64",
}
DEPTH_COLUMNS = {
    "name": "str",
    "unit": "str",
    "variant": "str",
    "value": "float64",
    "ci_low": "float64",
    "ci_high": "float64",
    "of": "int64",
    "passes_gate": "bool",
    "note": "str",
}
_TABLES = {"layers": LAYER_COLUMNS, "pairs": PAIR_COLUMNS, "ablations": ABLATION_COLUMNS, "depth": DEPTH_COLUMNS}
_AGAIN = "run `depthprobe analyze` again to write a new report"


def _no_ablations() -> pd.DataFrame:
    return _empty(ABLATION_COLUMNS)


def _no_depth() -> pd.DataFrame:
    return _empty(DEPTH_COLUMNS)


def _empty(columns: dict[str, str]) -> pd.DataFrame:
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in columns.items()})


@dataclass(frozen=True, eq=False)
class Report:
    """Everything that one analysis of one model says.

    Attributes:
        model: name, source, format, revision, architecture, parameters, dtype, device, blocks (L), width (d), inputs,
            objective (`causal`, `masked` or None), vocab_size, notes.
        corpus: name, sha256, sequences, tokens (per sequence), documents, bos, first_ids, first_tokens, skip_first,
            notes.
        anatomy: summary, block_list, parallel, blocks (each with index, attention and mlp, which are None where they
            were not found and otherwise hold placement, module, scale, skip_scale and gain, the module of a learned
            factor on the skip or None), notes.
        verification: one dict a check: name, what (a sentence), value, floor, passed, level (`model`, `sublayers`,
            `readout`).
        layers: the rows of `layers.csv`: layer, unit, metric, value, ci_low, ci_high, n (sequences).
        pairs: the rows of `pairs.csv`: i, j, metric, value, ci_low, ci_high, n (sequences).
        growth: cross_share, growth_power, growth_rate, update_growth_rate, each with value, ci_low and ci_high or
            None; r2_power, r2_rate; growth_rate_after and r2_rate_after, of x_1 on; decomposition, a list of layer,
            stream, start, updates, cross in squared norms.
        sinks: positions whose norm exceeds 50 times the median of its layer: position, sequences, first_layer,
            last_layer, max_norm, max_ratio.
        skipped: what leaving out the first positions changed: metric, layer, unit, without, including.
        resolution: half precision only: metric → the value that rounding alone gives it.
        cost: forward_passes, block_evaluations, seconds; fetched where weights had to be fetched: bytes, planned (what
            the order of blocks tells), batch_outer (what a loop with batches outside fetches), chunks (of the text).
        run: command, seed, depthprobe, versions, machine, options, created (ISO, UTC).
        notes: plain sentences on what was left out, and why.
        ablations: the rows of `ablations.csv`: schedule, kind, unit, layers (such as "4,5"), combine (empty where it
            does not apply), metric, value, ci_low, ci_high, n (sequences); no rows where no model was changed.
        merging: rho (cost, layers, median, slope, or None), proxies (proxy, cost, blocks, value, ci_low, ci_high),
            base_loss (with interval, or None), later (columns and rows: what a skip does to later blocks' updates; only
            from `analyze`), sequences, tokens, clusters (documents or sequences that intervals are over),
            score_positions, evaluations, plain_evaluations, seconds, notes, fetched (as in cost); empty where no model
            was changed.
        gradients: cotangents, loss, ratio, ratio_median, ratio_random (the gradient at x_1 over that at x_L; value,
            ci_low, ci_high, or None), bottom (1; 0 for a single block), fresh (seeds), sequences, clusters, tokens,
            corpus, sha256, skip_first, seconds, notes; empty where none were taken.
        depth: the rows of `depth.csv`: name, unit, variant (empty for the default), value, ci_low, ci_high, of (N),
            passes_gate, note; no rows where effective depth was not estimated.
        deep: what stands beside them: estimators (one dict each: name, unit, does, misses, forward, backward, seconds),
            gate (name, variant, passed, reason), controls (control, name, unit, variant, value, ci_low, ci_high, of),
            curves (name of the estimator and of the curve, such as `stages/stages` → columns and rows), sequences,
            clusters, tokens, corpus, sha256, skip_first, seconds, notes; empty where effective depth was not estimated.
        phases: phases of computation: clusters of layers, and what can be read from each state; empty where these
            were not looked for.
    """

    model: dict[str, Any]
    corpus: dict[str, Any]
    anatomy: dict[str, Any]
    verification: list[dict[str, Any]]
    layers: pd.DataFrame
    pairs: pd.DataFrame
    growth: dict[str, Any]
    sinks: list[dict[str, Any]]
    skipped: list[dict[str, Any]]
    resolution: dict[str, float]
    cost: dict[str, Any]
    run: dict[str, Any]
    notes: list[str]
    ablations: pd.DataFrame = field(default_factory=_no_ablations)
    merging: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Any] = field(default_factory=dict)
    depth: pd.DataFrame = field(default_factory=_no_depth)
    deep: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, Any] = field(default_factory=dict)

    def to_frame(self) -> pd.DataFrame:
        """A copy of the per-layer table: columns layer, unit, metric, value, ci_low, ci_high, n."""
        return self.layers.copy()

    def to_json(self) -> str:
        """The whole report as JSON text, which `from_json` reads back; an interval that is not finite becomes null.

        Raises:
            NonFiniteError: a value in a table is infinite or not a number.
        """
        document: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, pd.DataFrame):
                self._check_finite(part.name, value)
                value = {"columns": list(value.columns), "rows": value.to_numpy(dtype=object).tolist()}
            document[part.name] = _plain(value)
        return json.dumps(document, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, source: str = "the report") -> Report:
        """The report that `to_json` wrote.

        Args:
            text: JSON text.
            source: what to call it in an error message.

        Raises:
            OutputError: not JSON, not a report, or a report of another schema version.
        """
        try:
            document = json.loads(text, parse_constant=no_constant)
        except ValueError as error:
            raise OutputError(f"{source} is not JSON: {error}", fix=_AGAIN) from None
        if isinstance(document, dict) and document.get("kind") == "comparison":
            raise OutputError(f"{source} is a comparison", "a report", "give the folders with the reports themselves")
        if not isinstance(document, dict) or "schema_version" not in document:
            raise OutputError(f"{source} is not a depthprobe report", "a field `schema_version`", _AGAIN)
        if document["schema_version"] != SCHEMA_VERSION:
            found = f"{source} has schema version {document['schema_version']!r}"
            raise OutputError(found, str(SCHEMA_VERSION), "read it with the depthprobe that wrote it, or analyze again")
        values: dict[str, Any] = {}
        for part in fields(cls):
            if part.name not in document:
                if part.default_factory is not MISSING:  # a report from before there was such a field
                    continue
                raise OutputError(f"{source} has no field {part.name!r}", fix=_AGAIN)
            value = document[part.name]
            if part.name in _TABLES:
                value = _frame(value, _TABLES[part.name], source, part.name)
            elif not isinstance(value, dict if str(part.type).startswith("dict") else list):
                raise OutputError(f"field {part.name!r} of {source} is a {type(value).__name__}", fix=_AGAIN)
            elif (odd := fault(value, REPORT_SHAPES.get(part.name), part.name)) is not None:
                raise OutputError(f"{source} is broken: {odd[0]}", odd[1], _AGAIN)
            values[part.name] = value
        return cls(**values)

    def save(self, directory: str | Path, figures: Literal["png", "svg"] = "png") -> Path:
        """Write report.html, report.json, the tables and figures/ into `directory`, all or nothing.

        The tables are layers.csv and pairs.csv, ablations.csv where the model was changed, and depth.csv where
        effective depth was estimated.

        Args:
            directory: made if it is missing; files of other names in it stay as they are.
            figures: format of the files in figures/; the page carries its own copies.

        Returns:
            The path of report.html.

        Raises:
            NonFiniteError: a value in a table is not finite.
            OutputError: the directory cannot be written; nothing is left behind.
            UsageError: `figures` is neither png nor svg.
        """
        from depthprobe.report import files

        return files.save(self, Path(directory), figures)

    @classmethod
    def load(cls, directory: str | Path) -> Report:
        """Read back what `save` wrote: a report's folder, or its report.json.

        Raises:
            OutputError: there is no report, or it cannot be read.
        """
        path = Path(directory)
        path = path / "report.json" if path.is_dir() else path
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise OutputError(f"no report at {path}", "a folder that `save` wrote", _AGAIN) from None
        except (OSError, UnicodeDecodeError) as error:
            raise OutputError(f"cannot read {path}: {error}", fix=_AGAIN) from None
        return cls.from_json(text, str(path))

    def _repr_html_(self) -> str:
        from depthprobe.report import html

        return html.fragment(self)

    def __repr__(self) -> str:
        blocks, rows = self.model.get("blocks"), len(self.layers)
        return f"Report({self.model.get('name')!r}, blocks={blocks}, layers={rows} rows, pairs={len(self.pairs)} rows)"

    def _check_finite(self, table: str, frame: pd.DataFrame) -> None:
        finite = np.isfinite(frame["value"].to_numpy(dtype="float64"))
        if finite.all():
            return
        row = frame.loc[~finite].iloc[0]
        where = {
            "layers": "layer {layer}, unit {unit}",
            "pairs": "states {i} and {j}",
            "ablations": "schedule {schedule!r}",
            "depth": "unit {unit}, variant {variant!r}",
        }[table].format(**row)
        found = (
            f"{row['name' if table == 'depth' else 'metric']} is {row['value']} at {where} ({self.model.get('dtype')})"
        )
        raise NonFiniteError(found, "a finite number", "try --dtype float32")


def _plain(value: Any) -> Any:
    """The value in JSON's own types; what is not finite becomes None, what JSON does not know becomes its text."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | np.ndarray):
        return [_plain(item) for item in value]
    return str(value)


def _frame(value: Any, columns: dict[str, str], source: str, name: str) -> pd.DataFrame:
    try:
        if value["columns"] != list(columns):
            raise ValueError(f"its columns are {value['columns']}")
        if (odd := fault_of_table(value["rows"], columns)) is not None:
            raise ValueError(odd)
        return pd.DataFrame(value["rows"], columns=list(columns)).astype(columns)
    except (KeyError, TypeError, ValueError) as error:
        raise OutputError(f"table {name!r} of {source} is broken: {error}", f"{', '.join(columns)}", _AGAIN) from None

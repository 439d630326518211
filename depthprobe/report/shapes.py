"""What the fields of a saved report must hold, so that a file that somebody edited is refused by name, not by chance.

A shape is a kind of value; `[shape]` a list of such; `{name: shape}` an object with these names, `?` behind those that
may be missing, others allowed; `Each(shape)` an object of such values; `Maybe(shape)` one, or null or an empty object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["COMPARISON_SHAPES", "REPORT_SHAPES", "fault", "fault_of_table", "no_constant"]


@dataclass(frozen=True)
class Kind:
    """A value that is no list and no object: what it is in words, and whether a value is one."""

    words: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True)
class Maybe:
    """A shape; or null, or of an object an empty one, which both say that there is none."""

    shape: Any


@dataclass(frozen=True)
class Each:
    """An object whose values all have one shape."""

    shape: Any


@dataclass(frozen=True)
class Table:
    """Columns, these among them, and rows of as many values."""

    columns: tuple[str, ...]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NUMBER = Kind("a number", _number)
COUNT = Kind("a whole number, 0 or more", lambda value: _whole(value) and value >= 0)
SOME = Kind("a whole number, 1 or more", lambda value: _whole(value) and value >= 1)
WHOLE = Kind("a whole number", _whole)
PRINT = Kind("a text or a number", lambda value: isinstance(value, str | int | float))
ANY = Kind("anything", lambda value: True)
END = Kind("a number", lambda value: _number(value) or value in ("inf", "-inf"))  # of an interval that may be open
CONTROL = Kind("random-init or random-tokens", lambda value: value in ("random-init", "random-tokens"))

_ENDS = {"ci_low": Maybe(NUMBER), "ci_high": Maybe(NUMBER)}
_INTERVAL = {"value": NUMBER, **_ENDS}
_UNIT = {"placement": TEXT, "module?": Maybe(TEXT), "scale?": Maybe(NUMBER), "skip_scale?": Maybe(NUMBER)}
_ROW = {"name": TEXT, "variant": TEXT}
_THRESHOLDS = Table(("name", "variant", "threshold", "value", "ci_low", "ci_high"))
_EFFECTS = Table(("skipped", "unit", "tokens", "statistic", "value"))
_FETCHED = {"bytes": COUNT, "planned": COUNT, "batch_outer": COUNT, "chunks": COUNT}
_GROWTH = Maybe({"value": Maybe(NUMBER), **_ENDS})

REPORT_SHAPES: dict[str, Any] = {
    "model": {
        "name": TEXT, "source": TEXT, "format": Maybe(TEXT), "architecture": TEXT, "parameters": COUNT, "dtype": TEXT,
        "device": TEXT, "blocks": SOME, "width": SOME, "inputs": TEXT, "objective": Maybe(TEXT),
        "vocab_size": Maybe(COUNT), "notes": [TEXT], "fingerprint?": Maybe(PRINT),
    },
    "corpus": {
        "name": TEXT, "sha256": TEXT, "sequences": SOME, "tokens": SOME, "documents": Maybe(COUNT), "bos": Maybe(TEXT),
        "first_ids": Maybe([ANY]), "first_tokens?": Maybe([TEXT]), "skip_first": COUNT, "notes": [TEXT],
    },
    "anatomy": {
        "summary?": Maybe(TEXT), "notes": [TEXT],
        "blocks?": [{"index": COUNT, "attention?": Maybe(_UNIT), "mlp?": Maybe(_UNIT)}],
    },
    "verification": [{"name": TEXT, "what": TEXT, "value": Maybe(NUMBER), "floor": Maybe(NUMBER), "passed": FLAG}],
    "growth": {
        "cross_share?": _GROWTH, "growth_power?": _GROWTH, "growth_rate?": _GROWTH, "update_growth_rate?": _GROWTH,
        "r2_power?": Maybe(NUMBER), "r2_rate?": Maybe(NUMBER), "decomposition?": [Each(NUMBER)],
    },
    "resolution": Each(NUMBER),
    "cost": {"forward_passes": NUMBER, "block_evaluations": NUMBER, "seconds": NUMBER, "fetched?": Maybe(_FETCHED)},
    "run": {"depthprobe": TEXT, "created?": Maybe(TEXT), "options?": Maybe(Each(ANY)), "versions?": Maybe(Each(ANY)),
            "machine?": Maybe(Each(ANY))},
    "notes": [TEXT],
    "merging": {
        "rho?": Maybe({"layers?": Maybe([{"layer": COUNT, **_INTERVAL}]), "median?": Maybe(_INTERVAL),
                       "slope?": Maybe(_INTERVAL)}),
        "base_loss?": Maybe(_INTERVAL), "later?": Maybe(_EFFECTS), "sequences?": Maybe(COUNT), "tokens?": Maybe(COUNT),
        "score_positions?": Maybe(NUMBER), "notes?": [TEXT], "fetched?": Maybe(_FETCHED), "clusters?": Maybe(COUNT),
    },
    "gradients": {
        "fresh?": Maybe([ANY]), "sequences?": COUNT, "loss?": Maybe(_INTERVAL), "ratio?": Maybe(_INTERVAL),
        "ratio_median?": Maybe(_INTERVAL), "ratio_random?": Maybe(_INTERVAL), "notes?": [TEXT],
        "clusters?": Maybe(COUNT),
    },
    "deep": {
        "unit?": TEXT, "sequences?": COUNT, "tokens?": COUNT, "corpus?": TEXT, "seconds?": NUMBER, "notes?": [TEXT],
        "clusters?": Maybe(COUNT),
        "estimators?": [{"name": TEXT, "metrics": [{"name": TEXT, "does": TEXT, "misses": TEXT}],
                         "forward": Maybe(NUMBER), "backward": Maybe(NUMBER), "seconds": NUMBER, "reason": TEXT}],
        "gate?": [{**_ROW, "passed": FLAG, "reason": TEXT}],
        "controls?": [{"control": CONTROL, **_ROW, "unit": TEXT, **_INTERVAL}],
        "curves?": {
            "stages/stages?": Table(("stages", "relative_kl", "relative_kl_ci_low", "relative_kl_ci_high")),
            "dependence/profile?": Table(("reader", "d", "ci_low", "ci_high", "variant")),
            "elasticity/profile?": Table(("value", "ci_low", "ci_high")),
            "effects/effects?": _EFFECTS, "crossing/thresholds?": _THRESHOLDS, "lens/thresholds?": _THRESHOLDS,
        },
    },
    "phases": {
        "clusters?": Maybe({"ends": [[COUNT]], "clear": FLAG, "silhouette": NUMBER, **_ENDS}),
        "boundaries?": [{"after": COUNT, "chosen": FLAG, "share": Maybe(NUMBER)}],
        "readable?": Maybe([{"target": TEXT, "state": COUNT, "accuracy": NUMBER, **_ENDS, "baseline": NUMBER,
                             "train": COUNT}]),
        "first?": Each({"state": Maybe(NUMBER), **_ENDS}),
        "sequences?": COUNT, "notes?": [TEXT],
    },
}  # fmt: skip

COMPARISON_SHAPES: dict[str, Any] = {
    "runs": [{"name": TEXT, "group": TEXT, "how": TEXT, "blocks": SOME, "width": SOME, "parameters": COUNT,
              "placement": Maybe(TEXT), "fresh": COUNT, "dtype": TEXT, "sequences": SOME, "tokens": SOME,
              "seed": Maybe(WHOLE), "trained_tokens": Maybe(COUNT), "val_loss": Maybe(NUMBER), "failed": Maybe(TEXT),
              "checkpoints": [Maybe(COUNT)]}],
    "lines": [{"name": TEXT, "runs": [TEXT], "blocks": SOME, "resolution": Each(NUMBER), "gate": [[TEXT]]}],
    "levels": [{"name": TEXT, "words": TEXT}],
    "warnings": [TEXT],
    "notes": [TEXT],
    "run": {"depthprobe": TEXT},
}  # fmt: skip


def fault(value: Any, shape: Any, where: str) -> tuple[str, str] | None:
    """What a value is that it should not be, and what was expected, the first of all faults; None where it fits.

    Args:
        value: what JSON gave.
        shape: see the module; None for one that is not known, which everything fits.
        where: what to call the value, such as `deep`.
    """
    if shape is None:
        return None
    if isinstance(shape, Maybe):
        empty = value is None or (value == {} and isinstance(shape.shape, dict))
        return None if empty else fault(value, shape.shape, where)
    if isinstance(shape, Table):
        return _broken(value, shape, where)
    if isinstance(shape, Kind):
        return None if shape.fits(value) else (f"{where} is {_shown(value)}", shape.words)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} is {_shown(value)}", "a list"
        inner = ((item, shape[0], f"{where}[{place}]") for place, item in enumerate(value))
    elif not isinstance(value, dict):
        return f"{where} is {_shown(value)}", "an object"
    elif isinstance(shape, Each):
        inner = ((item, shape.shape, f"{where}.{name}") for name, item in value.items())
    else:
        if lacking := [name for name in shape if not name.endswith("?") and name not in value]:
            return f"{where} has no {lacking[0]!r}", _words(shape[lacking[0]])
        known = ((name, name.removesuffix("?")) for name in shape)
        inner = ((value[name], shape[key], f"{where}.{name}") for key, name in known if name in value)
    return next((found for each in inner if (found := fault(*each)) is not None), None)


def fault_of_table(rows: Any, columns: Mapping[str, str], needed: Sequence[str] = ("value",)) -> str | None:
    """The first cell of a table that is not of its column's type, in words; None where all are.

    Args:
        rows: what JSON gave.
        columns: name → pandas' name of its type.
        needed: columns of numbers that may not be null; the others may.
    """
    if not isinstance(rows, list):
        return f"its rows are {_shown(rows)}"
    kinds = {"str": TEXT, "int64": WHOLE, "bool": FLAG, "Int64": Maybe(WHOLE), "float64": Maybe(END)}
    shapes = [NUMBER if name in needed else kinds[kind] for name, kind in columns.items()]
    for place, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(shapes):
            return f"row {place} has not {len(shapes)} values"
        for name, value, shape in zip(columns, row, shapes, strict=True):
            if (found := fault(value, shape, f"{name} of row {place}")) is not None:
                return f"{found[0]}, not {found[1]}"
    return None


def no_constant(name: str) -> Any:
    """For `json.loads`, which would let NaN and infinities through.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{name} is no number")


def _broken(value: Any, shape: Table, where: str) -> tuple[str, str] | None:
    expected = f"a table with {', '.join(shape.columns)}"
    if (found := fault(value, {"columns": [TEXT], "rows": [[ANY]]}, where)) is not None:
        return found[0], expected
    if lacking := [name for name in shape.columns if name not in value["columns"]]:
        return f"{where} has no column {lacking[0]!r}", expected
    if odd := [place for place, row in enumerate(value["rows"]) if len(row) != len(value["columns"])]:
        return f"row {odd[0]} of {where} has not {len(value['columns'])} values", expected
    texts = ("name", "variant", "tokens", "statistic", "schedule", "combine")
    for name in shape.columns:
        kind, place = TEXT if name in texts else Maybe(NUMBER), value["columns"].index(name)
        for number, row in enumerate(value["rows"]):
            if (found := fault(row[place], kind, f"{name} of row {number} of {where}")) is not None:
                return found
    return None


def _words(shape: Any) -> str:
    if isinstance(shape, Kind):
        return shape.words
    if isinstance(shape, Maybe):
        return f"{_words(shape.shape)} or null"
    return "a list" if isinstance(shape, list) else "an object"


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value) if len(repr(value)) <= 40 else f"a {type(value).__name__}"

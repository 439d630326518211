"""From what a run saw to tables with intervals, and to the explanation of the stream's growth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from depthprobe.estimate import Interval, PerSequence, Resampler
from depthprobe.glossary import METRICS
from depthprobe.measure import Measured

__all__ = ["growth", "layers_table", "pairs_table", "skipped_positions"]

Floats = NDArray[np.float64]
_UNITS = ("block", "attention", "mlp")
_ORDER = {name: place for place, name in enumerate(METRICS)}


def layers_table(measured: Measured, resampler: Resampler) -> pd.DataFrame:
    """The rows of `layers.csv`, in the order of the glossary, then unit, then layer."""
    keys = [key for key in measured.means.values if not key[0].startswith("_")]
    columns = np.stack([measured.means.values[key] for key in keys], axis=1)
    means, low, high = resampler.intervals(columns)
    counts = (~np.isnan(columns)).sum(axis=0)
    rows = [
        (layer, unit, metric, means[k], low[k], high[k], n)
        for k, ((metric, unit, layer), n) in enumerate(zip(keys, counts.tolist(), strict=True))
    ]
    rows += [
        (p.layer, "block", p.metric, p.interval.value, p.interval.low, p.interval.high, p.n) for p in measured.pooled
    ]
    table = pd.DataFrame(rows, columns=["layer", "unit", "metric", "value", "ci_low", "ci_high", "n"])
    order = pd.DataFrame(
        {"metric": table["metric"].map(_ORDER), "unit": table["unit"].map(_UNITS.index), "layer": table["layer"]}
    )
    return table.loc[order.sort_values(["metric", "unit", "layer"]).index].reset_index(drop=True)


def pairs_table(measured: Measured, resampler: Resampler) -> pd.DataFrame:
    """The rows of `pairs.csv`: every 0 ≤ i < j ≤ L."""
    tables = []
    for metric, values in measured.pairs.items():
        layers = int((1 + (1 + 8 * values.shape[1]) ** 0.5) / 2)
        i, j = np.triu_indices(layers, k=1)
        means, low, high = resampler.intervals(values)
        tables.append(
            pd.DataFrame(
                {"i": i, "j": j, "metric": metric, "value": means, "ci_low": low, "ci_high": high, "n": len(values)}
            )
        )
    return pd.concat(tables, ignore_index=True)


def growth(means: PerSequence, blocks: int, resampler: Resampler) -> dict[str, Any]:
    """Why the stream grows: ‖x_L‖² = ‖x_0‖² + Σ‖Δ‖² + 2Σ⟨Δ, x⟩ term by term, its power and its rate.

    A stream that does not grow, in the mean or in any resample, has no share of growth that comes from anything.

    Returns:
        cross_share, growth_power, growth_rate, update_growth_rate (value with interval, None where it has no
        meaning), r2_power, r2_rate, r2_update, and `decomposition` with one entry a state; `growth_rate_after` and
        r2_rate_after are of x_1 … x_L, as the power law is, so that the two can be compared.
    """
    norms = _columns(means, "residual_norm", range(blocks + 1))
    energy = _columns(means, "_energy", range(blocks + 1))
    updates = _columns(means, "_update_energy", range(blocks))
    cross = _columns(means, "_cross", range(blocks))
    sizes = _columns(means, "update_norm", range(blocks))

    def share(m: Floats) -> Floats:
        gained = m[:, blocks] - m[:, 0]
        return 2 * m[:, blocks + 1 :].sum(axis=1) / gained

    depth = np.arange(1.0, blocks + 1)
    found: dict[str, Any] = {"cross_share": None, "growth_power": None, "growth_rate": None, "update_growth_rate": None}
    found |= {"r2_power": None, "r2_rate": None, "r2_update": None}
    gained = (energy[:, -1] - energy[:, 0])[:, None]
    drawn = resampler.replicates(gained) if resampler.clusters > 1 else gained.mean(axis=0)
    if min(drawn.min(), gained.mean()) > 1e-6 * float(energy.mean()):
        found["cross_share"] = _plain(resampler.function(np.hstack([energy, cross]), share))
    if blocks >= 2 and bool((norms[:, 1:].mean(axis=0) > 0).all()):
        found["growth_power"] = _plain(resampler.function(norms[:, 1:], lambda m: _slope(np.log(depth), np.log(m))))
        found["r2_power"] = _r2(np.log(depth), np.log(norms[:, 1:].mean(axis=0)))
        after = resampler.function(norms[:, 1:], lambda m: np.exp(_slope(depth, np.log(m))))
        found["growth_rate_after"] = _plain(after)
        found["r2_rate_after"] = _r2(depth, np.log(norms[:, 1:].mean(axis=0)))
    if bool((norms.mean(axis=0) > 0).all()):
        every = np.arange(blocks + 1.0)
        found["growth_rate"] = _plain(resampler.function(norms, lambda m: np.exp(_slope(every, np.log(m)))))
        found["r2_rate"] = _r2(every, np.log(norms.mean(axis=0)))
    if blocks >= 2 and bool((sizes.mean(axis=0) > 0).all()):
        every = np.arange(float(blocks))
        rate = resampler.function(sizes, lambda m: np.exp(_slope(every, np.log(m))))
        found["update_growth_rate"] = _plain(rate)
        found["r2_update"] = _r2(every, np.log(sizes.mean(axis=0)))
    total, added, aligned = energy.mean(axis=0), updates.mean(axis=0), 2 * cross.mean(axis=0)
    found["decomposition"] = [
        {
            "layer": layer,
            "stream": float(total[layer]),
            "start": float(total[0]),
            "updates": float(added[:layer].sum()),
            "cross": float(aligned[:layer].sum()),
        }
        for layer in range(blocks + 1)
    ]
    return found


def skipped_positions(means: PerSequence, rows: int = 3) -> list[dict[str, Any]]:
    """Where leaving out the first positions changed the mean most: the top layers of each metric."""
    found = []
    for metric in ("residual_norm", "update_ratio", "cosine_adjacent"):
        entries: list[dict[str, Any]] = []
        for name, unit, layer in means.values:
            if name == f"_{metric}_including":
                without = float(np.nanmean(means.values[metric, unit, layer]))
                including = float(np.nanmean(means.values[name, unit, layer]))
                entries.append(
                    {"metric": metric, "layer": layer, "unit": unit, "without": without, "including": including}
                )
        entries.sort(key=lambda e: -abs(e["including"] - e["without"]) / (abs(e["without"]) + 1e-12))
        found += sorted(entries[:rows], key=lambda e: e["layer"])
    return found


def _columns(means: PerSequence, metric: str, layers: range) -> Floats:
    return np.stack([means.values[metric, "block", layer] for layer in layers], axis=1)


def _slope(x: Floats, y: Floats) -> Floats:
    """Least-squares slope of each row of y `[R, M]` on x `[M]`."""
    centred = x - x.mean()
    return y @ centred / (centred @ centred)


def _r2(x: Floats, y: Floats) -> float | None:
    spread = float(((y - y.mean()) ** 2).sum())
    if spread < 1e-20:
        return None  # nothing varies, so nothing is explained
    fitted = y.mean() + _slope(x, y[None])[0] * (x - x.mean())
    return 1 - float(((y - fitted) ** 2).sum()) / spread


def _plain(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "ci_low": interval.low, "ci_high": interval.high}

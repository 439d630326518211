"""What the first screen says: sentences that are true of the model at hand, whatever the model.

Every sentence states what was measured, with its interval where it has one, and concludes nothing beyond it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby, pairwise
from statistics import median
from typing import Any

from depthprobe.report.ablation_findings import CHANGES
from depthprobe.report.ablation_tables import sequences
from depthprobe.report.depth_tables import depth_finding
from depthprobe.report.fetched import fetched_finding
from depthprobe.report.gradient_tables import gradient_finding
from depthprobe.report.phase_panels import finding as phases_finding
from depthprobe.report.schema import Report
from depthprobe.report.tables import (
    by_layer,
    curve,
    highest,
    lowest,
    number,
    placements,
    ranges,
    units_of,
    with_interval,
)
from depthprobe.report.words import FEW, Finding, capital, ends, plural

__all__ = ["findings", "sentences"]

_CLOSE = 0.1  # angular distance, in units of π: 18 degrees
_FITS = 0.8  # R² below which neither law of growth is called a fit


def findings(report: Report) -> list[Finding]:
    """What the measurements say, most important first; a topic that was not measured is absent."""
    topics: tuple[Callable[[Report], Finding | None], ...] = (
        _growth,
        _updates,
        depth_finding,
        *CHANGES,
        _ratio,
        _alignment,
        _neighbours,
        _interaction,
        _angles,
        _lens,
        phases_finding,
        gradient_finding,
        *(_sinks, _precision, fetched_finding, _few),
    )
    return [finding for topic in topics if (finding := topic(report)) is not None]


def sentences(report: Report) -> list[str]:
    """The findings as plain text, one string each."""
    return [f"{finding.text} {finding.more}".strip() for finding in findings(report)]


def _growth(report: Report) -> Finding | None:
    norms = by_layer(report, "residual_norm")
    if len(norms) < 2:
        return None
    first, last = min(norms), max(norms)
    start, end = norms[first], norms[last]
    span = f"{number(start)} at x_{first}, {number(end)} at x_{last}"
    low, high = min(norms.values()), max(norms.values())
    if placements(report) == {"post"}:
        text = f"Post-LN: every unit's output is normalised, so the stream does not accumulate. Its mean norm is {span}"
        return Finding("Growth", text + ".", f"Over all states it lies between {number(low)} and {number(high)}.")
    factor = f" (× {number(end / start)})" if start > 0 else ""
    peak = max(norms, key=lambda layer: norms[layer])
    summit = f", largest at x_{peak}: {number(high)}" if high > 1.05 * max(start, end) else ""
    law, fits = _law(report, len(norms))
    more = " ".join(filter(None, (fits, _cross(report))))
    return Finding("Growth", f"The stream's mean norm is {span}{factor}{summit}{law}.", more)


def _law(report: Report, states: int) -> tuple[str, str]:
    """Which of the two fitted laws is closer, and how close both are; nothing for so few states that any law fits."""
    rate = "growth_rate_after" if "growth_rate_after" in report.growth else "growth_rate"  # older reports have no other
    said = {rate: ("a constant rate", "× {} a block", 4), "growth_power": ("a power law", "exponent {}", 3)}
    quality = {rate: report.growth.get(rate.replace("growth", "r2")), "growth_power": report.growth.get("r2_power")}
    known = {key: r2 for key, r2 in quality.items() if r2 is not None and _known(report.growth.get(key))}
    if not known or states < 4:
        return "", ""
    fits = "R² is " + ", ".join(f"{number(float(r2), 2)} for {said[key][0]}" for key, r2 in known.items()) + "."
    best = max(known, key=known.__getitem__)
    if known[best] < _FITS:
        return ", with no fitted law that describes it well", fits
    law, words, digits = said[best]
    return f", closest to {law}, {words.format(with_interval(report.growth[best], digits))}", fits


def _cross(report: Report) -> str:
    share = report.growth.get("cross_share")
    if not _known(share):
        return ""
    return f"The cross term of updates with the stream makes up {with_interval(share)} of the change in squared norm."


def _updates(report: Report) -> Finding | None:
    sizes = by_layer(report, "update_norm")
    rate = report.growth.get("update_growth_rate")
    if len(sizes) < 2:
        return None
    small, large = min(sizes, key=lambda i: sizes[i]), max(sizes, key=lambda i: sizes[i])
    text = (
        f"Block updates have norms of {number(sizes[small])} (block {small}) to {number(sizes[large])} (block {large})"
    )
    if not _known(rate) or len(sizes) < 3:
        return Finding("Update size", text + ".")
    fit = report.growth.get("r2_update")
    if fit is not None and fit < _FITS:
        return Finding("Update size", f"{text}; no constant rate a block describes them (R² {number(fit, 2)}).")
    low, high = ends(rate)
    verdict = "growing" if low > 1 else "shrinking" if high < 1 else "not told apart from constant"
    return Finding("Update size", f"{text}; trend × {with_interval(rate, 4)} a block: {verdict}.")


def _ratio(report: Report) -> Finding | None:
    rows = curve(report, "update_ratio")
    if rows.empty:
        return None
    values = by_layer(report, "update_ratio")
    if len(values) < 6:
        each = ", ".join(f"{with_interval(row)} in block {row['layer']}" for _, row in rows.iterrows())
        return Finding("Update ratio", f"A block's update against the stream it reads: {each}.")
    # medians, because a first block often overwrites the embedding many times over
    layers, third = sorted(values), len(values) // 3
    early, late = (median(values[i] for i in part) for part in (layers[:third], layers[-third:]))
    least = lowest(rows)
    text = (
        f"The median block's update is {number(early)} of the stream in the first third of the blocks, {number(late)} "
        f"in the last; least in block {least['layer']}: {with_interval(least)}."
    )
    return Finding("Update ratio", text)


def _alignment(report: Report) -> Finding | None:
    units = units_of(report, "update_alignment")
    if not units:
        return None
    said = [f"{_article(unit)} {_signs(report, unit)}" for unit in units]
    return Finding("Alignment", f"{capital(said[0])}.", " ".join(f"{capital(words)}." for words in said[1:]))


def _signs(report: Report, unit: str) -> str:
    """Where the cosine between update and stream is above, below, or not told apart from 0."""
    rows = curve(report, "update_alignment", unit)
    floor = report.resolution.get("update_alignment", 0.0)
    signs = [_sign(row, floor) for _, row in rows.iterrows()]
    words = {1: "along the stream", -1: "against the stream", 0: "with no sign that this sample can tell"}
    layers = [int(layer) for layer in rows["layer"]]
    where = {sign: ranges(layer for layer, s in zip(layers, signs, strict=True) if s == sign) for sign in words}
    stretches = ", ".join(
        f"{words[sign]} in block{'' if at.isdigit() else 's'} {at}" for sign, at in where.items() if at
    )
    told = [sign for sign, _ in groupby(sign for sign in signs if sign)]
    changes = sum(a != b for a, b in pairwise(told))
    change = f" (the sign changes {_times(changes)})" if changes else ""
    return f"points {stretches}{change}"


def _sign(row: Any, floor: float) -> int:
    low, high = ends(row)
    return 1 if low > floor else -1 if high < -floor else 0


def _neighbours(report: Report) -> Finding | None:
    rows = curve(report, "block_influence")
    if rows.empty:
        return None
    least, most = lowest(rows), highest(rows)
    if len(rows) == 1:
        return Finding("Similarity", f"Block {least['layer']} has a block influence of {with_interval(least)}.")
    text = f"Block {least['layer']} turns the stream least, block influence {with_interval(least)}"
    return Finding("Similarity", f"{text}; block {most['layer']} most, {with_interval(most)}.")


def _interaction(report: Report) -> Finding | None:
    rows = curve(report, "interaction_error")
    if rows.empty:
        return None
    least = lowest(rows)
    layer = int(least["layer"])
    text = f"Block {layer + 1} needs block {layer}'s update least: interaction error {with_interval(least)}"
    foreign = {int(row["layer"]): row for _, row in curve(report, "interaction_error_control").iterrows()}
    if not foreign:
        return Finding("Interaction", text + ".")
    floor = report.resolution.get("interaction_error", 0.0)
    verdicts = {int(row["layer"]): _against(row, foreign.get(int(row["layer"])), floor) for _, row in rows.iterrows()}
    if layer in foreign:
        text += f", {verdicts[layer]} its control, {with_interval(foreign[layer])}"
    count = {verdict: sum(v == verdict for v in verdicts.values()) for verdict in ("below", "above", "not apart from")}
    parts = ", ".join(f"{many} {verdict}" for verdict, many in count.items() if many)
    more = (
        f"The median over {len(rows)} neighbouring pair{plural(len(rows))} is {number(float(rows['value'].median()))}; "
        f"going by intervals that do not overlap, {parts} the control."
    )
    return Finding("Interaction", text + ".", more)


def _against(row: Any, control: Any, floor: float) -> str:
    if control is None or abs(row["value"] - control["value"]) <= floor:
        return "not apart from"
    (low, high), (control_low, control_high) = ends(row), ends(control)
    return "below" if high < control_low else "above" if low > control_high else "not apart from"


def _angles(report: Report) -> Finding | None:
    rows = report.pairs[report.pairs["metric"] == "angular_distance"]
    if rows.empty:
        return None
    close = rows[rows["value"] <= _CLOSE]
    if close.empty:
        nearest = lowest(rows)
        text = f"No two states are within an angular distance of {_CLOSE} ({_CLOSE * 180:.0f}°)"
        return Finding(
            "Angles", f"{text}; the closest are x_{nearest['i']} and x_{nearest['j']}: {with_interval(nearest)}."
        )
    width = close["j"] - close["i"]
    widest = close[width == width.max()]
    best = lowest(widest)
    count, blocks = int(best["j"] - best["i"]), report.model["blocks"]
    which = f"Block {best['i']} turns" if count == 1 else f"Blocks {best['i']}–{best['j'] - 1} together turn"
    text = f"{which} the stream by {with_interval(best)}: at {count} of {blocks}, the widest range"
    return Finding("Angles", f"{text} within an angular distance of {_CLOSE} ({_CLOSE * 180:.0f}°).")


def _lens(report: Report) -> Finding | None:
    top1, loss = by_layer(report, "lens_top1"), by_layer(report, "lens_loss")
    if len(top1) < 2:
        return None
    last = max(top1)
    starts = {share: _from(top1, share) for share in (0.5, 0.9)}
    said = [f"{share:.0%} {'only at' if at == last else 'from'} x_{at}" for share, at in starts.items()]
    text = f"Read by the model's own head, the stream's top-1 token is the final one at over {said[0]}, {said[1]}"
    more = ""
    if loss:
        first, end = min(loss), max(loss)
        more = f"The lens loss is {number(loss[first])} nats at x_{first}, {number(loss[end])} at x_{end}."
    return Finding("Lens", text + ".", more)


def _from(values: dict[int, float], bound: float) -> int:
    """The first layer from which on every value is above the bound; the last one where there is no such."""
    after = [layer for layer in values if values[layer] <= bound]
    later = [layer for layer in values if not after or layer > max(after)]
    return min(later, default=max(values))


def _sinks(report: Report) -> Finding | None:
    if not report.sinks:
        return Finding("Sinks", "No position's norm exceeds 50 times the median of its layer.")
    skip, sequences = report.corpus.get("skip_first", 0), report.corpus["sequences"]
    shown = sorted(report.sinks, key=lambda sink: -(sink["max_ratio"] or 0))
    top, others = shown[0], shown[1:]
    out = "left out of the averages" if top["position"] < skip else "counted in the averages"
    text = (
        f"Position {top['position']} is over 50 times its layer's median norm in {top['sequences']:,} of {sequences:,} "
        f"sequences, up to {number(top['max_ratio'])} times (norm {number(top['max_norm'])}); {out}."
    )
    counted = sum(sink["position"] >= skip for sink in others)
    more = f"It does so within x_{top['first_layer']} to x_{top['last_layer']}."
    if others:
        more += f" {len(others)} more position{plural(len(others))} over 50 times, {counted} of them counted."
    return Finding("Sinks", text, more)


def _precision(report: Report) -> Finding | None:
    if not report.resolution:
        return None
    usual = {"update_ratio", "block_influence", "interaction_error"}
    named = sorted(usual & set(report.resolution)) or sorted(report.resolution)[:3]
    each = ", ".join(f"{name} {number(report.resolution[name])}" for name in named)
    text = f"Run in {report.model['dtype']}: rounding alone gives {each}; what is no larger is not told apart."
    return Finding("Precision", text)


def _few(report: Report) -> Finding | None:
    if (documents := report.corpus.get("documents") or FEW) < FEW:
        text = f"Every interval rests on only {documents} documents: with fewer than {FEW} it tends to be too narrow."
        fewer = 0 if report.ablations.empty else int(report.merging.get("clusters") or 0)
        more = f"Those of changed models rest on {fewer} of them." if 0 < fewer < documents else ""
        return Finding("Few documents", text.replace("only", "at most", 1) if more else text, more)
    count = report.corpus["sequences"]
    run = count if report.ablations.empty else sequences(report)
    changed = run if report.ablations.empty else int(report.merging.get("clusters") or run)
    what = "documents" if changed < run else "sequences"
    if count >= FEW and changed >= FEW:
        return None
    if count >= FEW:  # the terminal says so beside the changes
        basis = f"only {changed} {what}" if changed > 1 else "one sequence only, and have none"
        text = (
            f"The intervals of skips, merges and other changes rest on {basis}: fewer than {FEW} tend to be too narrow."
        )
        return Finding("Few sequences", text, short="")
    text = f"Every interval rests on only {count} sequences: with fewer than {FEW} it tends to be too narrow."
    one = "There is one sequence only: nothing here has an interval over sequences."
    more = f"Changed models were run on {changed} of them." if changed < count else ""
    return Finding("Few sequences", text if count > 1 else one, more)


def _known(value: Any) -> bool:
    return isinstance(value, dict) and value.get("value") is not None


def _article(unit: str) -> str:
    return {"block": "the blocks' update", "attention": "attention's", "mlp": "the MLP's"}[unit]


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")

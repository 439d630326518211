"""What the first screen says: sentences that are true of the model at hand, whatever the model.

Every sentence states what was measured, with its interval where it has one, and concludes nothing beyond it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from depthprobe.report.schema import Report
from depthprobe.report.tables import by_layer, curve, number, placements, ranges, units_of, with_interval

__all__ = ["CAVEAT", "Finding", "findings", "headline", "sentences"]

CAVEAT = (
    "All of this was measured on unmodified runs over this corpus. It does not say how the loss would change if "
    "blocks were removed or merged."
)
_FEW = 32
_CLOSE = 0.1  # angular distance, in units of π: 18 degrees
_FITS = 0.8  # R² below which neither law of growth is called a fit


@dataclass(frozen=True)
class Finding:
    """One thing that was measured.

    Attributes:
        topic: one or two words.
        text: the sentence that matters.
        more: what qualifies it; empty if nothing does.
    """

    topic: str
    text: str
    more: str = ""


def findings(report: Report) -> list[Finding]:
    """What the measurements say, most important first; a topic that was not measured is absent."""
    topics: tuple[Callable[[Report], Finding | None], ...] = (
        _growth,
        _updates,
        _ratio,
        _alignment,
        _neighbours,
        _interaction,
        _angles,
        _lens,
        _sinks,
        _precision,
        _few,
    )
    return [finding for topic in topics if (finding := topic(report)) is not None]


def sentences(report: Report) -> list[str]:
    """The findings as plain text, one string each."""
    return [f"{finding.text} {finding.more}".strip() for finding in findings(report)]


def headline(report: Report) -> str:
    """One line on what was measured: depth, build, size, corpus."""
    model, corpus = report.model, report.corpus
    blocks, tokens = model["blocks"], corpus["sequences"] * corpus["tokens"]
    build = report.anatomy.get("summary")
    parts = [f"{blocks} block{_s(blocks)}", f"width {model['width']:,}", f"{_millions(model['parameters'])} parameters"]
    if build and placements(report):
        parts.insert(1, f"{build} norm{', parallel' if report.anatomy.get('parallel') else ''}")
    what = "positions" if model.get("inputs") == "states" else "tokens"
    over = f"{tokens:,} {what} in {corpus['sequences']:,} sequence{_s(corpus['sequences'])}"
    return f"{', '.join(parts)}; measured on {over}, {model['dtype']}"


def _growth(report: Report) -> Finding | None:
    norms = by_layer(report, "residual_norm")
    if len(norms) < 2:
        return None
    first, last = min(norms), max(norms)
    start, end = norms[first], norms[last]
    span = f"from {number(start)} at x_{first} to {number(end)} at x_{last}"
    if placements(report) == {"post"}:
        low, high = min(norms.values()), max(norms.values())
        text = f"Post-LN: every unit's output is normalised, so the stream does not accumulate; its mean norm goes {span}"
        return Finding("Growth", f"{text}, and stays between {number(low)} and {number(high)}.")
    factor = f", a factor of {number(end / start)}" if start > 0 else ""
    peak = max(norms, key=lambda layer: norms[layer])
    summit = f" (largest at x_{peak}: {number(norms[peak])})" if norms[peak] > 1.05 * max(start, end) else ""
    more = [_law(report), _cross(report)]
    return Finding("Growth", f"The stream's mean norm goes {span}{factor}{summit}.", " ".join(filter(None, more)))


def _law(report: Report) -> str:
    power, rate = report.growth.get("growth_power"), report.growth.get("growth_rate")
    fits = {name: report.growth.get(key) for name, key in (("power", "r2_power"), ("rate", "r2_rate"))}
    known = {
        name: r2
        for (name, r2), value in zip(fits.items(), (power, rate), strict=True)
        if r2 is not None and _known(value)
    }
    if not known:
        return ""
    quality = ", ".join(f"R² {number(r2, 2)} for a {'power law' if name == 'power' else 'constant rate'}"
                        for name, r2 in known.items())  # fmt: skip
    best = max(known, key=lambda name: known[name])
    if known[best] < _FITS:
        return f"Neither of the fitted laws describes it well ({quality})."
    if best == "rate":
        return f"A constant rate fits better: × {with_interval(rate, 4)} a block ({quality})." if len(known) > 1 else (
            f"A constant rate fits: × {with_interval(rate, 4)} a block ({quality}).")  # fmt: skip
    better = "fits better" if len(known) > 1 else "fits"
    return f"A power law {better}: exponent {with_interval(power)} ({quality})."


def _cross(report: Report) -> str:
    share = report.growth.get("cross_share")
    if not _known(share):
        return ""
    return f"The share of the squared norm's change that comes from alignment (cross term) is {with_interval(share)}."


def _updates(report: Report) -> Finding | None:
    sizes = by_layer(report, "update_norm")
    rate = report.growth.get("update_growth_rate")
    if len(sizes) < 2:
        return None
    small, large = min(sizes, key=lambda i: sizes[i]), max(sizes, key=lambda i: sizes[i])
    spread = f"block {small} ({number(sizes[small])}) to block {large} ({number(sizes[large])})"
    text = f"The blocks' updates differ in norm from {spread}"
    if sizes[small] > 0:
        text += f", a factor of {number(sizes[large] / sizes[small])}"
    if not _known(rate):
        return Finding("Update size", text + ".")
    trend = f"their trend is × {with_interval(rate, 4)} a block"
    if rate["ci_low"] is None or rate["ci_high"] is None:
        verdict = ""
    elif rate["ci_low"] > 1:
        verdict = ": later blocks write more"
    elif rate["ci_high"] < 1:
        verdict = ": later blocks write less"
    else:
        verdict = ": no trend that this sample can tell from a constant size"
    return Finding("Update size", f"{text}; {trend}{verdict}.")


def _ratio(report: Report) -> Finding | None:
    rows = curve(report, "update_ratio")
    if rows.empty:
        return None
    values = by_layer(report, "update_ratio")
    if len(values) < 6:
        each = ", ".join(f"{with_interval(row)} in block {row['layer']}" for _, row in rows.iterrows())
        return Finding("Update ratio", f"A block's update against the stream it reads: {each}.")
    layers, third = sorted(values), len(values) // 3
    early, late = (sum(values[i] for i in part) / third for part in (layers[:third], layers[-third:]))
    least = rows.loc[rows["value"].idxmin()]
    text = (
        f"A block's update is {number(early)} of the stream on average over the first third of the blocks "
        f"and {number(late)} over the last third; least in block {least['layer']}: {with_interval(least)}."
    )
    return Finding("Update ratio", text)


def _alignment(report: Report) -> Finding | None:
    units = units_of(report, "update_alignment")
    if not units:
        return None
    said = [f"{_article(unit)} {_signs(report, unit)}" for unit in units]
    return Finding("Alignment", f"{_capital(said[0])}.", " ".join(f"{_capital(words)}." for words in said[1:]))


def _signs(report: Report, unit: str) -> str:
    """Where the cosine between update and stream is above, below, or not told apart from 0."""
    rows = curve(report, "update_alignment", unit)
    floor = report.resolution.get("update_alignment", 0.0)
    signs = [_sign(row, floor) for _, row in rows.iterrows()]
    words = {1: "along the stream", -1: "against it", 0: "with no sign that this sample can tell"}
    where = {sign: ranges(int(row["layer"]) for (_, row), s in zip(rows.iterrows(), signs, strict=True) if s == sign)
             for sign in (1, -1, 0)}  # fmt: skip
    stretches = ", ".join(f"{words[sign]} in {'block' if where[sign].isdigit() else 'blocks'} {where[sign]}"
                          for sign in (1, -1, 0) if where[sign])  # fmt: skip
    told = [sign for sign, _ in groupby(sign for sign in signs if sign)]
    changes = sum(a != b for a, b in pairwise(told))
    change = f" (the sign changes {_times(changes)})" if changes else ""
    return f"points {stretches}{change}"


def _sign(row: Any, floor: float) -> int:
    low, high = _ends(row)
    return 1 if low > floor else -1 if high < -floor else 0


def _neighbours(report: Report) -> Finding | None:
    rows = curve(report, "block_influence")
    if rows.empty:
        return None
    least, most = rows.loc[rows["value"].idxmin()], rows.loc[rows["value"].idxmax()]
    text = f"Block {least['layer']} turns the stream least: block influence {with_interval(least)}"
    if len(rows) > 1:
        text += f"; block {most['layer']} turns it most: {with_interval(most)}"
    return Finding("Similarity", text + ".")


def _interaction(report: Report) -> Finding | None:
    rows = curve(report, "interaction_error")
    if rows.empty:
        return None
    least = rows.loc[rows["value"].idxmin()]
    layer = int(least["layer"])
    text = (
        f"Block {layer + 1} depends least on the update just before it, block {layer}'s: "
        f"interaction error {with_interval(least)}"
    )
    control = curve(report, "interaction_error_control")
    if control.empty:
        return Finding("Interaction", text + ".")
    foreign = {int(row["layer"]): row for _, row in control.iterrows()}
    floor = report.resolution.get("interaction_error", 0.0)
    verdicts = {int(row["layer"]): _against(row, foreign.get(int(row["layer"])), floor) for _, row in rows.iterrows()}
    if layer in foreign:
        text += f", {verdicts[layer]} its control, {with_interval(foreign[layer])}"
    count = {verdict: sum(v == verdict for v in verdicts.values()) for verdict in ("below", "above", "not apart from")}
    parts = ", ".join(f"{many} {verdict}" for verdict, many in count.items() if many)
    more = f"Of {len(rows)} neighbouring pair{_s(len(rows))}, with intervals that do not overlap: {parts} the control."
    more += f" The median error is {number(float(rows['value'].median()))}."
    return Finding("Interaction", text + ".", more)


def _against(row: Any, control: Any, floor: float) -> str:
    if control is None or abs(row["value"] - control["value"]) <= floor:
        return "not apart from"
    (low, high), (control_low, control_high) = _ends(row), _ends(control)
    return "below" if high < control_low else "above" if low > control_high else "not apart from"


def _angles(report: Report) -> Finding | None:
    rows = report.pairs[report.pairs["metric"] == "angular_distance"]
    if rows.empty:
        return None
    close = rows[rows["value"] <= _CLOSE]
    if close.empty:
        nearest = rows.loc[rows["value"].idxmin()]
        text = f"No two states are within an angular distance of {_CLOSE} ({_CLOSE * 180:.0f}°)"
        return Finding("Angles", f"{text}; the closest are x_{nearest['i']} and x_{nearest['j']}: {with_interval(nearest)}.")
    width = close["j"] - close["i"]
    widest = close[width == width.max()]
    best = widest.loc[widest["value"].idxmin()]
    count = int(best["j"] - best["i"])
    which = f"block {best['i']} turns" if count == 1 else f"blocks {best['i']}–{best['j'] - 1} together turn"
    text = f"The widest range within an angular distance of {_CLOSE} ({_CLOSE * 180:.0f}°): {which} the stream by "
    return Finding("Angles", f"{text}{with_interval(best)}, {count} of {report.model['blocks']} blocks.")


def _lens(report: Report) -> Finding | None:
    top1 = by_layer(report, "lens_top1")
    if len(top1) < 2:
        return None
    last = max(top1)
    said = [(share, _from(top1, share)) for share in (0.5, 0.9)]
    words = [f"{share * 100:.0f} % {'only in' if layer == last else 'from'} x_{layer}{'' if layer == last else ' on'}"
             for share, layer in said]  # fmt: skip
    text = f"Read through the model's own head, the stream agrees with the final top-1 token at more than {words[0]}, {words[1]}."
    loss = by_layer(report, "lens_loss")
    more = f"The lens loss goes from {number(loss[min(loss)])} nats at x_{min(loss)} to {number(loss[max(loss)])} at x_{max(loss)}." if loss else ""  # fmt: skip  # noqa: E501
    return Finding("Lens", text, more)


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
    top = shown[0]
    out = "left out of the averages" if top["position"] < skip else "counted in the averages"
    text = (
        f"Position {top['position']} exceeds 50 times its layer's median norm in {top['sequences']:,} of {sequences:,} "
        f"sequences (x_{top['first_layer']} to x_{top['last_layer']}): up to {number(top['max_norm'])}, "
        f"{number(top['max_ratio'])} times the median; it is {out}."
    )
    others = len(shown) - 1
    counted = sum(sink["position"] >= skip for sink in shown[1:])
    more = f"{others} other position{_s(others)} exceed{'s' if others == 1 else ''} it too, {counted} of them counted in the averages." if others else ""  # fmt: skip  # noqa: E501
    return Finding("Sinks", text, more)


def _precision(report: Report) -> Finding | None:
    if not report.resolution:
        return None
    named = [name for name in ("update_ratio", "block_influence", "interaction_error") if name in report.resolution]
    named = named or sorted(report.resolution)[:3]
    each = ", ".join(f"{name} {number(report.resolution[name])}" for name in named)
    return Finding("Precision", f"Run in {report.model['dtype']}, where rounding alone gives {each}: no difference below that is drawn.")  # noqa: E501


def _few(report: Report) -> Finding | None:
    count = report.corpus["sequences"]
    if count >= _FEW:
        return None
    text = "There is one sequence only, so nothing has an interval over sequences."
    if count > 1:
        text = f"Every interval rests on only {count} sequences; below {_FEW} a bootstrap tends to be too narrow."
    return Finding("Few sequences", text)


def _ends(row: Any) -> tuple[float, float]:
    """The interval's ends; the value itself where there is none."""
    value, low, high = float(row["value"]), row["ci_low"], row["ci_high"]
    return (value, value) if low != low or high != high or low is None or high is None else (float(low), float(high))


def _known(value: Any) -> bool:
    return isinstance(value, dict) and value.get("value") is not None


def _millions(parameters: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= size:
            return f"{parameters / size:.3g} {letter}"
    return str(parameters)


def _article(unit: str) -> str:
    return {"block": "the blocks' update", "attention": "attention's", "mlp": "the MLP's"}[unit]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _s(count: int) -> str:
    return "" if count == 1 else "s"

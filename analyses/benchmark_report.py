"""What the rounds of `benchmark.py` come to: ratios, tables in markdown, sentences and a figure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from depthprobe.report.figures import drawn
from depthprobe.report.panels import LIGHT

GROUPS = ("captures", "sweeps")
HOOKED = ("nnsight", "transformer_lens")
NAMES = {"transformers": "transformers", "nnsight": "nnsight", "transformer_lens": "TransformerLens"}
DPI = 110
TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
MARKERS = ("o", "s", "^", "D")
Entry = dict[str, Any]


@dataclass(frozen=True)
class Timed:
    """A time of a round: of a run, or of some parts of it."""

    run: str
    parts: tuple[str, ...] = ()

    def of(self, done: dict[str, Any], kind: int) -> float | None:
        """Seconds by the clock (0) or of CPU time (1); None where the run is not there."""
        if self.run not in done:
            return None
        times = done[self.run]["times"]
        return sum(times[part][kind] for part in self.parts or times)


@dataclass(frozen=True)
class Comparison:
    """Two times of the same rounds, and the most that their ratio may be on the first checkpoint."""

    group: str
    words: str
    above: Timed
    below: Timed
    limit: float | None = None


FORWARD = Timed("transformers forward")
PROBES = Timed("depthprobe probes")
QUARTER, EVERY = Timed("depthprobe quarter"), Timed("depthprobe every")
CAPTURES = (
    ("depthprobe: `analyze`'s probes", PROBES),
    ("nnsight: block outputs", Timed("nnsight capture")),
    ("nnsight: block outputs and statistics", Timed("nnsight statistics")),
    ("nnsight: block outputs and statistics, no head", Timed("nnsight stopped")),
    ("TransformerLens: `run_with_cache`", Timed("transformer_lens cache")),
    ("TransformerLens: block outputs", Timed("transformer_lens capture")),
    ("TransformerLens: block outputs and statistics", Timed("transformer_lens statistics")),
)
PER_FORWARD = tuple(
    Comparison("per forward pass", words, timed, FORWARD, 1.25 if timed is PROBES else None)
    for words, timed in CAPTURES
)
PROBES_PER = tuple(
    Comparison("probes against", words, PROBES, timed, 1.0 if timed.run == "transformer_lens cache" else None)
    for words, timed in CAPTURES[1:]
)


def _swept(words: str, ours: Timed, part: str, limit: float) -> tuple[Comparison, ...]:
    """A sweep against one forward pass a schedule with the logits of all positions."""
    group = "sweep against"
    return tuple(
        Comparison(group, f"{NAMES[tool]}: {words}", ours, Timed(f"{tool} sweep", ("forward", part)), limit)
        for tool in HOOKED
    )


SWEPT = (
    *_swept("a quarter of the positions scored", QUARTER, "quarter", 0.5),
    *_swept("every position scored", EVERY, "every", 0.65),
    *(
        Comparison("sweep against", f"{NAMES[tool]}: a quarter, the head given no other position", QUARTER, timed)
        for tool in HOOKED
        for timed in (Timed(f"{tool} thrifty"),)
    ),
)
COMPARISONS = (*PER_FORWARD, *PROBES_PER, *SWEPT)


def compared(entry: Entry) -> list[dict[str, Any]]:
    """What the rounds come to: of each comparison the ratios of all rounds, by the clock and by CPU time."""
    rows = []
    done = [each for group in GROUPS for each in entry["rounds"][group]]
    for item in COMPARISONS:
        row: dict[str, Any] = {"group": item.group, "words": item.words, "limit": item.limit}
        for kind, name in enumerate(("clock", "cpu")):
            pairs = [(item.above.of(each, kind), item.below.of(each, kind)) for each in done]
            both = [(a, b) for a, b in pairs if a is not None and b]
            ratios = [a / b for a, b in both]
            if ratios:
                row[name] = {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
                row[f"{name}_seconds"] = [statistics.median(side) for side in zip(*both, strict=True)]
        if "clock" in row:
            rows.append(row)
    return rows


def brief(found: Entry, entries: Sequence[Entry]) -> str:
    """The tables in markdown, and what the first checkpoint was held to: what the project's README shows."""
    return "\n".join([*_tables(found, entries), "", *_limits(entries[0])])


def text(found: Entry, entries: Sequence[Entry]) -> str:
    """Tables in markdown, then sentences."""
    lines = _tables(found, entries)
    for entry in entries:
        lines += ["", *_sentences(entry)]
    return "\n".join([*lines, "", *_limits(entries[0])])


def _tables(found: Entry, entries: Sequence[Entry]) -> list[str]:
    where, versions = found["machine"], found["versions"]
    lines = [
        f"{where['cpu']}, {where['threads']} threads of {where['cores']} cores, load {where['load']:.1f} at the start; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f"; medians of {found['repeats']} rounds, and all of them."
    ]
    heads = [f"{_short(e)}, {e['captured'][0]} × {e['captured'][1]}" for e in entries]
    lines += ["", *_table("time over that of a bare forward pass", heads, entries, "per forward pass")]
    lines += ["", *_table("`analyze`'s probes over", heads, entries, "probes against")]
    heads = [f"{_short(e)}, {e['swept'][0]} × {e['swept'][1]}, {e['schedules']} schedules" for e in entries]
    return [*lines, "", *_table("depthprobe's sweep over", heads, entries, "sweep against")]


def _table(corner: str, heads: Sequence[str], entries: Sequence[Entry], group: str) -> list[str]:
    lines = [f"| {corner} | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for item in COMPARISONS:
        if item.group != group:
            continue
        cells = []
        for entry in entries:
            row = next((r for r in entry["comparisons"] if (r["group"], r["words"]) == (group, item.words)), None)
            cells.append("–" if row is None else _range(row["clock"]))
        lines.append(f"| {item.words} | " + " | ".join(cells) + " |")
    return lines


def _range(ratio: dict[str, float]) -> str:
    return f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def _short(entry: Entry) -> str:
    return Path(entry["checkpoint"]).name.split("-Instruct")[0]


def _sentences(entry: Entry) -> list[str]:
    """What the tables leave out: refusals, agreement, memory, opening, and every place where depthprobe is behind."""
    name = _short(entry)
    said = []
    for tool, what in entry["tools"].items():
        if "refused" in what:
            said.append(f"{name}: {NAMES.get(tool, tool)} does not open it ({what['refused']}).")
    if entry["distance"]:
        furthest = max(max(found.values()) for found in entry["distance"].values())
        said.append(f"{name}: the tools' numbers are at most {furthest:.1g} from depthprobe's, relatively.")
    ready = {tool: what["wrapped"] for tool, what in entry["tools"].items() if tool in HOOKED and "wrapped" in what}
    said.append(
        f"{name}: once its weights are loaded, depthprobe takes {entry['verified']:.1f} s to read the text and to "
        "verify what it found"
        + "".join(f", {NAMES[tool]} {seconds:.1f} s to wrap it" for tool, seconds in ready.items())
        + "."
    )
    peaks: dict[str, dict[str, int]] = {}
    for group in GROUPS:
        for run, done in (item for each in entry["rounds"][group] for item in each.items()):
            of = peaks.setdefault(run.split()[0], {})
            of[group] = max(of.get(group, 0), done["peak_mib"] or 0)
    if any(mib for of in peaks.values() for mib in of.values()):
        each = [f"{NAMES.get(tool, tool)} {' and '.join(f'{m:,}' for m in of.values())}" for tool, of in peaks.items()]
        said.append(f"{name}: peak memory in MiB, of captures and of sweeps: {', '.join(each)}.")
    behind = [
        f"{row['words']} ({row['clock']['ratio']:.2f})"
        for row in entry["comparisons"]
        if row["group"] != "per forward pass" and row["clock"]["ratio"] > 1
    ]
    if behind:
        said.append(f"{name}: depthprobe is slower than {'; '.join(behind)}.")
    return [f"- {sentence}" for sentence in said]


def _limits(entry: Entry) -> list[str]:
    """Whether the first checkpoint keeps to what was set."""
    lines = []
    for row in entry["comparisons"]:
        if row["limit"] is not None:
            word = "held" if row["clock"]["ratio"] <= row["limit"] else "MISSED"
            lines.append(
                f"- {word}: {row['group']} {row['words']} {row['clock']['ratio']:.3f} by the clock, "
                f"{row['cpu']['ratio']:.3f} by CPU time; at most {row['limit']:g}"
            )
    return lines


def draw(entries: Sequence[dict[str, Any]]) -> bytes:
    """A png: medians of the rounds as points, the smallest and the largest ratio as lines."""
    table = pd.DataFrame(
        [
            {"model": _short(entry), "group": row["group"], "words": row["words"].replace("`", ""), **row["clock"]}
            for entry in entries
            for row in entry["comparisons"]
        ]
    )
    models = list(dict.fromkeys(table["model"]))
    groups = {
        "per forward pass": "time / that of a bare forward pass",
        "sweep against": "time of depthprobe's sweep / the other's",
    }
    there = [group for group in groups if group in set(table["group"])]

    def panels(axes: Sequence[Axes]) -> None:
        for ax, group in zip(axes, there, strict=True):
            _points(ax, table[table["group"] == group], models)
            ax.axvline(1, color=LIGHT.ink, linewidth=0.8, zorder=0)
            ax.set(xlabel=groups[group], ylabel="")
            sns.move_legend(ax, "lower center", bbox_to_anchor=(0.3, 1), ncol=4, title=None, frameon=False)

    return drawn(panels, 3.4 * len(there), len(there), shared=False, dpi=DPI)


def _points(ax: Axes, table: pd.DataFrame, models: Sequence[str]) -> None:
    words = list(dict.fromkeys(table["words"]))
    # The three numbers of a ratio go in as three observations: their median is drawn, and their range.
    long = table.melt(["model", "words"], ["low", "ratio", "high"], value_name="time")
    sns.pointplot(
        long, x="time", y="words", hue="model", order=words, hue_order=models, estimator="median",
        errorbar=("pi", 100), dodge=0.5 if len(models) > 1 else False, linestyle="none", markersize=4,
        markers=list(MARKERS[: len(models)]), err_kws={"linewidth": 1.2}, palette=list(LIGHT.lines[: len(models)]),
        ax=ax,
    )  # fmt: skip
    low, high = min(1.0, table["low"].min()), max(1.0, table["high"].max())
    if high > 4:
        ax.set_xscale("log")
        ticks = [tick for tick in TICKS if low / 1.2 <= tick <= high * 1.2]
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.minorticks_off()
    ax.set_yticks(range(len(words)), [each.replace(": ", ":\n", 1) if len(each) > 30 else each for each in words])

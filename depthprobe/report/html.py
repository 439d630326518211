"""The report as one page that opens offline: no script, no request, every name escaped."""

from __future__ import annotations

import base64
import re
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
import markupsafe

from depthprobe.glossary import METRICS, NOTATION, Metric
from depthprobe.report import ablation_tables, depth_tables, figures, gradient_tables, tables
from depthprobe.report.ablation_panels import ABLATION_PANELS
from depthprobe.report.depth_panels import DEPTH_PANELS, LATER_PANELS
from depthprobe.report.fetched import fetched_words
from depthprobe.report.findings import findings
from depthprobe.report.gradient_panels import GRADIENT_PANELS
from depthprobe.report.headline import caveat, headline
from depthprobe.report.panels import DARK, LIGHT, PANELS, Panel, Theme
from depthprobe.report.phase_panels import PHASE_PANELS
from depthprobe.report.schema import Report

__all__ = ["data_uri", "environment", "fragment", "page", "resource"]


def page(report: Report) -> str:
    """The whole page, figures included in a light and a dark variant."""
    return environment().get_template("page.html.jinja").render(**_common(report), **_details(report))


def fragment(report: Report) -> str:
    """What a notebook shows: the findings and one line a layer."""
    return environment().get_template("fragment.html.jinja").render(
        **_common(report), table=tables.layer_table(report, 12)
    )  # fmt: skip


@cache
def environment() -> jinja2.Environment:
    """The templates of this folder, with the filters that they write numbers and formulas by."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(resource),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["number"] = tables.number
    environment.filters["share"] = tables.with_interval
    environment.filters["formula"] = _subscripts
    environment.filters["visible"] = tables.visible
    environment.filters["shortened"] = tables.shortened
    return environment


def resource(name: str) -> str:
    """The text of a file of this folder."""
    return (files("depthprobe.report") / name).read_text(encoding="utf-8")


def _subscripts(text: Any) -> markupsafe.Markup:
    """Escaped text with the subscripts of its formulas set as such: x_l, Δ_l, x_{l+1}; names_with_underscores stay."""
    return markupsafe.Markup(_SUBSCRIPT.sub(r"\1<sub>\2\3</sub>", str(markupsafe.escape(text))))


_SUBSCRIPT = re.compile(r"(?<![A-Za-z0-9_])([A-Za-zμρσΔ])_(?:\{([^{}<>&]*)\}|([A-Za-z0-9]+))(?![\w])")


def _common(report: Report) -> dict[str, Any]:
    return {"report": report, "findings": findings(report), "headline": headline(report), "caveat": caveat(report)}


def _details(report: Report) -> dict[str, Any]:
    used = tables.metrics_used(report)
    return {
        "css": resource("page.css"),
        "title": report.model["name"],
        "version": report.run["depthprobe"],
        "sections": _sections(report, PANELS, used),
        "deep": _deep(report, used) if report.deep else None,
        "phases": _sections(report, PHASE_PANELS, used) if report.phases else [],
        "gradients": _gradients(report, used) if report.gradients else None,
        "changes": None if report.ablations.empty else _changes(report, used),
        "skipped": tables.skipped_rows(report),
        "anatomy": tables.anatomy_rows(report.anatomy),
        "table": tables.layer_table(report),
        "facts": _facts(report),
        "growth": [(METRICS[name], report.growth[name]) for name in _GROWTH if name in used],
        "notes": _notes(report),
        "glossary": [metric for metric in METRICS.values() if metric.name in used],
        "notation": NOTATION,
    }


def _sections(report: Report, panels: tuple[Panel, ...], used: set[str]) -> list[dict[str, Any]]:
    """What the page shows of each figure, or why it is missing; those that nothing is said on are left out."""
    there = figures.available(report)
    sections = []
    for panel in panels:
        reason = None if panel.name in there else figures.reason_missing(report, panel.name)
        section: dict[str, Any] = {"panel": panel, "reason": reason, "metrics": _entries(panel.metrics, used)}
        if panel.name in there:
            section |= {
                "light": _image(report, panel.name, LIGHT),
                "dark": _image(report, panel.name, DARK),
                "alt": figures.alt_text(report, panel.name),
                "height": round(panel.height * 96),
            }
        if panel.name in there or reason:
            sections.append(section)
    return sections


def _deep(report: Report, used: set[str]) -> dict[str, Any]:
    """What the page shows of effective depth."""
    return {
        "facts": depth_tables.depth_facts(report),
        "sections": _sections(report, DEPTH_PANELS, used),
        "controls": [depth_tables.CONTROLS[name] for name in depth_tables.control_names(report)],
        "lines": depth_tables.depth_lines(report),
        "costs": depth_tables.costs(report),
    }


def _gradients(report: Report, used: set[str]) -> dict[str, Any]:
    """What the page shows of gradients."""
    return {
        "facts": gradient_tables.facts(report),
        "sections": _sections(report, GRADIENT_PANELS, used),
        "weights": gradient_tables.weight_table(report),
    }


def _changes(report: Report, used: set[str]) -> dict[str, Any]:
    """What the page shows of changed models."""
    merging = report.merging
    counted = report.ablations[["schedule", "combine"]].drop_duplicates()
    controls = bool((report.ablations["kind"] == "control").any())
    size = tables.number(ablation_tables.sequences(report))
    size += f" × {tables.number(merging['tokens'])}" if merging.get("tokens") else " sequences"
    cost, base = ablation_tables.cost_metric(report), merging.get("base_loss")
    share = merging.get("score_positions") if cost == "kl" else None  # a state is compared at every position
    made, plain, seconds = (merging.get(key) for key in ("evaluations", "plain_evaluations", "seconds"))
    facts = [
        ("schedules", tables.number(len(counted)) + (", controls included" if controls else "")),
        ("measured on", size + (f", {share:.3g} of the positions scored" if share and share < 1 else "")),
        ("unchanged loss", base and f"{tables.with_interval(base)} nats a token"),
        ("work", made and f"{tables.number(made)} block evaluations; one pass a schedule takes {tables.number(plain)}"),
        ("weights fetched", fetched_words(merging.get("fetched"))),
        ("time", seconds and f"{tables.number(seconds)} s"),
    ]
    drawn = used - {"state_distance"} if cost == "kl" else used
    return {
        "facts": [(key, value) for key, value in facts if value],
        "sections": _sections(report, ABLATION_PANELS if report.deep else (*ABLATION_PANELS, *LATER_PANELS), drawn),
        "table": ablation_tables.schedule_table(report),
    }


_GROWTH = ("cross_share", "growth_power", "growth_rate", "update_growth_rate")


def _entries(names: tuple[str, ...], used: set[str]) -> list[Metric]:
    return [METRICS[name] for name in names if name in used]


def data_uri(svg: bytes) -> str:
    """An image that a page carries in itself."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def _image(report: Report, name: str, theme: Theme) -> str:
    return data_uri(figures.render(report, name, "svg", theme))


def _notes(report: Report) -> list[str]:
    everything = [*report.notes, *report.model["notes"], *report.corpus["notes"], *report.anatomy["notes"],
                  *report.deep.get("notes", []), *report.phases.get("notes", []), *report.gradients.get("notes", []),
                  *report.merging.get("notes", [])]  # fmt: skip
    return list(dict.fromkeys(everything))


def _facts(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    """Groups of (what, value), without those that have no value."""
    model, corpus, cost, run = report.model, report.corpus, report.cost, report.run
    machine = run.get("machine") or {}
    first = corpus.get("first_tokens") or []
    groups = [
        ("Model", [
            ("source", model["source"]), ("format", model["format"]), ("revision", model["revision"]),
            ("architecture", model["architecture"]), ("parameters", tables.number(model["parameters"])),
            ("blocks", tables.number(model["blocks"])), ("width", tables.number(model["width"])),
            ("vocabulary", model["vocab_size"] and tables.number(model["vocab_size"])),
            ("objective", model["objective"] or "none: no language-model head"), ("inputs", model["inputs"]),
            ("dtype, device", f"{model['dtype']}, {model['device']}"),
        ]),
        ("Corpus", [
            ("text", corpus["name"]), ("sha256", corpus["sha256"]),
            ("size", f"{tables.number(corpus['sequences'])} × {tables.number(corpus['tokens'])}"
                     f" ({'positions' if model['inputs'] == 'states' else 'tokens'})"),
            ("documents", corpus["documents"] and tables.number(corpus["documents"])),
            ("in front", corpus["bos"]), ("first ids", " ".join(map(str, corpus["first_ids"] or []))),
            ("first tokens", " ".join(f"⟨{tables.visible(token)}⟩" for token in first)),
            ("left out", _left_out(corpus["skip_first"])),
        ]),
        ("Run", [
            ("seed", run.get("seed")), ("depthprobe", run.get("depthprobe")),
            ("versions", ", ".join(f"{name} {version}" for name, version in (run.get("versions") or {}).items())),
            ("machine", ", ".join(f"{name} {_round(value)}" for name, value in machine.items())),
            ("cost", f"{tables.number(cost['forward_passes'])} forward passes, "
                     f"{tables.number(cost['block_evaluations'])} block evaluations, "
                     f"{tables.number(cost['seconds'])} s"),
            ("weights fetched", fetched_words(cost.get("fetched"))),
            ("options", ", ".join(f"{name}={value}" for name, value in (run.get("options") or {}).items())),
            ("written", run.get("created")),
        ]),
    ]  # fmt: skip
    return [(name, [(key, str(value)) for key, value in rows if value not in (None, "")]) for name, rows in groups]


def _left_out(skip: int) -> str:
    if not skip:
        return "no position"
    which = "position 0" if skip == 1 else f"positions 0–{skip - 1}"
    return f"{which} of every sequence, from the metrics of the stream"


def _round(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)

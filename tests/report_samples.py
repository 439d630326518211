"""Reports made from simple formulas, one for each kind of model that a page must be right about."""

import math
from dataclasses import replace

import pandas as pd

from depthprobe.report import Report
from depthprobe.report.schema import ABLATION_COLUMNS, LAYER_COLUMNS, PAIR_COLUMNS

HOSTILE = "<script>alert(1)</script> \"quoted\" 'n' &amp; {{ 7 * 7 }} \u202e层 \udc80 " + "very-long-name-" * 20


def sample(blocks=12, units=("block", "attention", "mlp"), post=False, sequences=32, lens=True):
    """A report with every metric: norms grow by 12 % a block (or stay, for post), everything else follows."""
    rows, last = [], blocks
    growth = 1.0 if post else 1.12
    norm = [10 * growth**l for l in range(blocks + 1)]

    def add(metric, layer, value, unit="block", width=0.04):
        spread = width * abs(value) + 0.002
        low, high = (value - spread, value + spread) if sequences > 1 else (math.nan, math.nan)
        rows.append((layer, unit, metric, value, low, high, sequences))

    for l in range(blocks + 1):
        add("residual_norm", l, norm[l])
        add("residual_norm_median", l, 0.9 * norm[l])
        add("residual_rms", l, norm[l] / math.sqrt(64))
        if lens:
            share = 1.0 if l == last else 0.95 * (l / last) ** 2
            add("lens_loss", l, 3.0 + 4 * (1 - l / last))
            add("lens_kl", l, 5 * (1 - l / last))
            add("lens_top1", l, share, width=0.01)
    for l in range(blocks):
        depth = l / max(1, blocks - 1)
        for unit, size in zip(units, (1.0, 0.6, 0.7), strict=False):
            add("update_norm", l, size * (4 + l), unit)
            add("update_ratio", l, size * (0.8 - 0.6 * depth), unit)
            add("update_ratio_median", l, size * (0.75 - 0.6 * depth), unit)
            add("update_share", l, 0.4 - 0.3 * depth, unit)
            add("update_energy_share", l, 0.3 - 0.2 * depth, unit)
            add("update_alignment", l, size * (0.4 - 0.9 * depth), unit)
            if l < last - 1:
                add("update_cosine_next", l, 0.1, unit)
        turn = 0.02 + 0.3 * (depth - 0.6) ** 2
        add("cosine_adjacent", l, 1 - turn, width=0.001)
        add("cosine_adjacent_centred", l, 1 - 2 * turn, width=0.001)
        add("cosine_adjacent_standardised", l, 1 - 3 * turn, width=0.001)
        add("block_influence", l, turn, width=0.01)
        add("cka_adjacent", l, 1 - turn / 2, width=0.001)
        add("linearity", l, 0.99 - turn, width=0.001)
        add("linearity_update", l, 0.5 - 0.2 * depth)
        if l < last - 1:
            add("interaction_error", l, 0.6 - 0.4 * depth)
            add("interaction_error_control", l, 0.5 - 0.1 * depth)
            add("interaction_cosine", l, 0.8 + 0.1 * depth)
    pairs = []
    for i in range(blocks + 1):
        for j in range(i + 1, blocks + 1):
            angle = min(0.5, 0.02 * (j - i) + 0.05 * math.exp(-i))
            pairs.append((i, j, "angular_distance", angle, angle - 0.002, angle + 0.002, sequences))
            pairs.append((i, j, "cosine", math.cos(math.pi * angle), 0.0, 1.0, sequences))

    updates = [float(sum((4 + k) ** 2 for k in range(l))) for l in range(blocks + 1)]
    placement = "post" if post else "pre"
    unit = {"placement": placement, "module": "blocks.attn", "scale": 1.0, "skip_scale": 1.0}
    found = len(units) > 1
    return Report(
        model={
            "name": "sample-12", "source": "models/sample-12", "format": "directory", "revision": None,
            "architecture": "SampleForCausalLM", "parameters": 1_234_567, "dtype": "float32", "device": "cpu",
            "blocks": blocks, "width": 64, "inputs": "ids", "objective": "causal" if lens else None,
            "vocab_size": 1024, "notes": [],
        },
        corpus={
            "name": "pydoc_data.topics", "sha256": "ab" * 32, "sequences": sequences, "tokens": 256, "documents": 40,
            "bos": "one BOS (id 1) in front", "first_ids": [1, 17, 300], "first_tokens": ["<s>", "The", "Ġ<b>"],
            "skip_first": 1, "notes": [],
        },
        anatomy={
            "summary": placement, "block_list": "model.layers", "parallel": False,
            "blocks": [{"index": i, "attention": dict(unit) if found else None,
                        "mlp": dict(unit, module="blocks.mlp") if found else None} for i in range(blocks)],
            "notes": [] if found else ["sublayers were not found: the branches do not add up to the block"],
        },
        verification=[
            {"name": "replay", "what": "blocks run one by one reproduce the model's own logits", "value": 1.2e-7,
             "floor": 5e-4, "passed": True, "level": "model"},
            {"name": "branches", "what": "branches reconstruct every block", "value": 3e-7 if found else 0.4,
             "floor": 5e-4, "passed": found, "level": "sublayers"},
        ],
        layers=pd.DataFrame(rows, columns=list(LAYER_COLUMNS)).astype(LAYER_COLUMNS),
        pairs=pd.DataFrame(pairs, columns=list(PAIR_COLUMNS)).astype(PAIR_COLUMNS),
        growth={
            "cross_share": {"value": 0.35, "ci_low": 0.33, "ci_high": 0.37},
            "growth_power": {"value": 0.52, "ci_low": 0.5, "ci_high": 0.54},
            "growth_rate": {"value": growth, "ci_low": growth - 0.005, "ci_high": growth + 0.005},
            "update_growth_rate": {"value": 1.1, "ci_low": 1.08, "ci_high": 1.12},
            "r2_power": 0.91, "r2_rate": 0.99,
            "decomposition": [
                {"layer": l, "stream": norm[l] ** 2, "start": norm[0] ** 2, "updates": updates[l],
                 "cross": norm[l] ** 2 - norm[0] ** 2 - updates[l]} for l in range(blocks + 1)
            ],
        },
        sinks=[{"position": 0, "sequences": sequences, "first_layer": 2, "last_layer": blocks, "max_norm": 22_000.0,
                "max_ratio": 150.0}] if blocks > 2 else [],
        skipped=[{"metric": "residual_norm", "layer": blocks // 2, "unit": "block", "without": 20.0,
                  "including": 106.0}],
        resolution={},
        cost={"forward_passes": 2.5, "block_evaluations": 1234, "seconds": 61.5},
        run={
            "command": "depthprobe analyze models/sample-12 --out reports/sample-12", "seed": 0, "depthprobe": "0.1.0",
            "versions": {"torch": "2.13.0", "transformers": "5.24.0", "python": "3.11.2"},
            "machine": {"cpu": "a processor", "cores": 2, "threads": 2, "memory_gib": 8.0},
            "options": {"tokens": 8192, "seq_len": None}, "created": "2026-01-02T03:04:05+00:00",
        },
        notes=["Attention maps were not measured."],
    )  # fmt: skip


def headless():
    """A post-LN encoder without a head."""
    report = sample(6, post=True, lens=False)
    return replace(report, notes=["The logit lens was left out: the model has no language-model head."])


def blocks_only():
    return sample(units=("block",))


def one_block():
    return sample(1, sequences=1)


def half():
    report = sample()
    floors = {"update_ratio": 0.05, "interaction_error": 0.3, "angular_distance": 0.002, "cosine_adjacent": 0.999,
              "block_influence": 0.001, "update_alignment": 0.02}  # fmt: skip
    return replace(report, model={**report.model, "dtype": "bfloat16"}, resolution=floors)


def hostile():
    report = sample()
    return replace(
        report,
        model={**report.model, "name": HOSTILE, "source": HOSTILE, "architecture": HOSTILE, "notes": [HOSTILE]},
        corpus={**report.corpus, "name": HOSTILE, "bos": HOSTILE, "first_tokens": [HOSTILE, "</style>", "\0"]},
        run={**report.run, "command": f"depthprobe analyze '{HOSTILE}'"},
        notes=[HOSTILE],
    )


def bare():
    """Norms only, no interval, nothing else: what is left when everything that can be refused was."""
    report = sample()
    layers = report.layers[report.layers["metric"] == "residual_norm"].assign(ci_low=math.nan, ci_high=math.nan)
    growth = dict.fromkeys(("cross_share", "growth_power", "growth_rate", "update_growth_rate"))
    return replace(
        report,
        layers=layers.reset_index(drop=True),
        pairs=report.pairs.iloc[:0],
        growth={**growth, "r2_power": None, "r2_rate": None, "decomposition": []},
        sinks=[],
        skipped=[],
        notes=["CKA and linearity were refused: 200 tokens are fewer than 4 x width."],
    )


def interval(value, spread, known=True):
    return {
        "value": value,
        "ci_low": value - spread if known else None,
        "ci_high": value + spread if known else None,
    }


def ablated(report=None, controls=True, head=True, sequences=8, more=False):
    """A report with a sweep: a skip costs 0.08 nats and more at the ends, a merge 0.6 of it early, 0.3 of it late."""
    report = report or sample()
    blocks, rows, known = report.model["blocks"], [], sequences > 1
    post = report.anatomy["summary"] == "post"

    def add(schedule, kind, layers, kl, combine="", unit="block"):
        costs = {"state_distance": kl / 4}
        if head:
            costs |= {"kl": kl, "delta_loss": 0.9 * kl - 0.01, "top1_agreement": math.exp(-kl)}
        for metric, value in costs.items():
            spread = 0.1 * abs(value) + 1e-4
            ends = (value - spread, value + spread) if known else (math.nan, math.nan)
            rows.append((schedule, kind, unit, ",".join(map(str, layers)), combine, metric, value, *ends, sequences))

    def run(start, stop):
        return {0: [], 1: [str(start)]}.get(max(0, stop - start), [f"{start}-{stop - 1}"])

    def notation(start, middle, stop):
        return " ".join([*run(0, start), *middle, *run(stop, blocks)])

    def skip_cost(l):
        return 0.08 + 2 * math.exp(-2 * l) + 1.5 * math.exp(-2 * (blocks - 1 - l))

    def ratio(l):
        return 0.6 - 0.3 * l / max(1, blocks - 2)

    pairs = range(blocks - 1)
    for l in range(blocks):
        add(notation(l, [], l + 1), "skip", [l], skip_cost(l))
    for l in pairs:
        pair = notation(l, [f"({l}+{l + 1})"], l + 2)
        add(pair, "merge", [l, l + 1], ratio(l) * skip_cost(l), "sum")
        add(notation(l, [str(l + 1), str(l)], l + 2), "swap", [l, l + 1], 0.8 * skip_cost(l))
        if post:
            add(pair, "merge", [l, l + 1], 0.7 * ratio(l) * skip_cost(l), "branch-sum")
            first = notation(l, [f"({l}a+{l + 1}a)", f"({l}m+{l + 1}m)"], l + 2)
            add(first, "merge", [l, l + 1], 0.5 * ratio(l) * skip_cost(l), "sum", "sublayer")
        if controls:
            add(notation(l, [], l + 2), "skip", [l, l + 1], 2.2 * skip_cost(l))
            add(f"random vector after {l},{l + 1}", "control", [l, l + 1], 0.5 * ratio(l) * skip_cost(l))
            if l < blocks - 2:
                apart = notation(l, [f"({l}+{l + 2})", str(l + 1)], l + 3)
                add(apart, "control", [l, l + 2], 1.3 * skip_cost(l), "sum")
        if more:
            add(notation(l, [str(l), str(l), str(l + 1)], l + 2), "repeat", [l], 0.4 * skip_cost(l))
            add(notation(l, [f"{l}m"], l + 1), "skip", [l], 0.5 * skip_cost(l), "", "attention")
            add(notation(l, [f"({l}a+{l}m)"], l + 1), "custom", [l], 0.2 * skip_cost(l), "sum", "sublayer")
    rho = [{"layer": l, **interval(ratio(l), 0.05, known)} for l in pairs]
    cost = "kl" if head else "state_distance"
    merging = {
        "rho": {
            "cost": cost, "layers": rho, "median": interval(ratio(len(pairs) // 2), 0.03, known),
            "slope": interval(-0.7, 0.2, known),
        } if len(rho) > 1 else None,
        "proxies": [
            {"proxy": name, "cost": f"{cost} of {kind}", "blocks": blocks, **interval(value, 0.08, known)}
            for name, kind, value in (
                ("block_influence", "skip", 0.61), ("update_ratio", "skip", -0.2), ("angular_distance", "skip", 0.58),
                ("interaction_error", "merge", 0.42),
            )
        ],
        "base_loss": interval(2.861, 0.1, known) if head else None,
        "sequences": sequences, "tokens": 256, "score_positions": 0.25, "evaluations": 40 * blocks,
        "plain_evaluations": 90 * blocks, "seconds": 61.0,
        "notes": [] if head else ["Ablations are measured by state_distance alone: there is no language-model head."],
    }  # fmt: skip
    frame = pd.DataFrame(rows, columns=list(ABLATION_COLUMNS)).astype(ABLATION_COLUMNS)
    return replace(report, ablations=frame, merging=merging)


def one_schedule():
    """One custom schedule, as `--schedule` gives it: it is about no layer in particular."""
    report = ablated()
    rows = report.ablations[report.ablations["schedule"] == "0-3 (4+5) 6-11"]
    rows = rows.assign(kind="custom", layers="").reset_index(drop=True)
    return replace(report, ablations=rows, merging={**report.merging, "rho": None, "proxies": []})


def hostile_ablations():
    """Every text of the table and of what goes with it is an attack."""
    report, attack = ablated(hostile(), more=True), HOSTILE.replace("\udc80", "")  # a table takes no half characters
    texts = report.ablations["schedule"].map(lambda schedule: f"{attack} $x$ {schedule}")
    rows = report.ablations.assign(schedule=texts)
    swaps = rows["kind"] == "swap"
    rows.loc[swaps, ["kind", "layers"]] = [attack, "4,x"]
    repeats = rows["kind"] == "repeat"
    rows.loc[repeats, ["kind", "combine"]] = [f"$\\frac$ {attack[:25]}", attack]
    proxies = [{**row, "proxy": f"$\\frac{{{HOSTILE[:25]}", "cost": "$"} for row in report.merging["proxies"]]
    return replace(report, ablations=rows, merging={**report.merging, "proxies": proxies, "notes": [HOSTILE]})


def sloped(report=None, cotangents=("loss", "random"), fresh=0, sequences=4, kinds=3):
    """A report with gradients: 12 % smaller a block on the way down, 20 times larger at x_0; weights of three kinds."""
    report = report or sample()
    blocks, rows, known = report.model["blocks"], [], sequences > 1

    def add(metric, layer, value, unit="block"):
        ends = (0.95 * value, 1.05 * value) if known else (math.nan, math.nan)
        rows.append((layer, unit, metric, value, *ends, sequences))

    suffixes = [{"loss": "", "random": "_random"}[name] for name in cotangents]
    for suffix in suffixes:
        for l in range(blocks + 1):
            size = (1.0 if suffix else 0.02) * 0.88 ** (blocks - l) * (20 if l == 0 else 1)
            add(f"gradient_norm{suffix}", l, size)
            add(f"gradient_norm{suffix}_median", l, 0.9 * size)
            add(f"gradient_first_share{suffix}", l, 0.8 - 0.6 * l / blocks)
    if "loss" in cotangents:
        for metric, size in (("weight_gradient_norm", 1.0), ("weight_gradient_norm_pooled", 0.6)):
            add(metric, -1, 3 * size, "embed.weight")
            for place in range(kinds):
                for l in range(blocks):
                    add(metric, l, (place + 1) * size * 1.1**l, f"mlp.part{place}.weight")
            add(metric, blocks, 0.1 * size, "norm.weight")
    ratio = interval(0.88 ** (blocks - min(1, blocks - 1)), 0.02, known)
    gradients = {
        "cotangents": list(cotangents), "loss": interval(3.1, 0.1, known) if "loss" in cotangents else None,
        "ratio": ratio if "loss" in cotangents else None, "ratio_median": ratio if "loss" in cotangents else None,
        "ratio_random": ratio if "random" in cotangents else None, "bottom": min(1, blocks - 1),
        "fresh": list(range(fresh)), "sequences": sequences, "tokens": 256, "corpus": report.corpus["name"],
        "sha256": report.corpus["sha256"], "skip_first": 1, "seconds": 3.2,
        "notes": [] if "loss" in cotangents else [
            "The loss's gradients were left out: the model has no language-model head."
        ],
    }  # fmt: skip
    frame = pd.DataFrame(rows, columns=list(LAYER_COLUMNS)).astype(LAYER_COLUMNS)
    return replace(report, layers=pd.concat([report.layers, frame], ignore_index=True), gradients=gradients)


def hostile_gradients():
    report = sloped(hostile())
    units = report.layers["unit"].where(report.layers["unit"] != "mlp.part0.weight", HOSTILE.replace("\udc80", ""))
    return replace(report, layers=report.layers.assign(unit=units))


VARIANTS = {
    "sample": sample,
    "headless": headless,
    "blocks_only": blocks_only,
    "one_block": one_block,
    "half": half,
    "hostile": hostile,
    "bare": bare,
    "deep": lambda: sample(30),
    "ablated": ablated,
    "ablated_more": lambda: ablated(sample(30), more=True, sequences=32),
    "ablated_headless": lambda: ablated(headless(), head=False),
    "ablated_one_sequence": lambda: ablated(sample(4, sequences=1), sequences=1),
    "ablated_one_block": lambda: ablated(one_block(), sequences=1),
    "no_controls": lambda: ablated(controls=False),
    "one_schedule": one_schedule,
    "hostile_ablations": hostile_ablations,
    "sloped": sloped,
    "hostile_gradients": hostile_gradients,
}

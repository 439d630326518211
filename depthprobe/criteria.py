"""By what each claim is judged: criteria that are the same for every model, with where they come from.

A criterion is a number that a report has, and a region in which it must lie if the claim holds. An effect of less than
`MARGIN`, 10 %, counts as none: "falls" means by more than that, "does not change" means by less. A claim that only
training runs can test is listed with the reason why a report cannot judge it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from depthprobe.depth.gate import static_gate
from depthprobe.evidence import (
    Measure,
    depth_excess,
    gradient_ratio,
    growth,
    late,
    late_over_early,
    least_share,
    most_over_least,
    rho,
    rho_slope,
    weight_ratio,
)

__all__ = ["CLAIMS", "CRITERIA", "INITIALISATIONS", "MARGIN", "Claim", "Criterion"]

MARGIN = 0.10
LESS, MORE = 1 / (1 + MARGIN), 1 + MARGIN
INITIALISATIONS = 10  # fewest seeds that a claim about initialisation is judged on


@dataclass(frozen=True)
class Claim:
    """One claim of the two notes.

    Attributes:
        name: its number.
        sentence: what it says.
        beyond: why no report can judge it, a phrase; empty where some can.
    """

    name: str
    sentence: str
    beyond: str = ""


@dataclass(frozen=True)
class Criterion:
    """How a claim is judged on a report, or on a pair of them.

    Attributes:
        claim: name of the claim.
        sentence: what must be the case, with the margin.
        source: who says so, or where the number comes from.
        low, high: between which the number lies if the claim holds.
        measure: the number of one report, with its interval over sequences; a phrase where the report does not have it.
        placements: norm placements that the claim is about; empty for any.
        of: `model`, or `pair` for the number of a pre-LN model minus that of a post-LN one of as many blocks.
        seeds: fewest training seeds of each model, over which the interval then is.
        state: `trained`, `fresh` for random initialisations, or `any`.
        equal_tokens: whether the models of a pair must have seen as many tokens.
        part: of the report that the number is in, which says over how many documents or sequences its interval is.
    """

    claim: str
    sentence: str
    source: str
    low: float
    high: float
    measure: Measure
    placements: tuple[str, ...] = ()
    of: Literal["model", "pair"] = "model"
    seeds: int = 1
    state: Literal["trained", "fresh", "any"] = "trained"
    equal_tokens: bool = False
    part: Literal["corpus", "merging", "gradients", "deep"] = "corpus"


# The claims, in the order of the notes

_TRAINING = "needs training runs: "
CLAIMS: tuple[Claim, ...] = (
    Claim("G1", "Post-LN: at initialisation the gradient falls from the top to the bottom."),
    Claim("G2", "Pre-LN: at initialisation the gradient is flat over the layers, and small at the top."),
    Claim("G4", "The top-heavy gradient causes the oscillation without warm-up.",
          _TRAINING + "updates and the output's shift under noise, step by step"),
    Claim("W1", "Post-LN needs warm-up, pre-LN does not, whatever the optimiser.",
          _TRAINING + "several optimisers, warm-ups and learning rates"),
    Claim("W2", "Pre-LN's advantage is all from not needing warm-up.",
          _TRAINING + "each placement at its best warm-up"),
    Claim("V1", "The variant x + LN(F(x)) blocks the residual path, needs warm-up and is worse.",
          _TRAINING + "with and without warm-up"),
    Claim("R1", "The stream is a sum of terms of equal size, so that it grows like t."),
    Claim("R2", "Neighbouring layers differ ever less."),
    Claim("M1", "Deep in the net, a block's update hardly depends on the update before it."),
    Claim("M2", "Two pre-LN layers are nearly one wider layer, the more so the deeper they lie."),
    Claim("M3", "Trained from scratch, pairs of parallel blocks are as good as sequential ones for pre-LN alone.",
          _TRAINING + "parallel, sequential and half as deep"),
    Claim("D1", "Pre-LN has less effective depth than post-LN at equal L."),
    Claim("D2", "Post-LN weakens the identity at every norm."),
    Claim("D4", "Lower effective depth causes the worse quality.",
          _TRAINING + "many arms and seeds whose depth and loss differ"),
    Claim("D3", "Depth matters more than width.", _TRAINING + "a grid of depths and widths of equal size"),
    Claim("P1", "Pre-LN is better at the same settings, post-LN with each at its best.",
          _TRAINING + "every arm tuned alike, several seeds"),
    Claim("P2", "At equal pretraining loss post-LN fine-tunes better.", _TRAINING + "fine-tuned at matched loss"),
    Claim("S1", "Admin's initialisation and RealFormer's residual attention beat pre-LN.",
          _TRAINING + "each tuned beside pre and post"),
    Claim("N1", "All of this holds for norms in general.", _TRAINING + "models with other norms than LayerNorm"),
)  # fmt: skip

# The criteria. They were set before any verdict; analyses of the shipped checkpoints, SmolLM2-135M and MiniLM were
# known then.

_ADDS = ("pre", "branch", "sandwich", "none")  # placements whose stream is a sum
_XIONG = "Xiong et al. 2020, theorem 1 and figure 3"
_NOTE = "the note on pre-norm: "


def _depths() -> Sequence[Criterion]:
    """D1, once for every estimate that may pass the gate; how many units write is no depth, whatever it passes."""
    names = [f"{name} {variant}".strip() for name, variant in static_gate() if name != "participation"]
    return [
        Criterion(
            "D1",
            f"{name} of {unit}s, less that of the random twin and over N, is lower in pre-LN by more than {MARGIN:g}, "
            "at equal L and tokens, over seeds",
            _NOTE + "Csordás et al. 2025 and Hu et al. 2025 for how depth is estimated",
            -math.inf, -MARGIN, depth_excess(name, unit), of="pair", seeds=2, equal_tokens=True, part="deep",
        )
        for unit in ("block", "sublayer") for name in names
    ]  # fmt: skip


CRITERIA: tuple[Criterion, ...] = (
    Criterion(
        "G1",
        "gradients fall: the median token's is smaller at x_1 than at x_L by more than 10 %",
        _XIONG,
        -math.inf, LESS, gradient_ratio, ("post",), state="fresh", part="gradients",
    ),
    Criterion(
        "G1",
        "weights' gradients fall: the MLP's second matrix's is smaller in the first block than in the last by more "
        "than 10 %",
        _XIONG,
        -math.inf, LESS, weight_ratio, ("post",), state="fresh", part="gradients",
    ),
    Criterion(
        "G2",
        "gradients are flat: the median token's is the same at x_1 and x_L within 10 %",
        _XIONG,
        LESS, MORE, gradient_ratio, ("pre",), state="fresh", part="gradients",
    ),
    Criterion(
        "G2",
        "weights' gradients are flat: the MLP's second matrix's is the same in first and last block within 10 %",
        _XIONG,
        LESS, MORE, weight_ratio, ("pre",), state="fresh", part="gradients",
    ),
    Criterion(
        "R1",
        "updates have equal size: the median ‖Δ‖ of the largest third of the blocks is that of the smallest within 10"
        " %",
        _NOTE + "its premise",
        LESS, MORE, most_over_least("update_norm"), _ADDS,
    ),
    Criterion(
        "R1",
        "‖x_l‖ grows like l: a power law fits (R² ≥ 0.8), with exponent 1 within 10 %; uncorrelated updates give 0.5",
        _NOTE + "Xiong et al. 2020, lemma 2, for √l",
        1 - MARGIN, 1 + MARGIN, growth("growth_power", "r2_power"), _ADDS,
    ),
    Criterion(
        "R1",
        "updates point along the stream: their cross term is more than half of the growth of ‖x‖², 0 being "
        "uncorrelated and 1 − 1/L aligned",
        "‖x_L‖² = ‖x_0‖² + Σ ‖Δ‖² + 2 Σ ⟨Δ, x⟩",
        0.5, math.inf, growth("cross_share"), _ADDS,
    ),
    Criterion(
        "R2",
        "‖Δ‖/‖x‖ falls: its median is smaller in the last third of the blocks than in the first by more than 10 %",
        _NOTE + "1/√t or 1/t",
        -math.inf, LESS, late_over_early("update_ratio"), _ADDS,
    ),
    Criterion(
        "R2",
        "1 − cos(x_l, x_{l+1}) falls: its median is smaller in the last third of the blocks than in the first by more"
        " than 10 %",
        _NOTE + "Men et al. 2024 for the measure",
        -math.inf, LESS, late_over_early("block_influence"), _ADDS,
    ),
    Criterion(
        "M1",
        "interaction error is small: its median in the last third of the blocks is below 0.1",
        _NOTE + "≈ read as 10 %",
        -math.inf, MARGIN, late("interaction_error"), _ADDS,  # 0, of a block that writes nothing, is small too
    ),
    Criterion(
        "M1",
        "interaction error falls: its median is smaller in the last third of the blocks than in the first by more "
        "than 10 %",
        _NOTE + "1/√t",
        -math.inf, LESS, late_over_early("interaction_error"), _ADDS,
    ),
    Criterion(
        "M1",
        "interaction error is below its control: in the last third of the blocks, smaller by more than 10 % than that"
        " of a foreign update of equal size and angle",
        "a control: a small update may be hidden without a trace whoever wrote it",
        -math.inf, LESS, late("interaction_error", "interaction_error_control"), _ADDS,
    ),
    Criterion(
        "M2",
        "ρ = cost(merge l, l+1) / cost(skip l) is below 1 by more than 10 %, in the median over l",
        _NOTE + "hiding an update from one reader must cost less than from all",
        -math.inf, LESS, rho("median"), ("pre",), part="merging",
    ),
    Criterion(
        "M2",
        "ρ falls with depth in pre-LN, by more than 10 % over all of it (slope of log ρ below −log 1.1)",
        _NOTE + "“for large t”",
        -math.inf, -math.log(MORE), rho_slope, ("pre",), part="merging",
    ),
    Criterion(
        "M2",
        "ρ does not fall with depth in post-LN, by 10 % or more over all of it, merged in the cheapest way",
        _NOTE + "the claim is of pre-LN alone",
        -math.log(MORE), math.inf, rho_slope, ("post",), part="merging",
    ),
    Criterion(
        "M2",
        "ρ falls faster in pre-LN: the slope of its log over depth is lower than in post-LN by more than log 1.1",
        _NOTE + "the claim is of pre-LN alone",
        -math.inf, -math.log(MORE), rho_slope, of="pair", part="merging",
    ),
    Criterion(
        "D2",
        "the branch makes up more than 10 % of what is normalised, at every norm (‖u‖²/‖y‖²)",
        "Liu et al. 2020 (Admin); 2^{−l/2} at initialisation is a share of one half",
        MARGIN, math.inf, least_share, ("post",), state="any",
    ),
    *_depths(),
)  # fmt: skip

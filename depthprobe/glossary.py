"""Every metric that depthprobe reports: its name, its formula, where it comes from and how to read it.

The one registry: tables take their names from here, figures their captions, `depthprobe metrics` its text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from depthprobe.glossary_depth import DEPTHS

__all__ = ["METRICS", "NOTATION", "Metric", "lookup"]

Table = Literal["layers", "pairs", "ablations", "depth", "report"]

NOTATION = """\
x_l   residual stream that block l reads, l = 0 … L-1; x_L is what the last block writes, before the final norm
u     branch: what a unit adds to the stream, after any norm, scale or gate on the branch
s     the state that a branch is added to (x_l for attention, x_l + a_l for a sequential MLP); y = s + u
Δ_l   x_{l+1} - x_l, the net change over block l, whatever the placement of its norms
F_l   the block as an update, F_l(x) = f_l(x) - x, where f_l is the block as a function
unit  what a row counts: block, attention or mlp; for blocks u is Δ_l and s is x_l

A per-token quantity is averaged over a sequence's tokens (a median: taken), then over sequences. Intervals are 95 %
bootstraps over sequences, clustered by document where there are documents. Position 0 is left out by default."""


@dataclass(frozen=True)
class Metric:
    """One entry of the glossary.

    Attributes:
        name: the name in every table and file.
        title: what it is, in a few words.
        formula: the definition, in the notation above.
        reading: one sentence on how to read it.
        source: where the definition comes from, empty if it is elementary.
        table: the table that carries it (`layers`, `pairs`, …); `report` for what is in report.json alone.
    """

    name: str
    title: str
    formula: str
    reading: str
    source: str = ""
    table: Table = "layers"


_ALL = (
    Metric(
        "residual_norm",
        "norm of the residual stream",
        "‖x_l‖₂; rows for l = 0 … L, x_L before the final norm",
        "A stream that grows with depth makes updates of equal size matter ever less.",
        "Xiong et al. 2020, lemma 2",
    ),
    Metric(
        "residual_norm_median",
        "median norm of the residual stream",
        "median over tokens of ‖x_l‖₂, then the mean over sequences",
        "Far below the mean: a few tokens carry most of the norm.",
        "Xiong et al. 2020, lemma 2",
    ),
    Metric("residual_rms", "size of one dimension of the stream", "‖x_l‖₂ / √d", "Comparable between widths."),
    Metric(
        "update_norm",
        "norm of the update",
        "‖u‖₂ (block: ‖Δ_l‖₂)",
        "Constant over depth is the premise of 'the stream grows while updates do not'.",
    ),
    Metric(
        "update_ratio",
        "size of the update against the stream",
        "‖u‖ / ‖s‖ (block: ‖Δ_l‖ / ‖x_l‖), per token, then averaged",
        "Near 0 the unit hardly changes the stream; above 1 it overwrites it.",
        "Csordás et al. 2025",
    ),
    Metric(
        "update_ratio_median",
        "median size of the update against the stream",
        "median over tokens of ‖u‖ / ‖s‖, then the mean over sequences",
        "The ratio of a typical token; far below the mean if a few tokens change a lot.",
        "Csordás et al. 2025",
    ),
    Metric(
        "update_share",
        "share of the update in the result",
        "⟨u, y⟩ / ‖y‖²; with the stream's ⟨s, y⟩ / ‖y‖² it sums to 1",
        "0: the result is all stream; 1: all update; negative: the update erases.",
        "Liu et al. 2020 (Admin)",
    ),
    Metric(
        "update_energy_share",
        "energy of the update in the result",
        "β² = ‖u‖² / ‖y‖²",
        "Admin's dependency on the branch: large values amplify perturbations of the weights.",
        "Liu et al. 2020 (Admin)",
    ),
    Metric(
        "update_alignment",
        "direction of the update against the stream",
        "cos(u, s) (block: cos(Δ_l, x_l))",
        "Negative: the unit erases; positive: it reinforces; 0: it adds something new.",
        "Csordás et al. 2025",
    ),
    Metric(
        "cosine_adjacent",
        "similarity of neighbouring states",
        "cos(x_l, x_{l+1})",
        "Near 1 the block leaves the direction of the stream as it was; a few large dimensions can fake that.",
    ),
    Metric(
        "cosine_adjacent_centred",
        "similarity of neighbouring states, centred",
        "cos(x_l - μ_l, x_{l+1} - μ_{l+1}), μ the corpus mean of each state over the kept positions",
        "What is left of the similarity once the part that all tokens share is taken away.",
    ),
    Metric(
        "cosine_adjacent_standardised",
        "similarity of neighbouring states, each dimension by its own spread",
        "cos((x_l - μ_l) / σ_l, (x_{l+1} - μ_{l+1}) / σ_{l+1}), μ and σ over the kept positions, a dimension each",
        "No dimension dominates: much below cosine_adjacent means that a few large ones made that near 1.",
    ),
    Metric(
        "block_influence",
        "block influence",
        "1 - cos(x_l, x_{l+1})",
        "The published score for which block to drop first: lowest is least.",
        "Men et al. 2024 (ShortGPT)",
    ),
    Metric(
        "update_cosine_next",
        "similarity of neighbouring updates",
        "cos(u_l, u_{l+1}), the same unit of two neighbouring blocks",
        "Positive: the next block continues this one's work; negative: it takes it back.",
    ),
    Metric(
        "cka_adjacent",
        "linear CKA of neighbouring states, debiased",
        "HSIC(x_l, x_{l+1}) / √(HSIC(x_l, x_l) HSIC(x_{l+1}, x_{l+1})), unbiased linear HSIC over the kept tokens",
        "1: the same geometry up to rotation and scale. Dominated by the directions of the largest variance.",
        "Kornblith et al. 2019; unbiased estimator of Song et al. 2012",
    ),
    Metric(
        "linearity",
        "how linear the block is as a map",
        "held-out R² of a ridge map x_l → x_{l+1}, both centred and Frobenius-normalised; 5 folds of sequences",
        "Near 1 means little where the block changes little: read linearity_update beside it.",
        "after Razzhigaev et al. 2024, whose score is in-sample",
    ),
    Metric(
        "linearity_update",
        "how linear the block's update is",
        "held-out R² of a ridge map x_l → Δ_l, both centred and Frobenius-normalised; 5 folds of sequences",
        "Near 1: a matrix could replace the block on this corpus; near 0: its work is not linear.",
        "after Razzhigaev et al. 2024, whose score is in-sample",
    ),
    Metric(
        "interaction_error",
        "how much the next block needs this one's update",
        "‖F_{l+1}(x_{l+1}) - F_{l+1}(x_l)‖ / ‖F_{l+1}(x_{l+1})‖",
        "Near 0: the next block would do the same without having seen this one, so the two are one wider layer.",
    ),
    Metric(
        "interaction_cosine",
        "direction of the next block's update without this one's",
        "cos(F_{l+1}(x_{l+1}), F_{l+1}(x_l))",
        "Near 1: the next block's update keeps its direction when this block's is hidden from it.",
    ),
    Metric(
        "interaction_error_control",
        "the same for a foreign update of equal size and angle",
        "interaction_error with x_l replaced by x_{l+1} - Δ', Δ' = ‖Δ_l‖ (c x̂ + √(1-c²) ŵ), "
        "c = cos(Δ_l, x_{l+1}), x̂ = x_{l+1}/‖x_{l+1}‖, ŵ another token's Δ_l made orthogonal to x̂",
        "The true error below the control: the next block is less sensitive to this block's update than to a foreign "
        "one.",
    ),
    Metric(
        "lens_loss",
        "logit lens: loss",
        "cross-entropy, in nats, of the readout of x_l through the model's own final norm and head",
        "Where it stops falling, later blocks no longer improve the prediction as the head reads it.",
        "logit lens (nostalgebraist 2020)",
    ),
    Metric(
        "lens_kl",
        "logit lens: distance to the final prediction",
        "KL(p_L ‖ p_l), in nats, between the readouts of x_L and x_l",
        "0 at the end by definition; a late fall means that the prediction is made late.",
        "logit lens (nostalgebraist 2020)",
    ),
    Metric(
        "lens_top1",
        "logit lens: agreement with the final prediction",
        "share of positions where the readouts of x_l and x_L have the same most likely token",
        "1 at the end by definition.",
        "logit lens (nostalgebraist 2020)",
    ),
    Metric(
        "gradient_norm",
        "size of the loss's gradient at a state",
        "‖∂ℓ/∂x_l‖₂ a token, ℓ a sequence's mean cross-entropy over its predicted positions; rows for l = 0 … L",
        "Falls towards x_0: early blocks are hardly told what to change. A token's share of a mean over T positions is "
        "about 1/T, so compare equal lengths; a masked model's ℓ reads 15 % of positions.",
        "Xiong et al. 2020, fig. 3",
    ),
    Metric(
        "gradient_norm_median",
        "median size of the loss's gradient at a state",
        "median over tokens of ‖∂ℓ/∂x_l‖₂, then the mean over sequences",
        "Far below the mean: a few tokens receive most of the gradient.",
        "Xiong et al. 2020, fig. 3",
    ),
    Metric(
        "gradient_first_share",
        "share of the loss's gradient at position 0",
        "‖∂ℓ/∂x_l‖² at position 0 over its sum over all positions; the norms themselves leave position 0 out",
        "Near 1: what reaches this state is nearly all about the first token.",
    ),
    Metric(
        "gradient_norm_random",
        "what the blocks above make of a random gradient",
        "‖vᵀ ∂x_L/∂x_l‖₂ a token, v an independent random unit vector at every token of x_L",
        "1 at x_L by definition; above 1 the blocks above amplify, whatever the head and the targets.",
    ),
    Metric(
        "gradient_norm_random_median",
        "median of what the blocks above make of a random gradient",
        "median over tokens of ‖vᵀ ∂x_L/∂x_l‖₂, then the mean over sequences",
        "Far below the mean: a few tokens, which many others attend to, receive most of it.",
    ),
    Metric(
        "gradient_first_share_random",
        "share of a random gradient at position 0",
        "‖vᵀ ∂x_L/∂x_l‖² at position 0 over its sum over all positions",
        "Large where every later position attends to the first one.",
    ),
    Metric(
        "weight_gradient_norm",
        "size of the loss's gradient by a weight",
        "‖∂ℓ/∂W‖_F of each sequence's own ℓ, then the mean over sequences; unit W's name, l its block, -1 for what x_0 "
        "depends on (embeddings, tied heads too), L for the rest of the head",
        "Does not depend on how many sequences there are; within a kind of weight, compare layers.",
        "Xiong et al. 2020, fig. 3, for one sequence",
    ),
    Metric(
        "weight_gradient_norm_pooled",
        "size of the mean loss's gradient by a weight",
        "‖Σ_s ∂ℓ_s/∂W‖_F / n over n sequences; its interval is a jackknife over groups, a document in one alone",
        "What a batch of all sequences would give, the paper's expected gradient as n grows. weight_gradient_norm over "
        "√n: the sequences share no direction, and this falls with n.",
        "Xiong et al. 2020, fig. 3",
    ),
    Metric(
        "angular_distance",
        "angle between two states",
        "arccos(cos(x_i, x_j)) / π",
        "0: the same direction; 0.5: orthogonal. What a dark block off the diagonal costs is to be measured.",
        "Gromov et al. 2024",
        "pairs",
    ),
    Metric("cosine", "similarity of two states", "cos(x_i, x_j)", "1: the same direction.", "", "pairs"),
    Metric(
        "update_dependence",
        "what a unit would do without an earlier one",
        "a_ts = ‖F_t(x_t) - F_t(x_t - c)‖ / ‖F_t(x_t)‖, c what is left at reader t of writer s's Δ_s: Δ_s itself but "
        "for post-LN, where each norm on the way passes on γ ⊙ (v - mean v) / σ; i writes, j reads, L is the readout",
        "0: the later unit does not need the earlier; it may well read what others made of it.",
        "",
        "pairs",
    ),
    Metric(
        "cross_share",
        "share of the growth that comes from aligned updates",
        "2 Σ ⟨u, s⟩ / (‖x_L‖² - ‖x_0‖²), from ‖x_L‖² = ‖x_0‖² + Σ ‖u‖² + 2 Σ ⟨u, s⟩",
        "0: uncorrelated updates, growth like √l; towards 1: aligned updates, growth like l. Only where the stream "
        "grows.",
        "",
        "report",
    ),
    Metric(
        "growth_power",
        "exponent of the stream's growth",
        "slope of log ‖x_l‖ on log l, l = 1 … L",
        "0.5: uncorrelated updates of equal size; 1: aligned ones; only meaningful where the power law fits.",
        "",
        "report",
    ),
    Metric(
        "growth_rate",
        "growth of the stream a block",
        "exp of the slope of log ‖x_l‖ on l, l = 0 … L",
        "1.045: the stream grows by 4.5 % a block (published for GPT-2 XL).",
        "Heimersheim and Turner 2023",
        "report",
    ),
    Metric(
        "update_growth_rate",
        "growth of the updates a block",
        "exp of the slope of log ‖Δ_l‖ on l, l = 0 … L-1",
        "1: updates of constant size, the premise of the claim; above 1: later blocks write more.",
        "",
        "report",
    ),
    Metric(
        "delta_loss",
        "change of the loss",
        "mean cross-entropy of the changed model minus the unchanged one's, nats per token, over the same targets",
        "What the change costs at the task itself; below 0 the changed model predicts this corpus better.",
        "",
        "ablations",
    ),
    Metric(
        "kl",
        "distance to the unchanged predictions",
        "KL(p_unchanged ‖ p_changed), nats per token",
        "0: the same predictions. Unlike the loss, it also counts changes that happen to help.",
        "",
        "ablations",
    ),
    Metric(
        "top1_agreement",
        "agreement with the unchanged model",
        "share of positions whose most likely token is the same in the changed and the unchanged model",
        "1: greedy decoding would not notice the change.",
        "",
        "ablations",
    ),
    Metric(
        "state_distance",
        "distance to the unchanged last state",
        "1 - cos of the changed and the unchanged x_L, before any final norm, over every position",
        "0: the same direction. The only cost of a change for a model without a language-model head.",
        "",
        "ablations",
    ),
    Metric(
        "rho",
        "merge against skip",
        "ρ_l = KL(merge l, l+1) / KL(skip l); state_distance in place of KL where there is no next-token head",
        "Below 1: hiding block l's update from block l+1 alone costs less than hiding it from all later blocks.",
        "",
        "report",
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in (*_ALL, *(Metric(*entry, "depth") for entry in DEPTHS))}


def lookup(name: str) -> Metric:
    """The entry of that name.

    Raises:
        UsageError: no metric has that name; the message lists the closest ones.
    """
    from difflib import get_close_matches

    from depthprobe.errors import UsageError

    if name in METRICS:
        return METRICS[name]
    near = get_close_matches(name, METRICS, n=3, cutoff=0.4)
    raise UsageError(
        f"no metric is called {name!r}",
        fix=f"did you mean {' or '.join(near)}?" if near else "`depthprobe metrics` lists them",
    )

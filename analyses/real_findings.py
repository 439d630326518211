"""Published findings on layers, each beside what the rows of `real_checkpoints.py` come to, and the word for both.

The numbers and settings are those of the papers named; where a paper gives a direction and no number, the direction is
what is compared.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import painters
import pandas as pd
import study
from numpy.typing import NDArray
from scipy import stats

from depthprobe.depth.published import last_crossing
from depthprobe.estimate import Interval, Resampler
from depthprobe.report.tables import number

Floats = NDArray[np.float64]
KEPT = (0.72, 0.95)  # of top-1 predictions, Lad et al.
WORDS = ("same", "different", "undecided", "not comparable")
KINDS = {"number": "Numbers and ranges", "order": "Orders and signs", "presence": "Whether something is there"}
LARGE, LARGE_RATIO = 100.0, 1000.0  # what makes an activation massive, Sun, Chen et al.: its size, and over the median


def middle(blocks: int) -> range:
    """The middle half."""
    return range(blocks // 4, blocks // 4 + max(2, blocks // 2))


def span(blocks: int) -> int:
    """How many neighbouring blocks are removed together: a fifth."""
    return max(2, blocks // 5)


@dataclass(frozen=True, eq=False)
class Model:
    """The rows of one model, as arrays."""

    name: str
    rows: pd.DataFrame

    @cached_property
    def draws(self) -> Resampler:
        """Resamples documents, each with all of its sequences."""
        first = self.rows.drop_duplicates("sequence").sort_values("sequence")
        return Resampler(len(first), first["document"].to_numpy(), 0)

    @cached_property
    def blocks(self) -> int:
        return int(study.arm(self.rows, change="states")["layer"].max())

    @property
    def documents(self) -> int:
        return int(self.rows["document"].nunique())

    @cached_property
    def head(self) -> bool:
        """Whether it predicts tokens."""
        return bool(self.rows["delta_loss"].notna().any())

    @property
    def cost(self) -> str:
        """What a change costs: nats a token, or 1 − cos of the last state where there is no head."""
        return "delta_loss" if self.head else "state_distance"

    @cached_property
    def means(self) -> pd.DataFrame:
        """The values by change, count, sequence and layer, seeds averaged."""
        places = ["change", "count", "sequence", "layer"]
        return self.rows.drop(columns=["model", "measurement", "seed", "document"]).groupby(places).mean()

    def grid(self, column: str, change: str = "states", count: int = 0) -> Floats:
        """`[sequences, layers]`, without the layers that have no value."""
        return self.means.loc[(change, count), column].unstack("layer").dropna(axis=1, how="all").to_numpy()

    def kept(self, change: str) -> Floats:
        """What is kept after deleting a block or swapping two: top-1 agreement, or the last state's cosine."""
        count = 1 if change == "delete" else 2
        if self.head:
            return self.grid("top1_agreement", change, count)
        return 1 - self.grid("state_distance", change, count)

    def inside(self, change: str) -> Floats:
        """The same, of the changes that stay within the middle half."""
        part = middle(self.blocks)
        return self.kept(change)[:, part.start : part.stop - (change == "swap")]

    def mean(self, columns: Floats) -> Interval:
        """The mean over sequences and columns."""
        return self.draws.function(columns, lambda m: m.mean(axis=1))

    def ranked(self, guess: Floats, cost: Floats) -> Interval:
        """Spearman's rank correlation over columns of what both come to over sequences; both are resampled."""
        width = guess.shape[1]
        return self.draws.function(np.hstack([guess, cost]), lambda m: spearman(m[:, :width], m[:, width:]))


def spearman(a: Floats, b: Floats) -> Floats:
    """Of each row, `[R, N]` twice to `[R]`; ties share their rank."""
    x, y = (stats.rankdata(values, axis=1) - (values.shape[1] + 1) / 2 for values in (a, b))
    return (x * y).sum(axis=1) / np.maximum(np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1), 1e-300)


# What is compared


def kept(model: Model, change: str) -> Interval:
    return model.mean(model.inside(change))


def end(model: Model, place: int) -> Interval:
    """What deleting the first (0) or last (−1) block keeps, less the mean of the middle half."""
    return model.mean(model.kept("delete")[:, [place]] - model.inside("delete").mean(axis=1, keepdims=True))


def swapped(model: Model) -> Interval:
    """What swaps in the middle keep, less what deletions there do."""
    swaps, deletions = (model.inside(change).mean(axis=1, keepdims=True) for change in ("swap", "delete"))
    return model.mean(swaps - deletions)


def influence(model: Model, column: str = "block_influence", cost: str = "") -> Interval:
    return model.ranked(model.grid(column), model.grid(cost or model.cost, "delete", 1))


def angles(model: Model, count: int) -> Interval:
    column = "angle" if count == 1 else "angle_span"
    return model.ranked(model.grid(column), model.grid(model.cost, "delete", count))


def closest(model: Model) -> Interval:
    """Where the run of a fifth of the blocks with the smallest angle begins: 0 the first place, 1 the last."""
    return model.draws.function(model.grid("angle_span"), lambda m: m.argmin(axis=1) / (m.shape[1] - 1))


def painted(model: Model, variant: str) -> Floats:
    """The cost of one of the painters' changes, `[sequences, 1]`."""
    return model.grid(model.cost, variant, len(middle(model.blocks)))


def in_order(model: Model) -> Interval:
    """The share of the ten pairs of changes whose costs are in the published order."""
    columns = np.hstack([painted(model, variant) for variant in painters.VARIANTS])
    first, second = np.triu_indices(columns.shape[1], k=1)
    return model.draws.function(columns, lambda m: (m[:, first] < m[:, second]).mean(axis=1))


def worse(model: Model, pair: tuple[str, str]) -> Interval:
    """The cost of the second change less that of the first."""
    return model.mean(painted(model, pair[1]) - painted(model, pair[0]))


def crossing(model: Model, column: str = "cosine") -> Interval:
    """Where the cosine turns from negative to non-negative for the last time, as a share of depth."""
    return model.draws.function(model.grid(column), lambda m: last_crossing(m, 0.0) / model.blocks)


def share(model: Model, found: NDArray[np.bool_]) -> Interval:
    """The share of sequences of which any state has it."""
    return model.mean(found.any(axis=1, keepdims=True).astype(np.float64))


def are_massive(model: Model) -> NDArray[np.bool_]:
    """Whether a state has an activation that is massive by the published definition, `[sequences, L + 1]`."""
    return (model.grid("largest") > LARGE) & (model.grid("largest_ratio") >= LARGE_RATIO)


def emergence(model: Model) -> Interval:
    """The first state with a massive activation, as a share of depth, over the sequences that have one."""
    found = are_massive(model)
    if not found.any():
        return Interval(math.nan, math.nan, math.nan)
    first = np.where(found.any(axis=1), found.argmax(axis=1) / model.blocks, math.nan)
    return model.draws.function(first[:, None], lambda m: m[:, 0])


def judged(interval: Interval, low: float, high: float) -> str:
    """`same`: the interval contains the published number, or lies within the published range; `different`: it does
    not contain the number, or lies outside of the range; `undecided`: an end of the range lies in it."""
    if not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return "undecided"
    if low == high:
        return "same" if interval.low <= low <= interval.high else "different"
    return {"inside": "same", "outside": "different", "undecided": "undecided"}[study.lies(interval, low, high)]


@dataclass(frozen=True)
class Finding:
    """A published finding and what it is compared with.

    Attributes:
        source, setting: who found it, in which models and data.
        what, published: the finding and its value.
        ours: what is measured here.
        value: of a model's rows.
        within: between what a value is the same; twice the same number where one was published.
        encoder: why it cannot be compared in a model without a language-model head.
        never: why it cannot be compared in any model.
        kind: of what was published, one of `KINDS`.
        fixed: whether it stands in the preregistration.
    """

    source: str
    setting: str
    what: str
    published: str
    ours: str
    value: Callable[[Model], Interval]
    within: tuple[float, float]
    encoder: str
    never: str = ""
    kind: str = "order"
    fixed: bool = True

    def verdict(self, model: Model) -> str:
        """The word for a model, with the reason where there is no comparison."""
        if reason := self.never or ("" if model.head else self.encoder):
            return f"not comparable: {reason}"
        return judged(self.value(model), *self.within)


LESS, MORE = (-math.inf, 0.0), (0.0, math.inf)
LAD = partial(
    Finding, "Lad et al. 2024", "GPT-2 and Pythia, 124M to 6.9B; a million tokens of the Pile",
    encoder="no head, so no top-1; the last state's cosine with the unchanged one instead",
)  # fmt: skip
NO_LOSS = "no head, so no loss; 1 − cos of the last state instead"
MEN = partial(Finding, "Men et al. 2024", "Llama2-7B, Baichuan2-7B; perplexity on PG19", encoder=NO_LOSS)
GROMOV = partial(
    Finding, "Gromov et al. 2024", "Llama-2, Qwen, Mistral, Phi-2, 2.7B to 70B; C4, MMLU, BoolQ", encoder=NO_LOSS
)
PAINTERS = partial(
    Finding, "Sun, Pickett et al. 2024", "Llama2-7B, BERT-Large; median or mean of benchmarks", encoder=NO_LOSS
)
CSORDAS = partial(
    Finding, "Csordás et al. 2025", "Llama 3.1 70B; 10 examples of GSM8K",
    encoder="published for pre-LN; a post-LN block's net change is not what it adds to the stream",
)  # fmt: skip
MASSIVE = partial(
    Finding, "Sun, Chen et al. 2024", "LLaMA2-7B, 32 blocks", encoder="an encoder; found and defined in decoders"
)

FINDINGS: tuple[Finding, ...] = (
    LAD("deleting a middle block keeps top-1", "0.72 to 0.95", "agreement, mean over the middle half",
        partial(kept, change="delete"), KEPT, kind="number"),
    LAD("swapping two middle neighbours keeps it", "0.72 to 0.95", "agreement, mean over the middle half",
        partial(kept, change="swap"), KEPT, kind="number"),
    LAD("deleting the first block harms more", "“catastrophic”, no number",
        "agreement without block 0, less the middle half's", partial(end, place=0), LESS, fixed=False),
    LAD("deleting the last block harms more", "more, no number",
        "agreement without the last block, less the middle half's", partial(end, place=-1), LESS, fixed=False),
    LAD("swapping harms less than deleting", "less, no number", "agreement of swaps, less that of deletions",
        swapped, MORE, fixed=False),
    MEN("blocks of low influence cost little", "positive correlation, no coefficient",
        "Spearman of 1 − cos(x_l, x_{l+1}), all tokens, with the change of loss", influence, MORE),
    GROMOV("a small angle across a block means a small cost", "positive relation, no coefficient",
           "Spearman of the last token's angle with the change of loss", partial(angles, count=1), MORE),
    GROMOV("so it does across several blocks", "positive relation, no coefficient",
           "the same for a fifth of the blocks", lambda model: angles(model, span(model.blocks)), MORE),
    GROMOV("angles are smallest across deeper blocks", "the deeper ones, no number",
           "where a fifth of the blocks turns it least: 0 first, 1 last place", closest, (0.5, math.inf),
           encoder="published for decoders, whose last token alone has read all of the text", fixed=False),
    PAINTERS("shuffle, reverse, parallel, skip, repeat: ever more harm", "this order",
             "share of the ten pairs that are in it, by loss, middle half", in_order, (1.0, 1.0)),
    *(PAINTERS(f"{b} harms more than {a}", "more, no number", "difference of losses, middle half, nats",
               partial(worse, pair=(a, b)), MORE) for a, b in pairwise(painters.VARIANTS)),
    CSORDAS("blocks erase, then reinforce from about the middle on", "about 0.5 of depth, no number",
            "last change of cos(u, x) to non-negative, share of depth", crossing, (1 / 3, 2 / 3), kind="number"),
    MASSIVE("the starting token is massive", "always",
            "share of sequences with position 0 above 50 times the median norm",
            lambda model: share(model, model.grid("sinks_first") > 0), (1.0, 1.0), kind="presence"),
    MASSIVE("other positions are, too", "the first delimiter",
            "share of sequences with another position above 50 times",
            lambda model: share(model, model.grid("sinks_later") > 0), (1.0, 1.0), kind="presence",
            never="models differ: in LLaMA2-13B, MPT and GPT-2 it is the starting token alone"),
    MASSIVE("an activation is above 100 and 1,000 times the median", "always; 2,000 against 0.2",
            "share of sequences with one", lambda model: share(model, are_massive(model)), (1.0, 1.0), kind="presence",
            fixed=False),
    MASSIVE("such activations appear early", "from x_2 on, 0.063 of depth", "first state with one, share of depth",
            emergence, (2 / 32, 2 / 32), kind="number", fixed=False),
)  # fmt: skip


# Words


def overview(found: Sequence[Model]) -> str:
    """Every finding beside every model, in markdown."""
    lines = []
    for finding in FINDINGS:
        what = finding.what + ("" if finding.fixed else " †")
        lines.append([finding.source, what, finding.kind, finding.published, finding.setting, finding.ours])
        for model in found:
            word, _, reason = finding.verdict(model).partition(": ")
            lines[-1] += [study.span(finding.value(model)), f"**{word}**" + (f": {reason}" if reason else "")]
    columns = [head for model in found for head in (f"{model.name} [95 %]", "verdict")]
    head = ["source", "finding", "kind", "published", "models and data there", "measured here", *columns]
    return study.markdown(head, lines)


def counts(model: Model) -> str:
    """How many findings got which word: by their kind, those not fixed beforehand apart."""
    words = [finding.verdict(model).partition(": ")[0] for finding in FINDINGS]
    if len({*words}) == 1:
        return f"All {len(words)} findings: {words[0]}."
    parts = []
    for kind, what in KINDS.items():
        fixed, later = (
            [word for word, each in zip(words, FINDINGS, strict=True) if (each.kind, each.fixed) == (kind, when)]
            for when in (True, False)
        )
        both = [tally(fixed), *([f"† {tally(later)}"] if later else [])]
        parts.append(f"{what}: {'; '.join(filter(None, both))}.")
    return f"Of {len(words)} findings, those marked † apart: {' '.join(parts)}"


def tally(words: Sequence[str]) -> str:
    """How often each word was said."""
    return ", ".join(f"{words.count(word)} {word}" for word in WORDS if word in words)


def sentences(model: Model) -> str:
    """What else the rows of a model say."""
    part, found = middle(model.blocks), []
    for change, what in (("delete", "deletion"), ("swap", "swap")):
        ends, inside = model.kept(change).mean(axis=0), model.inside(change).mean(axis=0)
        least, most = part.start + int(inside.argmin()), part.start + int(inside.argmax())
        within = f"{((inside >= KEPT[0]) & (inside <= KEPT[1])).sum()} of {len(inside)} within {KEPT[0]} to {KEPT[1]}; "
        found.append(
            f"{'top-1 agreement' if model.head else 'cosine of the last state'} after one {what}: from "
            f"{number(float(inside.min()))} (block {least}) to {number(float(inside.max()))} (block {most}) in the "
            f"middle; {within if model.head else ''}{number(float(ends[0]))} and {number(float(ends[-1]))} at the ends."
        )
    costs = {variant: model.mean(painted(model, variant)) for variant in painters.VARIANTS}
    order = sorted(costs, key=lambda variant: costs[variant].value)
    found.append(
        f"{'change of loss' if model.head else '1 − cos of the last state'} when the middle half is changed: "
        f"{', '.join(f'{variant} {study.span(costs[variant])}' for variant in order)}; published order: "
        f"{', '.join(painters.VARIANTS)}."
    )
    later, by_kl = influence(model, "block_influence_later"), ""
    if model.head:
        by_kl = f"; with KL in place of the loss {study.span(influence(model, cost='kl'))}"
    found.append(
        f"Spearman of block influence without position 0: {study.span(later)}{by_kl}. "
        f"Last change of attention's cosine to non-negative: {study.span(crossing(model, 'cosine_attention'))} of "
        f"depth; the MLP's: {study.span(crossing(model, 'cosine_mlp'))}."
    )
    return "\n".join(f"- {model.name}: {sentence}" for sentence in [*found, large(model)])


def large(model: Model) -> str:
    """Where norms and activations are large."""
    size, over, norms = (model.grid(name).mean(axis=0) for name in ("largest", "largest_ratio", "norm_ratio"))
    top, peak = int(size.argmax()), int(norms.argmax())
    text = (
        f"means over sequences: largest activation {number(float(size[top]))}, {number(float(over[top]))} times the "
        f"median, at x_{top}; "
        f"largest norm {number(float(norms[peak]))} times the median norm, at x_{peak}"
    )
    states = np.flatnonzero((model.grid("sinks_first") + model.grid("sinks_later")).any(axis=0))
    return text + (f". Some norm is above 50 times it from x_{states[0]} to x_{states[-1]}." if len(states) else ".")

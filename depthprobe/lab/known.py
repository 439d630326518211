"""What each estimator of depth must give for networks whose depth is known on paper, by formulas of their own.

The answers follow the table of exact answers in the documentation of effective depth. Where an estimator's formula
cannot give the table's value for any network of that kind, what it must give is worked out here, and a note keeps the
table's value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from depthprobe.lab.exact import (
    PART,
    Net,
    chain,
    chain_with_skips,
    halved,
    identity,
    inputs,
    parallel,
    rescaling,
    staged,
    turns,
)

__all__ = ["PUBLISHED", "Answer", "Known", "beyond", "known"]

# They have no column in the table. As they are called depths, the depth is what they are asked for.
PUBLISHED = ("cosine_crossing", "lens_kl_depth", "lens_overlap_depth", "depth_score")
SKIP = 1  # leading positions that the gradients' products leave out
Key = tuple[str, str]


@dataclass(frozen=True)
class Answer:
    """A value, and what must be known of it."""

    value: float
    note: str = ""


@dataclass(frozen=True, eq=False)
class Known:
    """A network and the answers to it.

    Attributes:
        network: what it is, in words.
        net: it.
        answers: (name, variant) → the answer; (name, "") stands for all variants that have none of their own.
    """

    network: str
    net: Net
    answers: Mapping[Key, Answer]

    def answer(self, name: str, variant: str) -> Answer | None:
        """Of one estimator, None where nothing is asked of it."""
        return self.answers.get((name, variant), self.answers.get((name, "")))


def known() -> list[Known]:
    """All of them."""
    return [*_wide(), *_deep(), *_shallow()]


def beyond() -> list[Known]:
    """What the table does not ask for, since it says which way of writing a chain is counted; to be shown beside it."""
    found = []
    names = ("stages", "dependence", "path_elasticity_raw", "path_spectrum", *PUBLISHED)
    for size, kept, word in ((0.2, 0.02, "contractive"), (2.0, 0.2, "expansive")):
        raw = 5 * (1 - kept / size**2)
        notes = {("path_elasticity_raw", ""): Answer(5, f"its formula gives {raw:.3f}")}
        gauged = Answer(5 * (1 - kept**2 / size**2), "all but the part of the Jacobian that is a multiple of I")
        answers = _depth(5, *names) | notes | {("path_elasticity", ""): gauged}
        found.append(Known(f"a chain of 5 {word} f, written x + (f(x) − x)", chain_with_skips(5, size, kept), answers))
    net = rescaling([1.0] * 10)
    return [*found, Known("10 branches that only rescale the stream, for dependence", net, _depth(0, "dependence"))]


def _wide() -> list[Known]:
    net, small = parallel(5, gain=4.0), parallel(3, gain=0.05)
    ids = inputs()
    direct = Answer(1 - direct_share(net, ids))
    answers = _depth(1, "stages", *PUBLISHED) | {
        **{("dependence", v): Answer(1 - weight_of_x0(net, ids, p), "1 less the readout's weight on x_0; table: 1")
           for v, p in (("", 2), ("first power", 1))},
        ("participation", ""): Answer(5),
        ("path_elasticity_raw", ""): direct,
        ("path_elasticity", ""): direct,
        ("path_spectrum", ""): Answer(1, "its mean is over the ways through a branch alone"),
    }  # fmt: skip
    shares = np.array([0.4, 0.4, 0.1, 0.1])  # of costs 1, 1, 1/4, 1/4
    quarters = float(np.exp(-(shares * np.log(shares)).sum()))
    note = f"the KL of a small branch is a square, so half of it costs a quarter; table, for costs that add: {3 * 2 ** (1 / 3):.3f}"  # noqa: E501
    return [
        Known("5 equal branches read x_0", net, answers),
        Known("5 equal branches read x_0, the readout sees them alone", parallel(5, apart=True), _depth(1, "stages", "dependence")),  # noqa: E501
        Known("3 small equal branches, one in two halves", halved(small, 2), {("participation", ""): Answer(quarters, note)}),  # noqa: E501
    ]  # fmt: skip


def _deep() -> list[Known]:
    paths = ("path_elasticity_raw", "path_elasticity", "path_spectrum")
    stages = staged(3, 2, bent=False)
    energies = gradient_by_part(stages, inputs())
    steps = np.arange(3, -1, -1)  # from part 0 three branches lead to the head, from part 3 none
    mean = Answer(
        float(energies @ steps / energies.sum()),
        "the gradient at the parts of x_0 that later stages read comes through fewer; table, without skips: 3",
    )
    through = Answer(float(energies @ steps / energies[:3].sum()), mean.note)
    return [
        Known("a chain of 5 without skips", chain(5), _depth(5, "stages", "dependence", *paths, *PUBLISHED)),
        Known(
            "a chain of 5 equal blocks",
            chain(5, alike=True),
            _depth(5, "participation")
            | {("depth_score", ""): Answer(3, "(L + 1) / 2, as a centre of mass; it is asked for the depth elsewhere")},
        ),
        Known(
            "3 stages of 2 branches, a block each",
            stages,
            _depth(3, "stages", "dependence", *PUBLISHED)
            | _depth(6, "participation")
            | {(paths[0], ""): mean, (paths[1], ""): mean, (paths[2], ""): through},
        ),
        Known(
            "3 stages of 2 branches, a block a stage, no skips",
            turns(3, 2),
            _depth(3, "stages", "dependence", *paths, *PUBLISHED),
        ),
    ]


def _shallow() -> list[Known]:
    paths = ("path_elasticity_raw", "path_elasticity", "path_spectrum")
    count, net = 10, rescaling([1.0] * 10)
    harmonic = sum(1 / k for k in range(2, count + 2))
    width = net.head.in_features
    left = Answer(2 / width * harmonic, "the norm takes away two of all directions: 2/d (H_{N+1} − 1); table: 0")
    raw = Answer(0, f"its formula gives H_{{N+1}} − 1 = {harmonic:.3f}")
    names = ("stages", "participation", "path_spectrum", *PUBLISHED)
    answers = _depth(0, *names) | {(paths[0], ""): raw, (paths[1], ""): left}
    everything = _depth(0, "stages", "dependence", "participation", *paths, *PUBLISHED)
    return [
        Known("4 blocks that do nothing", identity(4), everything),
        Known(f"{count} branches that only rescale the stream", net, answers),
    ]


def _depth(value: float, *names: str) -> dict[Key, Answer]:
    return {(name, ""): Answer(value) for name in names}


# --- by hand ---------------------------------------------------------------------------------------------------------


def direct_share(net: Net, ids: Tensor) -> float:
    """⟨g_0, g⟩ / ‖g‖² of the mean next-token loss, g at x_0 and g_0 at x_L, where every skip is the identity."""
    first, last = _gradients(net, ids)
    return float((first * last).sum() / first.square().sum())


def gradient_by_part(net: Net, ids: Tensor) -> np.ndarray:
    """‖g‖² of the gradient at x_0 by part of the stream, `[parts]`."""
    first = _gradients(net, ids)[0]
    return first.square().sum(dim=(0, 1)).reshape(-1, PART).sum(dim=1).numpy()


def weight_of_x0(net: Net, ids: Tensor, power: int) -> float:
    """The readout's weight on x_0 beside all branches: by what each moves the logits, less their mean, per token."""
    net = net.double()
    with torch.no_grad():
        x = net.embed(ids)
        parts = [x]
        for block in net.blocks:
            parts.append(block(x) - x)
            x = block(x)
        moved = [(net.read(x) - net.read(x - part))[:, SKIP:] for part in parts]
    changes = torch.stack([(m - m.mean(-1, keepdim=True)).norm(dim=-1) ** power for m in moved])
    return float((changes[0] / changes.sum(0)).mean())


def _gradients(net: Net, ids: Tensor) -> tuple[Tensor, Tensor]:
    """At x_0 and at x_L, `[sequences, tokens, width]`, of each sequence's mean loss."""
    net = net.double()
    states = [net.embed(ids).detach().requires_grad_()]
    for block in net.blocks:
        states.append(block(states[-1]))
    logits = net.read(states[-1])[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) * len(ids)
    first, last = torch.autograd.grad(loss, [states[0], states[-1]])
    return first[:, SKIP:], last[:, SKIP:]

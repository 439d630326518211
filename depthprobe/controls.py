"""What a trained model on real text is held against: its randomly initialised twin, and random tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from depthprobe.arrays import sha256_of
from depthprobe.checkpoint import Checkpoint
from depthprobe.corpus import Corpus
from depthprobe.depth.base import Depth, DepthSettings
from depthprobe.depth.finished import Finished
from depthprobe.depth.gate import CONTROLS
from depthprobe.depth.suite import Ran, run_estimators
from depthprobe.errors import DepthprobeError
from depthprobe.fresh import fresh_twin
from depthprobe.prepare import prepare
from depthprobe.probes.base import key_rng
from depthprobe.processes import together
from depthprobe.verify import Anatomy

__all__ = ["TWINS", "Held", "draws_of", "of_draws", "random_init", "random_tokens", "run_controls"]

Held = dict[tuple[str, str], Depth]  # (name, variant) → what an estimator says of a control
TWINS = 3  # a draw of random weights says little of another: twins differ by more than the intervals over sequences

_TOKENS = 1 << 27  # key of the random draws


def random_init(anatomy: Anatomy, corpus: Corpus, seed: int) -> Anatomy:
    """The verified twin with random weights, see `fresh_twin`, in the model's dtype: rounding is then alike in both.

    Raises:
        UsageError: nothing says how the model is initialised.
        CheckpointError, VerificationError: the twin cannot be built, or its stream was not found.
    """
    checkpoint = anatomy.stream.checkpoint
    return prepare(together(lambda: fresh_twin(checkpoint, seed, checkpoint.dtype)), corpus)[2]


def random_tokens(checkpoint: Checkpoint, corpus: Corpus, seed: int) -> Corpus:
    """As many sequences of as many tokens, each id drawn evenly from the vocabulary by (seed, sequence).

    What every sequence begins with, such as BOS or an image's first state, stays where it is, and so does an encoder's
    SEP. Of float states, each dimension is drawn from a normal distribution with its mean and spread in the corpus.
    """
    inputs, rows = corpus.inputs, range(corpus.sequences)
    if corpus.is_states:
        flat = inputs.double().flatten(0, -2)
        shape = tuple(inputs.shape[1:])
        noise = np.stack([key_rng(seed, row, _TOKENS).standard_normal(shape) for row in rows])
        made = (flat.mean(0) + flat.std(0) * torch.from_numpy(noise)).to(inputs.dtype)
    else:
        size = checkpoint.vocab_size or int(inputs.max()) + 1
        drawn = [key_rng(seed, row, _TOKENS).integers(0, size, corpus.tokens) for row in rows]
        made = torch.from_numpy(np.stack(drawn)).to(inputs.dtype)
    if corpus.sequences > 1 and bool((inputs[:, 0] == inputs[0, 0]).all()):
        made[:, 0] = inputs[:, 0]
    if corpus.same_end:
        made[:, -1] = inputs[:, -1]
    sha256 = sha256_of(made)
    return replace(corpus, inputs=made, documents=None, owners=None, name="random tokens", sha256=sha256, notes=())


def run_controls(
    anatomy: Anatomy,
    corpus: Corpus,
    names: Sequence[str],
    controls: Sequence[str] = CONTROLS,
    unit: str = "block",
    settings: DepthSettings | None = None,
    twins: int = TWINS,
    progress: Callable[[float], None] | None = None,
    finished: Finished | None = None,
) -> dict[str, Held | str]:
    """What estimators say of each control; of one that could not be made, why.

    Args:
        anatomy, corpus, unit, settings: as for the model itself.
        names: of `depth.suite.ESTIMATORS`.
        controls: of `depth.gate.CONTROLS`.
        twins: how many draws of random weights, with seeds `settings.seed`, …; see `of_draws`.
        progress: called with the share that is done, 0 to 1.
        finished: keeps what is found, and has what an earlier run found.
    """
    settings = settings or DepthSettings()
    runs, done = sum(draws_of(control, twins) for control in controls), 0

    def step(share: float) -> None:
        if progress is not None:
            progress(min(1.0, (done + share) / runs))

    found: dict[str, Held | str] = {}
    for control in controls:
        draws = []
        try:
            for seed in range(settings.seed, settings.seed + draws_of(control, twins)):
                twin, other = anatomy, corpus
                if control == "random-init":
                    twin = random_init(anatomy, corpus, seed)
                else:
                    other = random_tokens(anatomy.stream.checkpoint, corpus, seed)
                ran = run_estimators(twin, other, names, unit, settings, step, finished, f"{control}-{seed}")
                draws.append(_held(ran))
                done += 1
            found[control] = of_draws(draws)
        except DepthprobeError as error:
            found[control] = str(error)
    return found


def draws_of(control: str, twins: int) -> int:
    """How many runs a control takes."""
    return twins if control == "random-init" else 1


def of_draws(draws: Sequence[Held]) -> Held:
    """Their mean, from the lowest lower to the highest upper end of their intervals: beyond it is beyond each of them.

    A row that one of the draws does not have is left out.
    """
    made: Held = {}
    for key in draws[0]:
        rows = [held[key] for held in draws if key in held]
        if len(rows) < len(draws):
            continue
        value, low, high = (
            float(pick([getattr(row, name) for row in rows]))
            for pick, name in ((np.mean, "value"), (np.min, "ci_low"), (np.max, "ci_high"))
        )
        made[key] = replace(rows[0], value=value, ci_low=low, ci_high=high)
    return made


def _held(ran: Sequence[Ran]) -> Held:
    return {(row.name, row.variant): row for one in ran if one.estimate is not None for row in one.estimate.rows}

"""Prove on the model at hand that the right tensors were found, before the first number is reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from depthprobe.anatomy import find_branches
from depthprobe.blocks import BlockList, find_blocks
from depthprobe.branches import Reader
from depthprobe.checkpoint import Checkpoint
from depthprobe.errors import NonFiniteError, VerificationError
from depthprobe.stream import Entry, Stream
from depthprobe.taps import Block

__all__ = ["Anatomy", "Check", "floor", "open_stream", "worst"]


@dataclass(frozen=True)
class Check:
    """One check: the relative difference ‖a − b‖ / ‖b‖ of the worst sequence against the floor of the dtype."""

    name: str
    what: str
    value: float
    floor: float
    level: Literal["model", "sublayers", "readout"]

    @property
    def passed(self) -> bool:
        """Whether the difference is within the floor."""
        return self.value <= self.floor


@dataclass(frozen=True, eq=False)
class Anatomy:
    """What was found in a model, and the proof.

    Attributes:
        stream: the model as a sequence of blocks.
        blocks: one entry a block, with its branches where they were found and verified.
        checks: the verification.
        causal: no position sees a later one.
        objective: `causal`, `masked` or None: what the readout predicts, if anything.
        reads_positions_apart: the readout of a position depends on no other position, so a lens can pick positions.
        notes: what was not found, in plain sentences.
    """

    stream: Stream
    blocks: tuple[Block, ...]
    checks: tuple[Check, ...]
    causal: bool
    objective: Literal["causal", "masked"] | None
    reads_positions_apart: bool
    notes: tuple[str, ...]

    @property
    def post_ln(self) -> bool:
        """Whether both sublayers of every block were found, and all are post-LN."""
        return all(len(b.branches) == 2 and all(u.placement == "post" for u in b.branches) for b in self.blocks)


def floor(checkpoint: Checkpoint) -> float:
    """The largest relative difference that rounding may leave: by dtype, and by attention kernel in float32."""
    if checkpoint.dtype in {torch.bfloat16, torch.float16}:
        return 1e-2
    attention = getattr(getattr(checkpoint.model, "config", None), "_attn_implementation", None)
    return 5e-5 if attention == "eager" else 5e-4


def open_stream(checkpoint: Checkpoint, inputs: Tensor) -> Anatomy:
    """Find the residual stream and its branches on a small batch, and verify both.

    Args:
        checkpoint: the model.
        inputs: ids `[batch, tokens]` or states `[batch, tokens, width]`; a few sequences of a few dozen tokens.

    Raises:
        AnatomyError: no single residual stream was found.
        NonFiniteError: a block's or the model's output is not finite.
        VerificationError: running the blocks one by one does not give the model's own output.
    """
    inputs = _unequal(inputs[:4, :64])
    limit = floor(checkpoint)
    with torch.no_grad():
        stream, entry = _guarded(checkpoint, inputs)
        xs = _states(stream, entry)
        _check_finite(xs)
        own = stream.forward(inputs)
        if not bool(torch.isfinite(own).all()):
            raise NonFiniteError(
                f"the output of {checkpoint.architecture} is not finite ({own.dtype})".replace("torch.", ""),
                "finite values",
                "the weights of its final norm or head may be damaged; try --dtype float32",
            )
        again = stream.readout(xs[-1], inputs)
        model = Check(
            "blocks", "the blocks, run one by one, give the model's own output", worst(again, own), limit, "model"
        )
        if not model.passed:
            raise VerificationError(
                f"running the {len(stream)} blocks of {stream.blocks.path} one by one gives an output that differs "
                f"from the model's own by {model.value:.1e}",
                f"at most {limit:.0e}",
                "this architecture is not supported: its blocks may keep something from one run to the next, or leave "
                "each other something beside the stream (shared keys and values); please report it",
            )
        notes: list[str] = []
        blocks = find_branches(stream, entry, xs, tolerance=1e-2 if limit == 1e-2 else 5e-5)
        checks = [model]
        missing = [block.index for block in blocks if not block.branches]
        if missing:
            notes.append(
                "Attention and MLP branches were not found in "
                + ("any block" if len(missing) == len(blocks) else f"block {', '.join(map(str, missing))}")
                + ": results are given for whole blocks"
                + ("." if len(missing) == len(blocks) else " there.")
            )
        if len(missing) < len(blocks):
            check = _reconstruct(stream, entry, blocks, limit)
            checks.append(check)
            if not check.passed:
                blocks = tuple(Block(b.index, b.kind, ()) for b in blocks)
                notes.append(
                    f"The branches that were found rebuild the blocks only to {check.value:.1e}: they were dropped, "
                    "and results are given for whole blocks."
                )
        apart = _reads_apart(stream, xs[-1], inputs, own)
        checks.append(
            Check(
                "readout",
                "the readout of half of the positions, in another order, is the same there",
                apart,
                limit,
                "readout",
            )
        )
        causal = _is_causal(stream, xs[-1], inputs, limit)
        notes += _scaling(blocks)
        notes += _handed_on(stream.blocks)
    objective = _objective(checkpoint, own, stream.blocks.width, causal)
    if objective == "causal" and not causal:
        objective = None
        notes.append(
            "Positions of this model see later ones, and so the token that they are to predict: no loss is taken."
        )
    if objective is not None and own.shape[:2] != inputs.shape[:2]:
        objective = None
        notes.append(f"The model gives predictions at {own.shape[1]} of {inputs.shape[1]} positions: no loss is taken.")
    return Anatomy(stream, blocks, tuple(checks), causal, objective, apart <= limit, tuple(notes))


def _unequal(inputs: Tensor) -> Tensor:
    """As many sequences as tokens would hide which axis is which."""
    batch, tokens = inputs.shape[:2]
    if batch == tokens:
        return inputs[:-1] if batch > 1 else inputs
    return inputs


def _guarded(checkpoint: Checkpoint, inputs: Tensor) -> tuple[Stream, Entry]:
    """The stream, with a copy of each state handed to blocks that would overwrite it, and a batch in it.

    Every block has been run on another state of this batch: of one that keeps something of it for the next run, that
    run does not give the model's own output.
    """
    blocks = find_blocks(checkpoint, inputs)
    for copies in (False, True):
        stream = Stream(checkpoint, blocks, copies_input=copies)
        entry = stream.enter(inputs)
        x = stream.inherit(_another(entry.x), entry.x)
        for index in range(len(stream)):
            before = x.clone()
            z = stream.run(entry, index, x)
            if not torch.equal(before, x):
                break
            x = z
        else:
            break
    return stream, entry


def _states(stream: Stream, entry: Entry) -> list[Tensor]:
    """x_0 … x_L; after each block's run it is run on another state, as in `_guarded`.

    Of blocks that leave something for later ones elsewhere than in what they return, such as keys and values in a
    common dictionary, the later ones find that of the other state, and do not give the model's own output.
    """
    xs = [entry.x]
    for index in range(len(stream)):
        with stream.resident(index):
            xs.append(stream.run(entry, index, xs[-1]))
            stream.run(entry, index, stream.inherit(_another(xs[-2]), xs[-2]))
    return xs


def _handed_on(blocks: BlockList) -> list[str]:
    """What goes from block to block beside the stream, and what that means for schedules."""
    if not blocks.carried:
        return []
    note = (
        "Beside the stream, each block hands on what the next one uses, such as attention scores: under a schedule, a "
        "block gets what the block before it in the schedule handed on."
    )
    if blocks.carried_unchanged:
        note += (
            " Here it is one tensor for all, such as T5's table of positions: where the first block is skipped or "
            "moved, others lack it, and what that costs is part of the first block's cost."
        )
    return [note]


def _another(x: Tensor) -> Tensor:
    """Another state of the same size: its tokens in reverse, and turned round, since there may be one of them."""
    return -x.flip(1)


def _scaling(blocks: tuple[Block, ...]) -> list[str]:
    """What a factor on the stream does to what is measured, where blocks have one."""
    scaling = [block for block in blocks if block.scales_stream]
    if not scaling:
        return []
    factors = [b.skip_scale for block in scaling for b in block.branches if b.gain is None and b.skip_scale != 1.0]
    by = f"by {min(factors):.3g} to {max(factors):.3g}" if factors else "by learned gains"
    return [
        f"{len(scaling)} of {len(blocks)} blocks multiply the stream itself ({by}). What is called an update, f(x) − x,"
        " has that in it: merges by sum, ρ and interaction errors mean little where the factor is far from 1."
    ]


def _check_finite(xs: list[Tensor]) -> None:
    for block, x in enumerate(xs, start=-1):
        wrong = (~torch.isfinite(x).all(dim=-1)).nonzero()
        if len(wrong):
            dtype = str(x.dtype).removeprefix("torch.")
            if block < 0:
                raise NonFiniteError(f"the embedding gives values that are not finite ({dtype})", "finite activations")
            raise NonFiniteError.in_block(block, "block", dtype, *wrong[0].tolist())


def _last(stream: Stream, entry: Entry) -> Tensor:
    *_, last = stream.states(entry)
    return last


def worst(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖ of the worst sequence."""
    a, b = (t.cpu().double().flatten(1) for t in (a, b))
    finite = bool(torch.isfinite(b).all())
    error = (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-300)
    return float(error.max()) if finite and bool(torch.isfinite(a).all()) else float("inf")


def _reconstruct(stream: Stream, entry: Entry, blocks: tuple[Block, ...], limit: float) -> Check:
    """Rebuild every block's output from its branches, through the norm where it is post-LN; the worst."""
    largest = 0.0
    with Reader(stream, blocks) as reader:
        x = entry.x
        for block, module in zip(blocks, stream.blocks.modules, strict=True):
            with stream.resident(block.index):
                visit = reader.visit(entry, block.index, x)
                total = x
                for branch in block.branches:
                    s, u = visit.branches[branch.unit]
                    if branch.parallel:
                        total = s if total is x else total
                        total = total + u
                    else:
                        largest = max(largest, worst(branch.skip(module, total), s))
                        total = s + u
                    total = branch.normed(module, total)
            if block.branches:
                largest = max(largest, worst(total, visit.z))
            x = visit.z
    return Check("branches", "the branches, added to the stream, give each block's output", largest, limit, "sublayers")


def _reads_apart(stream: Stream, last: Tensor, inputs: Tensor, own: Tensor) -> float:
    """How much the readout of a position depends on where the position stands and on what stands around it."""
    order = torch.randperm(last.shape[1], generator=torch.Generator().manual_seed(0)).to(last.device)
    # Half of them: a norm over positions treats all alike, but not each as if it were alone.
    order = order[: (len(order) + 1) // 2]
    some = last[:, order]
    shuffled = stream.readout(some, inputs[:, : len(order)])
    alike = shuffled.shape[:2] == some.shape[:2] and own.shape[:2] == last.shape[:2]
    return worst(shuffled, own[:, order]) if alike else float("inf")


def _is_causal(stream: Stream, last: Tensor, inputs: Tensor, limit: float) -> bool:
    """Whether a change of the last position leaves the last state of all earlier ones as it was."""
    if inputs.shape[1] < 2:
        return True
    changed = inputs.clone()
    # Any other id that the sequence itself shows to be valid; failing that, its neighbour.
    changed[:, -1] = inputs[:, 0] if bool((inputs[:, 0] != inputs[:, -1]).all()) else inputs[:, -1] * 0
    if torch.equal(changed, inputs):
        changed[:, -1] = inputs[:, -1] + 1
    # Position by position: beside one of huge norm, a change of all others would be small.
    before, after = (x[:, :-1].flatten(0, 1) for x in (last, _last(stream, stream.enter(changed))))
    return worst(before, after) <= limit


def _objective(checkpoint: Checkpoint, own: Tensor, width: int, causal: bool) -> Literal["causal", "masked"] | None:
    if checkpoint.objective is not None or checkpoint.is_hf or checkpoint.inputs == "states":
        return checkpoint.objective
    # A module of one's own that takes ids and returns one number for each of them is a language model.
    vocabulary = checkpoint.vocab_size
    if own.ndim == 3 and own.shape[-1] != width and vocabulary is not None and own.shape[-1] >= vocabulary:
        return "causal" if causal else "masked"
    return None

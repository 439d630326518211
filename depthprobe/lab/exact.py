"""Small networks whose depth is known on paper, and rewrites of them that keep what they compute.

A network is an embedding, blocks, and a head, without attention: every token by itself. The stream is made of parts of
equal width, so that who reads whom is a matter of wiring: a branch reads one part and writes to another.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "PART",
    "VOCAB",
    "Adds",
    "Hidden",
    "Instead",
    "Net",
    "Replaces",
    "Rescales",
    "Update",
    "chain",
    "chain_with_skips",
    "gained",
    "halved",
    "hidden",
    "identity",
    "in_another_unit",
    "inputs",
    "lengthened",
    "parallel",
    "rescaling",
    "staged",
    "turn",
    "turns",
    "wired",
    "zeros",
]

VOCAB, PART = 50, 8


class Update(nn.Module):
    """gain · φ(W N(x[reads])) in the part `writes` of the stream, 0 elsewhere.

    Args:
        seed: of W, `[PART, PART]`.
        reads, writes: which part.
        gain: a factor.
        bent: φ is tanh(2 ·), otherwise nothing.
        normed: N is a LayerNorm without gains and without ε, otherwise nothing.
    """

    def __init__(
        self, seed: int, reads: int, writes: int, gain: float = 1.0, bent: bool = True, normed: bool = False
    ) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(PART, PART, generator=draw) / PART**0.5)
        self.reads, self.writes, self.gain, self.bent, self.normed = reads, writes, gain, bent, normed

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, tokens, width]` to the same."""
        read = x[..., PART * self.reads : PART * (self.reads + 1)]
        if self.normed:
            read = F.layer_norm(read, (PART,), eps=1e-30)
        written = read @ self.weight.T
        written = self.gain * (torch.tanh(2 * written) if self.bent else written)
        before = PART * self.writes
        return F.pad(written, (before, x.shape[-1] - before - PART))


class Instead(nn.Module):
    """W x − x: with a skip around it, W x alone is left."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, tokens, width]` to the same."""
        return x @ self.weight.T - x


class Rescales(nn.Module):
    """gain · N(x): in a network whose head has a norm in front it changes nothing."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, tokens, width]` to the same."""
        return self.gain * F.layer_norm(x, x.shape[-1:], eps=1e-30)


class Adds(nn.Module):
    """after · (x / before + u(x / before)): a block with a skip, and with a factor in front of it and behind it."""

    def __init__(self, update: nn.Module, before: float = 1.0, after: float = 1.0) -> None:
        super().__init__()
        self.mlp, self.before, self.after = update, before, after

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, tokens, width]` to the same."""
        return x * (self.after / self.before) + self.mlp(x / self.before) * self.after


class Hidden(nn.Module):
    """A block whose branch has no name that says what it is."""

    def __init__(self, block: Adds) -> None:
        super().__init__()
        self.inside = copy.deepcopy(block.mlp)
        self.before, self.after = block.before, block.after

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, tokens, width]` to the same."""
        x = x / self.before
        return self.after * (x + self.inside(x))


class Replaces(nn.Module):
    """Σ W_i x: a block of parallel branches without a skip."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(matrix) for matrix in matrices])

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, tokens, width]` to the same."""
        return torch.stack([x @ weight.T for weight in self.weights]).sum(dim=0)


class Net(nn.Module):
    """Embedding, blocks, and a head that sees some parts of the stream.

    Args:
        blocks: what is between.
        parts: of the stream.
        seen: which parts the head sees, by default all.
        filled: how many parts, from the first on, the embedding fills; by default all.
        norm: the head reads the stream through a LayerNorm without ε.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        parts: int,
        seen: Sequence[int] | None = None,
        filled: int | None = None,
        norm: bool = False,
    ) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        width = PART * parts
        embedding, head = (torch.randn(VOCAB, width, generator=draw) for _ in range(2))
        embedding[:, PART * (parts if filled is None else filled) :] = 0
        for part in set(range(parts)) - set(range(parts) if seen is None else seen):
            head[:, PART * part : PART * (part + 1)] = 0
        self.embed = nn.Embedding(VOCAB, width, _weight=embedding)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = nn.Parameter(3 * head / width**0.5)
        self.norm, self.before_head = norm, 1.0

    def forward(self, ids: Tensor) -> Tensor:
        """Logits `[batch, tokens, VOCAB]` of ids `[batch, tokens]`."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.read(x)

    def read(self, x: Tensor) -> Tensor:
        """Logits of the last state."""
        x = x / self.before_head
        return self.head(F.layer_norm(x, x.shape[-1:], eps=1e-30) if self.norm else x)


def inputs(sequences: int = 8, tokens: int = 16) -> Tensor:
    """Random ids `[sequences, tokens]`, always the same."""
    return torch.randint(VOCAB, (sequences, tokens), generator=torch.Generator().manual_seed(0))


def turn(seed: int, width: int) -> Tensor:
    """A rotation by 90° in random planes: orthogonal and antisymmetric, so that its trace is 0 in any basis."""
    draw = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(width, width, generator=draw, dtype=torch.float64))[0]
    quarter = torch.zeros(width, width, dtype=torch.float64)
    quarter[::2, 1::2], quarter[1::2, ::2] = torch.eye(width // 2), -torch.eye(width // 2)
    return (basis @ quarter @ basis.T).float()


# --- networks ---------------------------------------------------------------------------------------------------------


def parallel(count: int, gain: float = 1.0, apart: bool = False) -> Net:
    """Equal branches that all read the part that the embedding alone writes. Depth 1.

    Args:
        count: of branches.
        gain: of all together.
        apart: the embedding fills that part alone, and the head sees the other alone.
    """
    branches = [Adds(Update(0, 0, 1, gain / count)) for _ in range(count)]
    return Net(branches, 2, seen=[1] if apart else None, filled=1 if apart else None)


def chain(count: int, parts: int = 2, alike: bool = False) -> Net:
    """Blocks without skips, each a rotation: all different, or all the same. Depth `count`."""
    return Net([Replaces([turn(0 if alike else i, PART * parts)]) for i in range(count)], parts)


def chain_with_skips(count: int, size: float, kept: float, parts: int = 2) -> Net:
    """x + (W x − x), W = kept · I + a rotation, of norm `size` and different in every block. Depth `count`.

    A norm in front of the head makes good for what the blocks do to the size of the stream.
    """
    width = PART * parts
    rest = (size**2 - kept**2) ** 0.5
    blocks = [Adds(Instead(kept * torch.eye(width) + rest * turn(i, width))) for i in range(count)]
    return Net(blocks, parts, norm=True)


def identity(count: int) -> Net:
    """Blocks that do nothing. Depth 0."""
    return Net(zeros(count), 2)


def zeros(count: int) -> list[nn.Module]:
    """Blocks that do nothing."""
    return [Adds(Update(i, 0, 1, gain=0.0)) for i in range(count)]


def staged(stages: int, each: int, bent: bool = True) -> Net:
    """Equal branches of a stage read what the stage before alone wrote; the head sees the last. Depth `stages`.

    Each has 1 / `each` of the gain, so that the skipped one of a stage leaves (each − 1) / each of what it was.
    """
    blocks = [Adds(Update(k, k, k + 1, 1 / each, bent)) for k in range(stages) for _ in range(each)]
    return Net(blocks, stages + 1, [stages], filled=1)


def turns(stages: int, each: int, parts: int = 2) -> Net:
    """The same with a block a stage and without skips: every block is the sum of rotations. Depth `stages`."""
    return Net([Replaces([turn(each * k + i, PART * parts) for i in range(each)]) for k in range(stages)], parts)


def rescaling(gains: Sequence[float], parts: int = 4) -> Net:
    """Branches that only rescale the stream, which starts with mean 0 and spread 1; a head behind a norm. Depth 0."""
    net = Net([Adds(Rescales(gain)) for gain in gains], parts, norm=True)
    with torch.no_grad():
        net.embed.weight.copy_(F.layer_norm(net.embed.weight, (PART * parts,), eps=1e-30))
    return net


def wired(normed: bool = False) -> Net:
    """Branches at random, some of which read others: of no depth that is known, for rewrites."""
    places = [(0, 1), (1, 2), (0, 2), (2, 0), (1, 2)]
    blocks = [Adds(Update(7 + i, reads, writes, normed=normed)) for i, (reads, writes) in enumerate(places)]
    return Net(blocks, 3)


# --- rewrites that keep the function ----------------------------------------------------------------------------------


def hidden(net: Net) -> Net:
    """The same network with its branches where nobody looks for them."""
    found = copy.deepcopy(net)
    found.blocks = nn.ModuleList([Hidden(block) for block in found.blocks])  # type: ignore[arg-type]
    return found


def gained(net: Net, place: int, factor: float) -> Net:
    """The stream times a factor behind a block, all later branches with it, and what they read divided by it."""
    found = copy.deepcopy(net)
    blocks: list[Adds] = list(found.blocks)  # type: ignore[arg-type]
    blocks[place].after *= factor
    for block in blocks[place + 1 :]:
        block.before *= factor
        block.after *= factor
    found.before_head *= factor
    return found


def lengthened(net: Net, place: int, count: int) -> Net:
    """Blocks that do nothing in front of block `place`, or at the end."""
    found = copy.deepcopy(net)
    for block in zeros(count):
        found.blocks.insert(place, block.to(net.head.weight))
    return found


def halved(net: Net, place: int) -> Net:
    """A branch in two copies of half its gain, one behind the other: it must not read what it writes."""
    found = copy.deepcopy(net)
    block: Adds = found.blocks[place]  # type: ignore[assignment]
    block.mlp.gain = block.mlp.gain / 2  # type: ignore[operator,assignment]
    found.blocks.insert(place, copy.deepcopy(block))
    return found


def in_another_unit(net: Net, factor: float) -> Net:
    """The embedding and all branches times a factor, where every branch reads through a norm."""
    found = copy.deepcopy(net)
    with torch.no_grad():
        found.embed.weight.mul_(factor)
        for block in found.blocks:
            block.mlp.gain = block.mlp.gain * factor  # type: ignore[union-attr,operator]
    found.before_head *= factor
    return found

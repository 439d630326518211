"""Tasks whose needed depth is known: pointers to follow, points to move, permutations to multiply.

Each takes k steps, of which each needs the answer of the one before, and asks for the answers after 1 to k of them.
Where steps can be put together before their input is known, some log2(k) blocks are enough; where they cannot, it
takes k. How many exactly is found by training (`analyses/known_depth.py`), not assumed.

The answers are labels, not tokens of a sequence, which would give away the steps before. So a loss that is taken from
the ids alone, as `analyze` takes it, says nothing about these models; what compares a model's outputs does.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthprobe.errors import UsageError

__all__ = ["IGNORED", "TASKS", "Moves", "PointerChase", "Products", "Task", "make_task"]

Ids = NDArray[np.int64]
IGNORED = -100  # the label of a position that no loss is taken at, as in transformers
TEST_SHARE = 8  # one of so many instances is for the test alone
TEST_ROWS = 1024
ROUNDS = 100  # after so many without a single instance there is none


class Task(ABC):
    """A source of batches that are made as they are drawn, `depthprobe.lab.text.Source`.

    An *instance* is what a sequence is about: its lists of pointers, or its word. A hash of it decides whether it is
    for training or for the test, so that none is ever in both.
    """

    kind: ClassVar[str]
    k: int

    @property
    def name(self) -> str:
        """Of the task and k."""
        return f"{self.kind}-{self.k}"

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Ids are below it; the last one begins a sequence."""

    @property
    @abstractmethod
    def seq_len(self) -> int:
        """Tokens of a sequence."""

    @property
    @abstractmethod
    def depths(self) -> Tensor:
        """After how many steps, 1 to k, each label is the answer, int64 `[tokens]`; 0 where it is no answer."""

    @abstractmethod
    def _instances(self, rng: np.random.Generator, rows: int) -> Ids:
        """Random instances `[rows, numbers]`."""

    @abstractmethod
    def _sequences(self, rng: np.random.Generator, instances: Ids) -> tuple[Ids, Ids]:
        """Ids and labels `[rows, tokens]` about these instances."""

    def batch(self, seed: int, step: int, rows: int) -> tuple[Tensor, Tensor]:
        """Ids and labels for training, int64 `[rows, tokens]`: a function of the seed and the step alone.

        Labels stand at the position of their token, as transformers' causal models expect: the label at `t` is what is
        to be predicted at `t - 1`.
        """
        return self.draw(np.random.default_rng((seed, step)), rows, test=False)

    @cached_property
    def validation(self) -> tuple[Tensor, Tensor]:
        """Ids and labels for the test, int64 `[1024, tokens]`, the same in every run."""
        return self.draw(np.random.default_rng(0), TEST_ROWS, test=True)

    def draw(self, rng: np.random.Generator, rows: int, *, test: bool) -> tuple[Tensor, Tensor]:
        """Sequences about instances of the training share or of the test share, `[rows, tokens]`.

        Raises:
            UsageError: the task is so small that there are none.
        """
        share = 1 / TEST_SHARE if test else 1 - 1 / TEST_SHARE
        kept: list[Ids] = []
        while (missing := rows - sum(map(len, kept))) > 0:
            drawn = self._instances(rng, math.ceil(missing / share * 1.1) + 8)
            kept.append(drawn[is_test(drawn) == test])
            if len(kept) == ROUNDS and not sum(map(len, kept)):
                raise UsageError(f"{self.name} has too few instances for a test", "a larger task")
        ids, labels = self._sequences(rng, np.concatenate(kept)[:rows])
        return torch.from_numpy(ids), torch.from_numpy(labels)

    @property
    def frequencies(self) -> None:
        """What the frequencies of tokens give says nothing about a task."""
        return None

    @cached_property
    def sha256(self) -> str:
        """Of the test's ids and labels, little-endian int64."""
        ids, labels = self.validation
        return hashlib.sha256(b"".join(part.numpy().astype("<i8").tobytes() for part in (ids, labels))).hexdigest()


@dataclass(frozen=True)
class PointerChase(Task):
    """Follow k pointers through k lists.

    A sequence lists k random functions of the symbols to the symbols, one after the other, each as its values in the
    order of its arguments. Then come starts; at each the symbol is asked for that its pointers lead to, at the first
    starts after k steps, f_k(… f_2(f_1(s))), at the next after k − 1, and so on down to one: the position says after
    how many. No start is asked for twice after equally many steps.

    A list stands after those that lead to it, so that no position of a causal model can look its own pointer up in
    the next list. It can look back, for all that leads to it, as the functions are random and no permutations: with
    that, L blocks can follow more than L pointers.

    Attributes:
        k: steps, and lists.
        symbols: in a list.
        starts: for each number of steps.
    """

    kind = "chase"
    k: int
    symbols: int = 6
    starts: int = 4

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UsageError(f"pointer chasing over {self.k} steps", "at least 1")
        if not 1 <= self.starts <= self.symbols:
            raise UsageError(f"{self.starts} different starts among {self.symbols} symbols", "1 to as many as symbols")

    @property
    def vocab_size(self) -> int:
        """The symbols, and the edge of a sequence."""
        return self.symbols + 1

    @property
    def seq_len(self) -> int:
        """Lists, starts and two edges."""
        return 2 + self.k * (self.symbols + self.starts)

    @property
    def depths(self) -> Tensor:
        """The starts' number of steps, one place later."""
        before = torch.zeros(2 + self.k * self.symbols, dtype=torch.long)
        return torch.cat([before, torch.arange(self.k, 0, -1).repeat_interleave(self.starts)])

    def _instances(self, rng: np.random.Generator, rows: int) -> Ids:
        return rng.integers(0, self.symbols, (rows, self.k * self.symbols))

    def _sequences(self, rng: np.random.Generator, instances: Ids) -> tuple[Ids, Ids]:
        rows = len(instances)
        lists = instances.reshape(rows, self.k, self.symbols)
        starts: list[Ids] = []
        found: list[Ids] = []
        for steps in range(self.k, 0, -1):
            starts.append(rng.random((rows, self.symbols)).argsort(axis=1)[:, : self.starts])
            symbol = starts[-1]
            for step in range(steps):
                symbol = np.take_along_axis(lists[:, step], symbol, axis=1)
            found.append(symbol)
        edge = np.full((rows, 1), self.symbols)
        ids = np.concatenate([edge, instances, *starts, edge], axis=1)
        return ids, np.concatenate([edge, instances, starts[0][:, :1], *found], axis=1)


@dataclass(frozen=True)
class Moves(Task):
    """Move a point k times: the word problem of permutations with few letters and many points.

    A sequence is a point and a word of k letters; every letter stands for a permutation of the points, the same ones
    in every sequence, drawn once by a seed. At each letter the point is asked for that the letters up to there lead to.

    The permutations generate a group that is far too large for a product of many of them to be remembered, but two
    letters and a point have few answers (4,096 by default), and one block remembers many that it has seen: for k = 2
    the blocks needed are those that also get words right which were kept out of the training.

    Attributes:
        k: letters in a word. At least 2: what is kept for the test would otherwise be moves that were never seen.
        points: that are moved.
        letters: to write words with.
    """

    kind = "moves"
    k: int
    points: int = 16
    letters: int = 16

    def __post_init__(self) -> None:
        if self.k < 2:
            raise UsageError(f"a word of {self.k} letters", "at least 2")
        if min(self.points, self.letters) < 2:
            raise UsageError(f"{self.points} points and {self.letters} letters", "at least 2 of each")

    @property
    def vocab_size(self) -> int:
        """Points, letters, and the edge of a sequence."""
        return self.points + self.letters + 1

    @property
    def seq_len(self) -> int:
        """A point, a word and two edges."""
        return self.k + 3

    @property
    def depths(self) -> Tensor:
        """The number of letters so far, one place later."""
        return (torch.arange(self.seq_len) - 2).clamp_min(0)

    @cached_property
    def permutations(self) -> Ids:
        """What the letters stand for, `[letters, points]`."""
        rng = np.random.default_rng(0)
        return np.stack([rng.permutation(self.points) for _ in range(self.letters)])

    def _instances(self, rng: np.random.Generator, rows: int) -> Ids:
        letters = rng.integers(0, self.letters, (rows, self.k)) + self.points
        return np.concatenate([rng.integers(0, self.points, (rows, 1)), letters], axis=1)

    def _sequences(self, rng: np.random.Generator, instances: Ids) -> tuple[Ids, Ids]:
        edge = np.full((len(instances), 1), self.vocab_size - 1)
        labels = np.full((len(instances), self.seq_len), IGNORED)
        point = instances[:, 0]
        for place in range(1, self.k + 1):
            point = self.permutations[instances[:, place] - self.points, point]
            labels[:, place + 2] = point
        return np.concatenate([edge, instances, edge], axis=1), labels


@dataclass(frozen=True)
class Products(Task):
    """Multiply k permutations: the word problem of a symmetric group, every element a letter.

    A sequence is a word of k permutations, each one a token; at each one the product of the word up to there is asked
    for, as the token of that permutation. The table of products of two is small enough to be learned, and with it a
    model can multiply neighbours first, then the products of neighbours: it needs about log2(k) blocks.

    Attributes:
        k: permutations in a word. At least 3: words of two that are kept for the test would be pairs that were never
            multiplied, which is another task.
        points: that are permuted; the group has `points`! elements.
    """

    kind = "products"
    k: int
    points: int = 4

    def __post_init__(self) -> None:
        if self.k < 3:
            raise UsageError(f"a word of {self.k} permutations", "at least 3")
        if not 2 <= self.points <= 5:
            raise UsageError(f"permutations of {self.points} points", "from 2 to 5, which is 120 tokens")

    @property
    def vocab_size(self) -> int:
        """The elements of the group, and the edge of a sequence."""
        return math.factorial(self.points) + 1

    @property
    def seq_len(self) -> int:
        """A word and two edges."""
        return self.k + 2

    @property
    def depths(self) -> Tensor:
        """The number of factors so far, one place later."""
        return (torch.arange(self.seq_len) - 1).clamp_min(0)

    def _instances(self, rng: np.random.Generator, rows: int) -> Ids:
        return rng.integers(0, self.vocab_size - 1, (rows, self.k))

    def _sequences(self, rng: np.random.Generator, instances: Ids) -> tuple[Ids, Ids]:
        table = products(self.points)
        edge = np.full((len(instances), 1), self.vocab_size - 1)
        labels = np.full((len(instances), self.seq_len), IGNORED)
        labels[:, 2] = instances[:, 0]
        for place in range(1, self.k):
            labels[:, place + 2] = table[labels[:, place + 1], instances[:, place]]
        return np.concatenate([edge, instances, edge], axis=1), labels


TASKS = {task.kind: task for task in (PointerChase, Moves, Products)}


def make_task(name: str, k: int) -> PointerChase | Moves | Products:
    """A task by its name, `chase`, `moves` or `products`, with k steps.

    Raises:
        UsageError: no such task, or a k that it cannot have.
    """
    if name not in TASKS:
        raise UsageError(f"the task {name!r}", ", ".join(TASKS))
    task: PointerChase | Moves | Products = TASKS[name](k)
    return task


@lru_cache
def products(points: int) -> Ids:
    """The table of a symmetric group: `[first, second]` is the permutation that applies the first, then the second.

    Permutations are counted in lexicographic order of their values.
    """
    elements = np.array(list(permutations(range(points))))
    weights = points ** np.arange(points)
    values = elements @ weights
    order = values.argsort()
    applied = elements[:, elements].transpose(1, 0, 2)  # [first, second, point]: second[first[point]]
    return np.asarray(order[np.searchsorted(values[order], applied @ weights)])


def is_test(instances: Ids) -> NDArray[np.bool_]:
    """Which of the instances `[rows, numbers]` are for the test: one of eight, by a hash of their numbers."""
    mixed = np.zeros(len(instances), dtype=np.uint64)
    for column in instances.T.astype(np.uint64):
        mixed = (mixed + column + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
    return mixed % np.uint64(TEST_SHARE) == 0

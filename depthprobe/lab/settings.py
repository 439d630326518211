"""How a model is trained: the options of a run, the learning rate at each step, and the optimiser."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from depthprobe.errors import UsageError

__all__ = ["OPTIMIZERS", "TrainSettings", "make_optimizer"]

OPTIMIZERS = ("adamw", "radam", "sgd")
DTYPES = ("float32", "bf16")


@dataclass(frozen=True)
class TrainSettings:
    """How to train.

    Attributes:
        steps: updates of the weights.
        batch_size: sequences of an update, over all processes and all parts of an accumulation.
        seq_len: tokens of a sequence.
        accumulate: parts that the batch of a process goes through the model in, one after the other. The result is
            the same but for rounding, for BatchNorm, whose statistics are of one part, and for a checkpoint's dropout.
        optimizer: adamw, radam (with decoupled weight decay) or sgd.
        lr: the learning rate after warm-up.
        betas: of adamw and radam.
        momentum: of sgd.
        weight_decay: of matrices; biases and norms have none.
        warmup: steps over which the learning rate grows to `lr`.
        floor: share of `lr` that a cosine falls to at the end.
        clip: the gradient's norm is cut to this; 0 leaves it.
        dtype: float32, or bf16 for autocast to bfloat16 with weights in float32.
        eval_every: steps between two looks at the validation loss.
        eval_tokens: about how many tokens to take it on, always the same ones.
        margin: the run failed if the last validation loss is not by so much below what the frequencies of the training
            tokens alone give, nats a token.
        save_at: steps at which to keep a checkpoint besides the last one; 0 is the initialisation.
        seed: of the initialisation.
        data_seed: of the order of the data; None for `seed`. It depends on nothing else.
        device: cpu, cuda, mps, or auto for the best there is.
    """

    steps: int = 2000
    batch_size: int = 16
    seq_len: int = 64
    accumulate: int = 1
    optimizer: str = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    momentum: float = 0.9
    weight_decay: float = 0.1
    warmup: int = 100
    floor: float = 0.1
    clip: float = 1.0
    dtype: str = "float32"
    eval_every: int = 100
    eval_tokens: int = 16384
    margin: float = 0.2
    save_at: tuple[int, ...] = ()
    seed: int = 0
    data_seed: int | None = None
    device: str = "auto"

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            UsageError: the first option that is impossible.
        """
        for name in ("steps", "batch_size", "accumulate", "eval_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{_flag(name)} {getattr(self, name)}", "at least 1")
        if self.seq_len < 2:
            raise UsageError(f"--seq-len {self.seq_len}", "at least 2", "a prediction needs a token before it")
        if self.batch_size % self.accumulate:
            raise UsageError(
                f"--accumulate {self.accumulate}", f"a number that divides the batch size, {self.batch_size}"
            )
        for name, known in (("optimizer", OPTIMIZERS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise UsageError(f"{_flag(name)} {getattr(self, name)}", " or ".join(known))
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise UsageError(f"--lr {self.lr}", "a number above 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"--betas {','.join(map(str, self.betas))}", "two numbers from 0 to below 1, as 0.9,0.98")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"--momentum {self.momentum}", "a number from 0 to below 1")
        for name in ("weight_decay", "clip", "margin"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise UsageError(f"{_flag(name)} {getattr(self, name)}", "0 or more")
        if not 0 <= self.warmup <= self.steps:
            raise UsageError(f"--warmup {self.warmup}", f"0 to the {self.steps:,} steps of the run")
        if not 0 <= self.floor <= 1:
            raise UsageError(f"--floor {self.floor}", "a share of the learning rate from 0 to 1")
        if self.eval_tokens < self.seq_len:
            raise UsageError(f"--eval-tokens {self.eval_tokens}", f"at least one sequence of {self.seq_len}")
        if (odd := [step for step in self.save_at if not 0 <= step <= self.steps]) != []:
            raise UsageError(f"--save-at {odd[0]}", f"steps from 0 to {self.steps:,}")
        for name in ("seed", "data_seed"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise UsageError(f"{_flag(name)} {value}", "0 or more")

    @property
    def order(self) -> int:
        """The seed of the data's order."""
        return self.seed if self.data_seed is None else self.data_seed

    def rate(self, step: int) -> float:
        """The learning rate of an update, counted from 0: a straight warm-up, then half a cosine down to the floor."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        gone = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * gone)))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """The optimiser, in its fastest form. Matrices decay, vectors do not."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in trained if weight.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=_can_fuse(trained))
    if settings.optimizer == "radam":
        return torch.optim.RAdam(
            groups, lr=settings.lr, betas=settings.betas, decoupled_weight_decay=True, foreach=True
        )
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=_can_fuse(trained))


def _can_fuse(weights: list[nn.Parameter]) -> bool:
    return all(weight.device.type in ("cpu", "cuda", "mps") for weight in weights)


def milestones(settings: TrainSettings) -> Iterator[int]:
    """Steps after which the validation loss is taken: the start, every `eval_every`, and the end."""
    yield from range(0, settings.steps, settings.eval_every)
    yield settings.steps

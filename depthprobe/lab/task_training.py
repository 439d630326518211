"""Train a lab model on a task of known depth until it has learned it, or until its steps are used up."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from depthprobe.errors import UsageError
from depthprobe.lab.config import LabConfig
from depthprobe.lab.model import LabForCausalLM
from depthprobe.lab.settings import TrainSettings, make_optimizer
from depthprobe.lab.tasks import IGNORED, Task

__all__ = ["LEARNED", "TaskResult", "accuracy", "train_task"]

LEARNED = 0.99
MOSTLY = 0.9
REVIEWED = 20  # steps between two looks at how far the model is
UNKNOWABLE = 0.1  # weight of a target that nobody can know beside that of an answer
EVALUATED = 256  # sequences at once


@dataclass(frozen=True)
class TaskResult:
    """What became of one run.

    Attributes:
        status: `learned`, `not learned` or `diverged`.
        accuracy: share of right answers among those after k steps, on the test's sequences.
        accuracy_all: the same over all numbers of steps.
        loss: of the answers in the last batch, nats an answer; None where it is not finite.
        steps: updates that were made.
        seconds: of this process's CPU time, tests included.
    """

    status: str
    accuracy: float
    accuracy_all: float
    loss: float | None
    steps: int
    seconds: float


def train_task(
    task: Task,
    config: LabConfig,
    settings: TrainSettings,
    progress: Callable[[int, float], None] | None = None,
) -> tuple[TaskResult, LabForCausalLM]:
    """Train from scratch. The run ends when 99 % of the answers after k steps are right, on the whole test.

    Answers after j + 1 steps are asked for once nine of ten answers after j are right in a batch: a model that
    must guess them from the start comes to rely on guessing. The loss is the mean cross-entropy of these answers, and
    of a task's other targets with a tenth of the weight, so that the output is defined at every position.

    Args:
        task: makes the batches. Vocabulary and positions of the model are set to its own.
        config: of the model.
        settings: steps, batch size, optimiser, rates, seeds and `eval_every`; `seq_len` and what is about text or
            devices is not used. The schedule of the learning rate is that of a run that uses all of its steps.
        progress: called with the step and the accuracy at each test.

    Raises:
        UsageError: an option makes no sense.
    """
    settings = replace(settings, seq_len=task.seq_len, eval_tokens=task.seq_len)
    settings.check()
    if settings.accumulate != 1 or settings.dtype != "float32":
        raise UsageError("a task with accumulation or bf16", "neither")
    if not config.causal:
        raise UsageError("a task with a bidirectional model", "causal=True", "a list must not see the lists after it")
    config = copy.deepcopy(config)
    config.vocab_size, config.max_position_embeddings = task.vocab_size, task.seq_len
    began = time.process_time()
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        model = LabForCausalLM(config).train()
    optimizer = make_optimizer(model, settings)
    depths = task.depths[1:]
    right = every = 0.0
    value, status, reached, step = math.nan, "not learned", 1, 0
    for step in range(1, settings.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step - 1)
        ids, labels = task.batch(settings.order, step - 1, settings.batch_size)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = _loss(logits, labels[:, 1:], depths, reached)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip or torch.inf)
        optimizer.step()
        if step % REVIEWED and step % settings.eval_every and step < settings.steps:
            continue
        value = float(loss.detach())
        if not math.isfinite(value):
            status = "diverged"
            break
        reached = _reached(logits.argmax(-1) == labels[:, 1:], depths, reached)
        if step % settings.eval_every and step < settings.steps:
            continue
        right, every = accuracy(model, task)
        if progress is not None:
            progress(step, right)
        if right >= LEARNED:
            status = "learned"
            break
    last = value if math.isfinite(value) else None
    return TaskResult(status, right, every, last, step, time.process_time() - began), model.eval()


def _loss(logits: Tensor, labels: Tensor, depths: Tensor, reached: int) -> Tensor:
    """Mean cross-entropy of the answers that are asked for by now, and the tenth part of what nobody can know."""
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
    ).view(labels.shape)
    weights = torch.where(depths > 0, (depths <= reached).to(losses.dtype), UNKNOWABLE)
    return (losses * weights).sum() / ((depths > 0) & (depths <= reached)).sum() / len(labels)


def _reached(hits: Tensor, depths: Tensor, reached: int) -> int:
    """How many steps are asked for from now on: one more than so many have mostly right answers."""
    while reached < int(depths.max()) and float(hits[:, depths == reached].double().mean()) >= MOSTLY:
        reached += 1
    return reached


@torch.no_grad()
def accuracy(model: LabForCausalLM, task: Task) -> tuple[float, float]:
    """Shares of right answers on the test's sequences: after k steps, and after any number of steps."""
    training = model.training
    model.eval()
    hits = [
        model(input_ids=ids).logits[:, :-1].argmax(-1) == labels[:, 1:]
        for ids, labels in zip(*(part.split(EVALUATED) for part in task.validation), strict=True)
    ]
    model.train(training)
    right, depths = torch.cat(hits).double().mean(dim=0), task.depths[1:]
    return float(right[depths == task.k].mean()), float(right[depths > 0].mean())

"""The loop itself: forward, backward, clip, update; now and then the validation loss and a state to resume from."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from depthprobe.lab.outcome import diverged
from depthprobe.lab.runlog import Log, save_state
from depthprobe.lab.settings import TrainSettings, make_optimizer
from depthprobe.lab.text import IGNORED, Source
from depthprobe.processes import Processes

__all__ = ["Loop"]

FLUSH = 10  # steps whose losses are fetched from the device at once


class Loop:
    """One run.

    Args:
        model: a transformers model with a head, on the CPU, with its first weights.
        source: of the batches.
        settings: how.
        processes: this one and the others.
        log: where the rows go.
        state: the file that a killed run goes on from.
        keep: called with a step at which a checkpoint is wanted.
        causal: the model predicts the next token, so that the first label is never asked for.

    Attributes:
        unigram: what the frequencies of the training tokens give on the validation tokens, nats a token; None where
            the source states no frequencies.
    """

    def __init__(
        self,
        model: Any,
        source: Source,
        settings: TrainSettings,
        processes: Processes,
        log: Log,
        state: Path,
        keep: Callable[[int], None],
        causal: bool = True,
    ) -> None:
        self.settings, self.source, self.processes = settings, source, processes
        self.log, self.state, self.keep = log, state, keep
        self.model = model.to(processes.device).train()
        self.wrapped: Any = processes.wrap(self.model)
        self.optimizer = make_optimizer(self.model, settings)
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.pending: list[tuple[int, Tensor, Tensor, float]] = []
        self.began = 0.0
        count = max(1, settings.eval_tokens // settings.seq_len)
        ids, labels = (part[:count] for part in source.validation)
        self.unigram = _unigram(labels, source.frequencies, causal)
        mine = slice(processes.rank, None, processes.count)
        self.checked = ids[mine].to(processes.device), labels[mine].to(processes.device)

    def run(self, state: dict[str, Any] | None, progress: Callable[[int, int], None] | None = None) -> str | None:
        """Train to the end, or until it is clear that the run failed: then the reason.

        Args:
            state: what a killed run saved; None to begin.
            progress: called with (steps done, in all).
        """
        settings, first = self.settings, 0
        self.began = time.perf_counter()
        if state is None:
            self.log.write([{"step": 0, "tokens": 0, "seconds": 0.0, "val_loss": self.validate()}])
            if 0 in settings.save_at:
                self.keep(0)
        else:
            first = self._restore(state)
        if progress is not None:
            progress(first, settings.steps)
        for done in range(first + 1, settings.steps + 1):
            self._update(done - 1)
            check = done % settings.eval_every == 0 or done == settings.steps
            if not check and done % FLUSH and done not in settings.save_at:
                continue
            rows = self._fetch()
            failure = diverged([*self.log.rows, *rows])
            if check or failure:
                rows[-1]["val_loss"] = self.validate()
            self.log.write(rows)
            if progress is not None:
                progress(done, settings.steps)
            if failure:
                return failure
            if done in settings.save_at:
                self.keep(done)
            if check:
                self._save(done)
        return None

    def _update(self, step: int) -> None:
        """One update of the weights. Nothing here waits for the device."""
        settings = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = settings.rate(step)
        parts = self._parts(step)
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.processes.device)
        for place, (ids, labels) in enumerate(parts):
            last = place == len(parts) - 1
            with nullcontext() if last or self.processes.count == 1 else self.wrapped.no_sync():
                loss = self._loss(self.wrapped, ids, labels) / len(parts)
                loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.weights, settings.clip or torch.inf)
        self.optimizer.step()
        self.pending.append((step + 1, total, norm, time.perf_counter() - self.began))

    def _parts(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This process's share of the batch, in as many parts as are accumulated."""
        settings, processes = self.settings, self.processes
        share = settings.batch_size // processes.count
        mine = slice(processes.rank * share, (processes.rank + 1) * share)
        ids, labels = self.source.batch(settings.order, step, settings.batch_size)
        size = share // settings.accumulate
        chunks = (part[mine].to(processes.device, non_blocking=True).split(size) for part in (ids, labels))
        return list(zip(*chunks, strict=True))

    def _loss(self, model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        if self.settings.dtype == "float32":
            loss: Tensor = model(input_ids=ids, labels=labels).loss
            return loss
        with torch.autocast(self.processes.device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=labels).loss
        return loss

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss over the validation sequences, nats a predicted token.

        Of the model itself: its wrapper waits for the others, and a process without a sequence does not call it.
        """
        self.model.eval()
        self.processes.share(self.model.buffers())  # averages of batches are each process's own since the last step
        total = torch.zeros(2, device=self.processes.device)  # of losses, and of sequences
        for ids, labels in zip(*(part.split(self.settings.batch_size) for part in self.checked), strict=True):
            if len(ids) > 0:  # more processes than sequences
                loss = self._loss(self.model, ids, labels).float()
                total += torch.stack([loss * len(ids), torch.full_like(loss, len(ids))])
        self.model.train()
        total = self.processes.mean(total)
        return float(total[0] / total[1])

    def _fetch(self) -> list[dict[str, Any]]:
        """Rows of the steps since the last time: the only place where losses leave the device."""
        steps, losses, norms, times = zip(*self.pending, strict=True)
        self.pending = []
        values = self.processes.mean(torch.stack([torch.stack(losses), torch.stack(norms)])).tolist()
        size = self.settings.batch_size * self.settings.seq_len
        return [
            {
                "step": step,
                "loss": loss,
                "lr": self.settings.rate(step - 1),
                "grad_norm": norm,
                "tokens": step * size,
                "seconds": round(seconds, 3),
            }
            for step, loss, norm, seconds in zip(steps, *values, times, strict=True)
        ]

    def _save(self, step: int) -> None:
        if not self.processes.first:
            return
        self.log.sync()
        state = {
            "step": step,
            "log_bytes": self.log.size,
            "seconds": time.perf_counter() - self.began,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.processes.device.type == "cuda" else [],
        }
        save_state(self.state, state)

    def _restore(self, state: dict[str, Any]) -> int:
        """Everything as it was when the state was saved; the step."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] and self.processes.count == 1:
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        self.began = time.perf_counter() - state["seconds"]
        return int(state["step"])


def _unigram(labels: Tensor, frequencies: NDArray[np.float64] | None, causal: bool) -> float | None:
    """What frequencies give on the tokens that are predicted: the mean of −log."""
    if frequencies is None:
        return None
    asked = labels[:, 1:] if causal else labels
    return float(-np.log(frequencies[asked[asked != IGNORED].numpy()]).mean())

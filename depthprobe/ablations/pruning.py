"""From a schedule to a checkpoint that transformers loads: blocks dropped, reordered or repeated."""

from __future__ import annotations

import copy
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from depthprobe.ablations.run import SweepSettings, sweep
from depthprobe.ablations.schedule import Schedule, Unit, skip
from depthprobe.ablations.units import Units
from depthprobe.checkpoint import Checkpoint, load
from depthprobe.corpus import Corpus, halves
from depthprobe.errors import CheckpointError, OutputError, UsageError, VerificationError
from depthprobe.formats import undisturbed
from depthprobe.measure import Settings, measure
from depthprobe.offload import refuse_offloaded
from depthprobe.verify import Anatomy, floor, worst

__all__ = ["Choice", "choose_drops", "layer_ranges", "order_of", "timed_forwards", "write_pruned"]

_TIED = "this config ties blocks to their numbers in a way that is not known here"


@dataclass(frozen=True)
class Choice:
    """Blocks that one way of choosing would drop, and the KL of dropping them on text that did not choose.

    Attributes:
        name: `measured`, `block_influence` or `angular_distance`.
        blocks: what it drops.
        kl, delta_loss: nats per token on the other half of the sequences.
    """

    name: str
    blocks: tuple[int, ...]
    kl: float
    delta_loss: float


def order_of(schedule: Schedule) -> list[int]:
    """The blocks in the order in which the schedule runs them.

    Raises:
        UsageError: a stage with several units or a sublayer, which no standard config can hold.
    """
    for stage in schedule.stages:
        if len(stage) > 1 or stage[0].part:
            raise UsageError(
                f"({'+'.join(map(str, stage))}) cannot be written as a checkpoint",
                "whole blocks one after another, dropped, reordered or repeated",
                "transformers' configs have no stage of several units",
            )
    return [stage[0].layer for stage in schedule.stages]


def layer_ranges(order: list[int]) -> list[tuple[int, int]]:
    """Half-open ranges of rising neighbours, as mergekit's `layer_range` wants them."""
    runs = [[block for _, block in group] for _, group in groupby(enumerate(order), key=lambda p: p[1] - p[0])]
    return [(run[0], run[-1] + 1) for run in runs]


def choose_drops(
    anatomy: Anatomy,
    corpus: Corpus,
    count: int,
    settings: SweepSettings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Choice]:
    """Which blocks to drop: measured greedily, and as two published scores would have it.

    One half of the sequences chooses (`corpus.halves`: a document is in one half alone): greedily the block whose
    removal, with those before, costs the least KL; the blocks of the lowest block influence (Men et al. 2024); the run
    of blocks across which the angle is smallest (Gromov et al. 2024). The other half says what each choice costs.

    Raises:
        UsageError: more blocks than there are, no head, or fewer than two sequences.
    """
    blocks = len(anatomy.stream)
    if not 1 <= count < blocks:
        raise UsageError(f"--drop {count}", f"1 to {blocks - 1}")
    if anatomy.objective != "causal" or not anatomy.reads_positions_apart:
        raise UsageError("blocks are chosen by KL, and this model has no next-token head", "a causal language model")
    if corpus.sequences < 2:
        raise UsageError("one half of the sequences chooses and the other scores; there is one", "at least 2 sequences")
    settings = settings or SweepSettings()
    first = halves(corpus)
    chooses, scores = corpus.take(first), corpus.take(~first)
    gone: list[int] = []
    for step in range(count):
        left = [block for block in range(blocks) if block not in gone]
        swept = sweep(anatomy, chooses, [skip(blocks, [*gone, block]) for block in left], settings)
        gone.append(left[int(swept.effects["kl"].mean(axis=0).argmin())])
        if progress is not None:
            progress(step + 1, count + 1)
    watched = measure(anatomy, chooses, Settings(interaction=False, lens_positions=0, seed=settings.seed))
    influence = [float(np.nanmean(watched.means.values["block_influence", "block", i])) for i in range(blocks)]
    pairs = watched.pairs["angular_distance"].mean(axis=0)
    rows, columns = np.triu_indices(blocks + 1, k=1)
    spans = {int(i): pairs[k] for k, (i, j) in enumerate(zip(rows, columns, strict=True)) if j - i == count}
    start = min(spans, key=spans.__getitem__)
    choices = {
        "measured": tuple(sorted(gone)),
        "block_influence": tuple(sorted(np.argsort(influence)[:count].tolist())),
        "angular_distance": tuple(range(start, start + count)),
    }
    swept = sweep(anatomy, scores, [skip(blocks, chosen) for chosen in choices.values()], settings)
    kl, loss = (swept.effects[name].mean(axis=0) for name in ("kl", "delta_loss"))
    if progress is not None:
        progress(count + 1, count + 1)
    return [Choice(n, c, float(kl[k]), float(loss[k])) for k, (n, c) in enumerate(choices.items())]


def write_pruned(
    anatomy: Anatomy, schedule: Schedule, folder: Path, inputs: Tensor, source: str, trust_remote_code: bool = False
) -> float:
    """Write the schedule as a checkpoint, load it again, and compare its output with the schedule's.

    Args:
        anatomy: the verified model, of transformers.
        schedule: whole blocks one after another.
        folder: where to; must not exist, or be empty.
        inputs: ids `[batch, tokens]` to compare on.
        source: what the card names as the origin.
        trust_remote_code: run Python code that comes with the checkpoint, as it was run to load it.

    Returns:
        ‖a − b‖ / ‖b‖ of the worst sequence.

    Raises:
        UsageError: a schedule that no config can hold, or a model that is not of transformers.
        OutputError: the folder is taken, or cannot be written.
        VerificationError: what was written does not give the schedule's output; nothing is left behind.
    """
    checkpoint = anatomy.stream.checkpoint
    refuse_offloaded(checkpoint.offload, "a checkpoint with other blocks was asked for")
    order = order_of(schedule)
    if not order:
        raise UsageError("the schedule drops every block", "at least one")
    Units(anatomy).check(schedule)
    if not isinstance(checkpoint.model, transformers.PreTrainedModel):
        raise UsageError(f"{checkpoint.architecture} is not a model of transformers", "one that has a config")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} is there already", "a new or empty folder", "choose another --out")
    with torch.no_grad():
        wanted = _run(anatomy, schedule, inputs)
    staging = folder.parent / f".depthprobe-{uuid.uuid4().hex}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        pruned = _rebuilt(anatomy, order)
        with undisturbed(local=True):
            pruned.save_pretrained(staging)
            if checkpoint.tokenizer is not None:
                checkpoint.tokenizer.save_pretrained(staging)
        (staging / "README.md").write_text(_card(checkpoint, schedule, order, source), encoding="utf-8")
        again = load(
            staging, device=str(checkpoint.device), dtype=checkpoint.dtype, trust_remote_code=trust_remote_code
        )
        with torch.no_grad():
            output = again.model(input_ids=inputs)
        found = output.logits if hasattr(output, "logits") else output.last_hidden_state
        difference = worst(found, wanted)
        if difference > floor(checkpoint):
            raise VerificationError(
                f"the pruned checkpoint's output differs from the schedule's by {difference:.1e}",
                f"at most {floor(checkpoint):.0e}",
                _TIED,
            )
        if folder.exists():
            folder.rmdir()
        staging.rename(folder)
    except CheckpointError as error:
        found = error.found.replace(str(staging), "what was written")
        raise VerificationError(f"the pruned checkpoint cannot be loaded: {found}", fix=_TIED) from None
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}", fix="choose another --out") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return difference


def timed_forwards(models: list[torch.nn.Module], inputs: Tensor, repeats: int = 5) -> list[float]:
    """Median seconds of a forward pass of each, alternating so that noise hits all alike."""
    taken: list[list[float]] = [[] for _ in models]
    with torch.no_grad():
        for model in models:
            model(input_ids=inputs)
        for _ in range(repeats):
            for place, model in enumerate(models):
                started = time.perf_counter()
                model(input_ids=inputs)
                if inputs.device.type in ("cuda", "mps"):  # where a call returns before its work is done
                    getattr(torch, inputs.device.type).synchronize()
                taken[place].append(time.perf_counter() - started)
    return [median(values) for values in taken]


def _rebuilt(anatomy: Anatomy, order: list[int]) -> Any:
    """A model of the same class with the blocks in the given order, its config made to fit."""
    model: Any = anatomy.stream.checkpoint.model
    path = anatomy.stream.blocks.path
    blocks = len(anatomy.stream)
    config = copy.deepcopy(model.config)
    for name, value in list(config.to_dict().items()):
        if name in ("architectures", "torch_dtype") or "token" in name:
            continue  # as many end-of-text ids as blocks are still ids
        if isinstance(value, list | tuple) and len(value) == blocks:  # a field with one entry a block
            setattr(config, name, [value[i] for i in order])
    config.num_hidden_layers = len(order)
    state: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith(f"{path}."):
            state[name] = tensor
    for new, old in enumerate(order):
        for name, tensor in anatomy.stream.blocks.modules[old].state_dict().items():
            state[f"{path}.{new}.{name}"] = tensor.clone()
    try:
        pruned = type(model)(config).to(anatomy.stream.checkpoint.dtype)
        pruned.load_state_dict(state)
    except (RuntimeError, ValueError):
        raise VerificationError(
            f"{type(model).__name__} does not take its blocks in the order {', '.join(map(str, order))}",
            "blocks that are alike",
            _TIED,
        ) from None
    pruned.tie_weights()
    if getattr(model, "generation_config", None) is not None:
        pruned.generation_config = copy.deepcopy(model.generation_config)
    return pruned.eval()


def _run(anatomy: Anatomy, schedule: Schedule, inputs: Tensor) -> Tensor:
    units, entry = Units(anatomy), anatomy.stream.enter(inputs)
    x = entry.x
    for stage in schedule.stages:
        x = units.unit(entry, Unit(stage[0].layer), x)
    return anatomy.stream.readout(x, inputs)


def _card(checkpoint: Checkpoint, schedule: Schedule, order: list[int], source: str) -> str:
    ranges = ", ".join(f"[{start}, {stop}]" for start, stop in layer_ranges(order))
    return f"""# {checkpoint.name}, blocks {schedule}

Made from `{source}` by `depthprobe prune`: the blocks of the original run in the order {schedule}, and nothing was
trained afterwards. As half-open layer ranges: {ranges}.

- original: {checkpoint.architecture}, {checkpoint.parameters:,} parameters, revision {checkpoint.revision or "unknown"}
- this model: {len(order)} blocks
- checked: it gives the same output as the original with its blocks run in this order
"""

"""The public verb `analyze`: from a checkpoint and a corpus to a report."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
import transformers
from torch import nn

from depthprobe import processes
from depthprobe.ablation import default_sweep
from depthprobe.anatomy import Block, Branch
from depthprobe.checkpoint import Checkpoint, load
from depthprobe.corpus import Corpus
from depthprobe.depth.base import QUICK_LEN, DepthSettings, shortened
from depthprobe.effective import with_effective, with_phases
from depthprobe.errors import UsageError
from depthprobe.estimate import Resampler
from depthprobe.fingerprint import fingerprint
from depthprobe.gradient import GradientSettings, with_gradients
from depthprobe.measure import Measured, Progress, Settings, measure
from depthprobe.offload import MEMORY, allowed
from depthprobe.prepare import prepare
from depthprobe.report import Report
from depthprobe.summary import growth, layers_table, pairs_table, skipped_positions
from depthprobe.verify import Anatomy

__all__ = ["analyze", "build_report", "describe_anatomy", "inspect"]


def analyze(
    model: str | Path | nn.Module | Checkpoint,
    data: Any = None,
    *,
    tokens: int = 8192,
    seq_len: int | None = None,
    batch_size: int | Literal["auto"] = "auto",
    seed: int = 0,
    skip_first: int = 1,
    bos: Literal["auto", "always", "never"] = "auto",
    text_field: str = "text",
    interaction: bool = True,
    lens_positions: int = 1024,
    ablations: bool = True,
    ablation_tokens: int = 2048,
    gradient_tokens: int = 1024,
    depth_tokens: int = 512,
    progress: Progress | None = None,
    **loading: Any,
) -> Report:
    """Measure how a trained transformer uses its depth.

    The residual stream is found in the model and verified first; nothing is reported that rests on tensors which do
    not reproduce the model's own output.

    Args:
        model: a hub id, `id@revision`, a path (directory, `.gguf`, nanoGPT `.pt`), any module, or what `load` gave.
        data: text, ids `[sequences, tokens]` or float states `[sequences, tokens, width]` as `corpus.read` takes
            them; None for the English of Python's own manual.
        tokens: how many tokens to measure on.
        seq_len: tokens of a sequence; 256 unless the model takes fewer.
        batch_size: sequences at once; `auto` for about 2,048 tokens. The results do not depend on it.
        seed: of every random draw.
        skip_first: leading positions that the stream's metrics leave out; position 0 is an attention sink.
        bos: whether a sequence begins with the tokenizer's BOS (`auto`: where the tokenizer itself puts one).
        text_field: the field of JSON lines or a dataset that holds the text.
        interaction: run each block without its predecessor's update too, at the cost of two further passes.
        lens_positions: how many positions the logit lens reads out, 0 for none.
        ablations: skip each block, merge and swap each two neighbours, and measure what it costs.
        ablation_tokens: on how many of the tokens; a quarter of their positions is scored.
        gradient_tokens: on how many of the tokens to take gradients, 0 for none.
        depth_tokens: on how many of the tokens to estimate effective depth, beside controls; 0 for none, and for no
            phases of computation either.
        progress: called with (sequences done, sequences in all), again for gradients and for depth, then with (block
            evaluations done, in all).
        loading: further arguments of `load` (dtype, device, revision, trust_remote_code, …).

    Returns:
        The report: tables with 95 % intervals over sequences, `save(dir)` writes it, a notebook shows it.

    Raises:
        CheckpointError, CorpusError, UsageError: the request cannot be served.
        AnatomyError: the model has no single residual stream that was found.
        VerificationError: what was found does not reproduce the model's own output.
        NonFiniteError: an activation is not finite; the message names the block.
    """
    settings = Settings(
        skip_first=skip_first,
        batch_size=None if batch_size == "auto" else batch_size,
        seed=seed,
        interaction=interaction,
        lens_positions=lens_positions,
    )
    settings.check()
    if ablation_tokens < 2:
        raise UsageError(f"ablation_tokens is {ablation_tokens}", "2 or more", "ablations=False is for none")
    if gradient_tokens < 0:
        raise UsageError(f"gradient_tokens is {gradient_tokens}", "0 or more")
    if depth_tokens < 0:
        raise UsageError(f"depth_tokens is {depth_tokens}", "0 or more")
    checkpoint, corpus, anatomy = prepare(
        model, data, tokens=tokens, seq_len=seq_len, seed=seed, bos=bos, text_field=text_field, **loading
    )
    measured = measure(anatomy, corpus, settings, progress)
    options = {"tokens": tokens, "seq_len": seq_len, "bos": bos, "text_field": text_field} | vars(settings)
    options |= {"ablations": ablations, "ablation_tokens": ablation_tokens, "gradient_tokens": gradient_tokens}
    options |= {"depth_tokens": depth_tokens}
    report = build_report(checkpoint, corpus, anatomy, measured, settings, options)
    if gradient_tokens:
        part = corpus.spread(gradient_tokens)
        report = with_gradients(report, anatomy, part, GradientSettings(skip_first=skip_first, seed=seed), progress)
    if depth_tokens:
        deep = DepthSettings(seed, skip_first, settings.batch_size, allowed(MEMORY, checkpoint.offload))
        report = with_effective(report, anatomy, shortened(corpus, depth_tokens, QUICK_LEN), deep, progress)
        report = with_phases(report, anatomy, corpus, deep, progress)
    if not ablations:
        return report
    swept = default_sweep(
        anatomy, corpus.spread(ablation_tokens), seed, report.layers, report.pairs, progress, skip_first
    )
    return replace(report, ablations=swept.table, merging=swept.merging)


def inspect(model: str | Path | nn.Module | Checkpoint, data: Any = None, **loading: Any) -> dict[str, Any]:
    """Find and verify a model's anatomy, and measure nothing.

    Args:
        model: as in `analyze`.
        data: ids or states to look with; a few random tokens by default.
        loading: further arguments of `load`.

    Returns:
        `model`, `anatomy` and `verification` as they stand in a report.
    """
    checkpoint = load(model, **loading)
    if data is None and checkpoint.inputs == "ids":
        vocabulary = checkpoint.vocab_size or 2
        length = min(64, checkpoint.max_positions or 64)
        data = torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(0))
    checkpoint, _, anatomy = prepare(checkpoint, data)
    return {
        "model": _describe_model(checkpoint, anatomy),
        "anatomy": describe_anatomy(anatomy),
        "verification": _describe_checks(anatomy),
    }


def build_report(
    checkpoint: Checkpoint,
    corpus: Corpus,
    anatomy: Anatomy,
    measured: Measured,
    settings: Settings,
    options: dict[str, Any],
    command: str | None = None,
) -> Report:
    """Put what was measured into a report."""
    resampler = Resampler(corpus.sequences, corpus.documents, settings.seed)
    blocks = len(anatomy.stream)
    notes = list(measured.notes)
    if resampler.clusters < 32:
        what = "document" if resampler.clusters < corpus.sequences else "sequence"
        what += "s" if resampler.clusters != 1 else ""
        notes.append(f"The intervals rest on {resampler.clusters} {what}; below 32 they tend to be too narrow.")
    documents = 1 if corpus.documents is None else len(set(corpus.documents.tolist()))
    return Report(
        model=_describe_model(checkpoint, anatomy),
        corpus={
            "name": corpus.name,
            "sha256": corpus.sha256,
            "sequences": corpus.sequences,
            "tokens": corpus.tokens,
            "documents": documents if documents > 1 else None,  # of a single one the sequences are resampled
            "bos": corpus.bos,
            "first_ids": corpus.first_ids,
            "first_tokens": _first_tokens(checkpoint, corpus),
            "skip_first": settings.skip_first,
            "notes": list(corpus.notes),
        },
        anatomy=describe_anatomy(anatomy),
        verification=_describe_checks(anatomy),
        layers=layers_table(measured, resampler),
        pairs=pairs_table(measured, resampler),
        growth=growth(measured.means, blocks, resampler),
        sinks=[
            {
                "position": sink.position,
                "sequences": len(sink.sequences),
                "first_layer": min(sink.layers),
                "last_layer": max(sink.layers),
                "max_norm": sink.max_norm,
                "max_ratio": sink.max_ratio,
            }
            for sink in measured.sinks
        ],
        skipped=skipped_positions(measured.means) if settings.skip_first else [],
        resolution=measured.floors,
        cost={
            "forward_passes": measured.forward_passes,
            "block_evaluations": measured.block_evaluations,
            "seconds": measured.seconds,
            **({} if measured.fetched is None else {"fetched": vars(measured.fetched)}),
        },
        run={
            "command": command or _python_call(checkpoint, options),
            "seed": settings.seed,
            "depthprobe": metadata.version("depthprobe"),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "numpy": numpy.__version__,
            },
            "machine": _machine(checkpoint),
            "options": options,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        notes=notes,
    )


def describe_anatomy(anatomy: Anatomy) -> dict[str, Any]:
    """The anatomy as plain data, with a one-line summary such as `pre` or `sandwich, parallel`."""
    found = [branch for block in anatomy.blocks for branch in block.branches]
    placements = sorted({branch.placement for branch in found}, key=[b.placement for b in found].index)
    parallel = any(branch.parallel for branch in found)
    if not found:
        summary = "unknown (no branches found)"
    else:
        main = max(placements, key=[b.placement for b in found].count)
        odd = [b.index for b in anatomy.blocks if any(branch.placement != main for branch in b.branches)]
        summary = main + (", parallel" if parallel else "")
        if odd:
            summary += f" (not so in block {', '.join(map(str, odd))})" if len(odd) < 9 else " (mixed)"
    return {
        "summary": summary,
        "block_list": anatomy.stream.blocks.path,
        "parallel": parallel,
        "causal": anatomy.causal,
        "blocks": [
            {"index": b.index, "attention": _branch(b, "attention"), "mlp": _branch(b, "mlp")} for b in anatomy.blocks
        ],
        "notes": list(anatomy.notes),
    }


def _describe_model(checkpoint: Checkpoint, anatomy: Anatomy) -> dict[str, Any]:
    return {
        "name": checkpoint.name,
        "source": checkpoint.source,
        "format": checkpoint.format,
        "revision": checkpoint.revision,
        "architecture": checkpoint.architecture,
        "parameters": checkpoint.parameters,
        "fingerprint": fingerprint(checkpoint.model, checkpoint.offload),
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "device": str(checkpoint.device),
        "blocks": len(anatomy.stream),
        "width": anatomy.stream.blocks.width,
        "inputs": checkpoint.inputs,
        "objective": anatomy.objective,
        "vocab_size": checkpoint.vocab_size,
        "notes": list(checkpoint.notes),
    }


def _describe_checks(anatomy: Anatomy) -> list[dict[str, Any]]:
    return [{**vars(check), "passed": check.passed} for check in anatomy.checks]


def _branch(block: Block, unit: str) -> dict[str, Any] | None:
    branch: Branch | None = block.branch(unit)
    if branch is None:
        return None
    return {
        "placement": branch.placement,
        "module": branch.update.module,
        "scale": branch.scale,
        "skip_scale": branch.skip_scale,
        "gain": branch.gain,
        "parallel": branch.parallel,
    }


def _first_tokens(checkpoint: Checkpoint, corpus: Corpus) -> list[str] | None:
    if checkpoint.tokenizer is None or corpus.is_states:
        return None
    return [str(t) for t in checkpoint.tokenizer.convert_ids_to_tokens(corpus.inputs[0, :16].tolist())]


def _python_call(checkpoint: Checkpoint, options: dict[str, Any]) -> str:
    names = [name for name in options if name != "keep_positions"]
    given = ", ".join(f"{name}={options[name]!r}" for name in names if options[name] is not None)
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    return f"depthprobe.analyze({checkpoint.source!r}, data=…, {given}, dtype={dtype!r})"


def _machine(checkpoint: Checkpoint) -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": processes.count(),
        "memory_gib": round(memory / 2**30, 1),
        "device": torch.cuda.get_device_name(checkpoint.device) if checkpoint.device.type == "cuda" else None,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

"""Train one model, and leave a checkpoint that `analyze` opens, a log, and a record of how it was made."""

from __future__ import annotations

import copy
import json
import platform
import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from depthprobe.checkpoint import load
from depthprobe.errors import CorpusError, OutputError, UsageError
from depthprobe.fingerprint import fingerprint
from depthprobe.formats import objective_of, read_tokenizer, undisturbed
from depthprobe.lab.admin import admin_profile
from depthprobe.lab.byte_tokens import byte_tokenizer
from depthprobe.lab.config import LabConfig
from depthprobe.lab.loop import Loop
from depthprobe.lab.model import LabForCausalLM, LabForMaskedLM
from depthprobe.lab.outcome import WINDOW, stuck
from depthprobe.lab.runlog import Log, draw, errors_of, load_state, read_json, save_model, write_json
from depthprobe.lab.settings import TrainSettings
from depthprobe.lab.text import Source, Text, is_ids, read_text
from depthprobe.placement import device_named
from depthprobe.processes import Processes, started

__all__ = ["TrainResult", "train"]

SCHEMA = 1


@dataclass(frozen=True, eq=False)
class TrainResult:
    """What became of a run.

    Attributes:
        status: `done`, or `failed` where it diverged or learned no more than the frequencies of the tokens.
        reason: why it failed, a sentence; None where it did not.
        steps: updates that were made.
        tokens: that were trained on, repetitions counted.
        loss: median training loss of the last 50 steps, nats a token; None where it is not finite.
        val_loss: the last validation loss, nats a token; None where it is not finite.
        unigram: what the frequencies of the training text give on the validation text, nats a token; None where the
            source of the batches states none.
        parameters: of the model, tied ones counted once.
        seconds: of training, over all resumptions, validation included.
        out: the folder with the checkpoint, `log.jsonl`, `loss.png` and `run.json`.
    """

    status: str
    reason: str | None
    steps: int
    tokens: int
    loss: float | None
    val_loss: float | None
    unigram: float | None
    parameters: int
    seconds: float
    out: Path

    def to_frame(self) -> pd.DataFrame:
        """The log: step, loss, lr, grad_norm, tokens, seconds and val_loss, a row a step, 0 being the start."""
        return pd.read_json(self.out / "log.jsonl", lines=True, precise_float=True)


def train(
    model: LabConfig | str | Path | nn.Module,
    settings: TrainSettings | None = None,
    out: str | Path = "lab",
    data: Any = None,
    *,
    tokenizer: Any | None = None,
    text_field: str = "text",
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
    command: str | None = None,
) -> TrainResult:
    """Train a model.

    Started by torchrun, it divides each batch among the processes; the first one writes.

    Args:
        model: the configuration of a lab model to begin from scratch with, whose vocabulary and positions are set to
            those of the text; or a checkpoint to go on from with a new schedule, a path or a transformers model.
        settings: how.
        out: the folder for what the run leaves. It must hold no other run.
        data: None for the standard library's text and source, whatever `analyze` takes as text or ids, or a `Source`.
        tokenizer: a tokenizer, where to find one, or `bytes`; None for the checkpoint's own, or for bytes where a new
            model is given text.
        text_field: the field of a `.jsonl` or a dataset that holds the text.
        resume: go on with the run in `out` where it was killed. A finished one is returned as it is.
        progress: called with (steps done, in all).
        command: what the user typed, for the record.

    Raises:
        UsageError: an option makes no sense.
        CorpusError: the text cannot be used, or is shorter than one batch.
        OutputError: `out` holds another run or cannot be written.
    """
    settings, out = settings or TrainSettings(), Path(out)
    settings.check()
    with started(device_named(settings.device)) as processes, processes.generators_kept():
        if settings.batch_size % (settings.accumulate * processes.count):
            raise UsageError(
                f"a batch of {settings.batch_size} sequences",
                f"a multiple of {processes.count} processes times {settings.accumulate} accumulated parts",
            )
        torch.manual_seed(settings.seed)
        made, tokenizer, source = _open(model, settings, data, tokenizer, text_field)
        record = _record(model, made, settings, source, processes, command)
        finished = _claim(out, record, resume)
        if finished is not None:
            _check_kept(out, settings, finished.steps - (finished.status == "failed"))
            return finished
        return _run(made, tokenizer, source, settings, out, record, processes, progress)


def _run(
    model: Any,
    tokenizer: Any | None,
    source: Source,
    settings: TrainSettings,
    out: Path,
    record: dict[str, Any],
    processes: Processes,
    progress: Callable[[int, int], None] | None,
) -> TrainResult:
    state = load_state(out / "state.pt") if (out / "state.pt").exists() else None
    if state is not None:
        _check_kept(out, settings, state["step"])
    processes.wait()  # before the first one writes there
    if processes.first:
        write_json(out / "run.json", record)

    def keep(step: int) -> None:
        folder = out / f"step-{step}"
        if processes.first:
            save_model(model, tokenizer, folder, record | {"status": "intermediate", "step": step})

    if state is None and record["start"] is None and record["model"].get("initialisation") == "admin":
        admin_profile(model, source.batch(settings.order, 0, settings.batch_size)[0])
    causal = objective_of(type(model).__name__, model.config) == "causal"
    with closing(Log(out / "log.jsonl", 0 if state is None else state["log_bytes"], processes.first)) as log:
        loop = Loop(model, source, settings, processes, log, out / "state.pt", keep, causal)
        failure = loop.run(state, progress)
    result = _result(log, failure, loop.unigram, record, out)
    if processes.first:
        if all(bool(weight.isfinite().all()) for weight in model.parameters()):
            save_model(model, tokenizer, out)
        draw(log.rows, out / "loss.png", f"{record['title']}: {result.status}", loop.unigram)
        plain = {name: value for name, value in vars(result).items() if name != "out"}
        write_json(out / "run.json", record | {"status": result.status, "result": plain})
        (out / "state.pt").unlink(missing_ok=True)
    processes.wait()
    return result


def _result(log: Log, failure: str | None, unigram: float | None, record: dict[str, Any], out: Path) -> TrainResult:
    last = log.rows[-1]
    losses = [row["loss"] for row in log.rows[1:][-WINDOW:]]
    reason = failure or stuck(last["val_loss"], unigram, record["settings"]["margin"])
    return TrainResult(
        status="failed" if reason else "done",
        reason=reason,
        steps=last["step"],
        tokens=last["tokens"],
        loss=None if None in losses else statistics.median(losses),
        val_loss=last["val_loss"],
        unigram=unigram,
        parameters=record["parameters"],
        seconds=last["seconds"],
        out=out,
    )


# What there is to train


def _open(
    model: LabConfig | str | Path | nn.Module, settings: TrainSettings, data: Any, tokenizer: Any, text_field: str
) -> tuple[Any, Any | None, Source]:
    """The model, its tokenizer, and what it is trained on, which fit one another."""
    if isinstance(model, LabConfig):
        config = copy.deepcopy(model)
        config.check()
        objective = "causal" if config.causal else "masked"
        if tokenizer == "bytes" or (tokenizer is None and not is_ids(data)):
            tokenizer = byte_tokenizer(masked=not config.causal, positions=settings.seq_len)
        elif isinstance(tokenizer, str | Path):
            tokenizer = _read_tokenizer(tokenizer)
        source = _source(data, tokenizer, settings, objective, text_field)
        text = isinstance(source, Text) and source.tokenizer is not None
        config.vocab_size = source.vocab_size if text else max(source.vocab_size, config.vocab_size)
        config.max_position_embeddings = settings.seq_len
        made = (LabForCausalLM if config.causal else LabForMaskedLM)(config)
        return made, source.tokenizer if isinstance(source, Text) else None, source
    tokenizer = byte_tokenizer() if tokenizer == "bytes" else tokenizer
    opened = load(model, device="cpu", dtype="float32", tokenizer=tokenizer)
    if opened.objective is None or not opened.is_hf:
        raise UsageError(f"{opened.name} has no language-model head", "a checkpoint that predicts tokens")
    if opened.max_positions is not None and opened.max_positions < settings.seq_len:
        raise UsageError(f"--seq-len {settings.seq_len}", f"at most the {opened.max_positions} positions of the model")
    source = _source(data, opened.tokenizer, settings, opened.objective, text_field)
    if opened.vocab_size is not None and source.vocab_size > opened.vocab_size:
        raise CorpusError(
            f"{source.name} has ids up to {source.vocab_size - 1:,}",
            f"ids below the model's vocabulary of {opened.vocab_size:,}",
        )
    return opened.model, opened.tokenizer, source


def _source(data: Any, tokenizer: Any, settings: TrainSettings, objective: Any, text_field: str) -> Source:
    if hasattr(data, "batch") and hasattr(data, "validation"):
        source: Source = data
        # Another source than a text has labels for the next token.
        given = "masked" if isinstance(source, Text) and source.mask is not None else "causal"
        if given != objective:
            raise UsageError(
                f"{source.name} is made for {given} prediction, and the model's is {objective}",
                fix=f'read_text(…, objective="{objective}"), or the text itself',
            )
        if source.validation[0].shape[1] != settings.seq_len:
            raise UsageError(f"--seq-len {settings.seq_len}", f"{source.validation[0].shape[1]}, as {source.name} has")
        return source
    text = read_text(data, tokenizer, seq_len=settings.seq_len, objective=objective, text_field=text_field)
    need = settings.batch_size * settings.seq_len
    if len(text.stream) < need:
        raise CorpusError(
            f"{text.name} has {len(text.stream):,} tokens for training",
            f"at least one batch: {settings.batch_size:,} sequences of {settings.seq_len:,}, {need:,} tokens",
            "give more text, or lower --batch-size or --seq-len",
        )
    return text


def _read_tokenizer(place: str | Path) -> Any:
    local = Path(place).exists()
    with undisturbed(local):
        tokenizer, notes = read_tokenizer(str(place), local_files_only=local)
    if tokenizer is None:
        raise UsageError(f"no tokenizer in {place}", "bytes, or a folder with a tokenizer", "; ".join(notes) or None)
    return tokenizer


# What is recorded


def _record(
    model: LabConfig | str | Path | nn.Module,
    made: Any,
    settings: TrainSettings,
    source: Source,
    processes: Processes,
    command: str | None,
) -> dict[str, Any]:
    """The run, as it stands in `run.json` but for its result."""
    fresh = isinstance(model, LabConfig)
    config = made.config.to_diff_dict()
    if isinstance(made.config, LabConfig):
        config = {name: getattr(made.config, name) for name in LabConfig.__annotations__ if name in vars(made.config)}
    start = None if fresh else {"name": str(getattr(model, "name_or_path", model)), "weights": fingerprint(made)}
    name = getattr(made.config, "placement", type(made).__name__)
    blocks = getattr(made.config, "num_hidden_layers", "?")
    packages = ("depthprobe", "torch", "transformers", "tokenizers", "numpy")
    versions = {"python": platform.python_version()} | {package: metadata.version(package) for package in packages}
    record = {
        "schema": SCHEMA,
        "status": "running",
        "title": f"{name}, {blocks} blocks, {settings.optimizer} {settings.lr:g}, warm-up {settings.warmup}",
        "command": command,
        "settings": asdict(settings),
        "model": config,
        "start": start,
        "parameters": sum(weight.numel() for weight in made.parameters()),
        "text": source.describe() if isinstance(source, Text) else {"name": source.name, "sha256": source.sha256},
        "processes": processes.count,
        "device": str(processes.device),
        "threads": torch.get_num_threads(),
        "versions": versions,
    }
    return dict(json.loads(json.dumps(record)))  # as it will be read again


def _claim(out: Path, record: dict[str, Any], resume: bool) -> TrainResult | None:
    """Take the folder for this run. The result of a run that is finished, where that is to be resumed."""
    home = out / "run.json"
    with errors_of(out):
        out.mkdir(parents=True, exist_ok=True)
        there = home.exists()
    if not there:
        for name in ("config.json", "report.json"):
            if (out / name).exists():
                raise OutputError(f"{out} holds the {name} of something else", "a new folder", "choose another --out")
        return None
    before = read_json(home)
    if not resume:
        raise OutputError(f"{out} holds a run", "a new folder", "go on with it by --resume, or choose another --out")
    was, now = _identity(before), _identity(record)
    odd = [name.replace("_", " ") for name in now if was.get(name) != now[name]]
    if odd:
        raise OutputError(
            f"{out} holds a run with another {', '.join(odd)}", "the run that is resumed", "choose another --out"
        )
    return TrainResult(**before["result"], out=out) if "result" in before else None


def _check_kept(out: Path, settings: TrainSettings, done: int) -> None:
    """Refuse checkpoints of steps that a run is past, and that it did not keep.

    Raises:
        UsageError: one is asked for.
    """
    lost = [step for step in settings.save_at if step <= done and not (out / f"step-{step}").exists()]
    if lost:
        raise UsageError(
            f"--save-at {','.join(map(str, lost))}, and the run in {out} is past it and kept none",
            f"steps after {done:,}, or those that it kept",
            "train anew into another --out",
        )


def _identity(record: dict[str, Any]) -> dict[str, Any]:
    """What two runs must share for one to go on where the other stopped."""
    settings = {name: value for name, value in record.get("settings", {}).items() if name not in ("save_at", "device")}
    parts = {name: record.get(name) for name in ("model", "start", "threads", "device")}
    text, versions = record.get("text", {}), record.get("versions", {})
    return settings | parts | {"text": text.get("sha256"), "version of torch": versions.get("torch")}

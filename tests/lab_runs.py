"""Tiny training runs, and what they left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from depthprobe.lab import LabConfig, TrainResult, TrainSettings, train

WORDS = ["stream", "block", "norm", "update", "depth", "layer", "grows", "falls", "is", "the", "a", "of"]
TEXT = " ".join(np.random.default_rng(0).choice(WORDS, 12_000))
SMALL = TrainSettings(
    steps=30, batch_size=4, seq_len=16, lr=1e-2, warmup=5, eval_every=10, eval_tokens=512, device="cpu"
)
TINY = LabConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)


def tiny(**changes: Any) -> LabConfig:
    return LabConfig(**{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, **changes})


def run(out: Path, model: Any = TINY, data: Any = None, *, resume: bool = False, **changes: Any) -> TrainResult:
    return train(model, replace(SMALL, **changes), out, [TEXT] if data is None else data, resume=resume)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def curve(out: Path) -> list[dict[str, Any]]:
    """All of the log that does not depend on the clock."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows(out)]


def record(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "run.json").read_text()))


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()

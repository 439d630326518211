"""What the results must not depend on, and what they must: batches and order, and the number of sequences."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import families
import numpy as np
import pandas as pd
import pytest
import torch
from families import build, ids
from torch import Tensor, nn

from depthprobe import Checkpoint, Report
from depthprobe.measure import Settings, measure
from depthprobe.prepare import prepare
from depthprobe.probes.similarity import KeptStates

KEYS = {"layers": ["metric", "unit", "layer"], "pairs": ["metric", "i", "j"]}
# Their random draw, their groups or their folds are keyed by the sequence's index in the corpus.
DRAWN = ("interaction_error_control", "linearity", "linearity_update")


def analyze(model: nn.Module | Checkpoint, inputs: Tensor, **options: object) -> Report:
    return families.analyze(model, inputs, **{"tokens": inputs.numel(), **options})


def compare(a: Report, b: Report, tolerance: float, columns: tuple[str, ...] = ("value", "ci_low", "ci_high")) -> None:
    """Every row of both tables, relative to the larger of the value and 1e-3 of its metric's largest."""
    for name, keys in KEYS.items():
        one, other = getattr(a, name), getattr(b, name)
        assert len(one) > 10
        pd.testing.assert_frame_equal(one[[*keys, "n"]], other[[*keys, "n"]])
        largest = one.groupby("metric")["value"].transform(lambda values: values.abs().max())
        for column in columns:
            scale = np.maximum(one[column].abs(), 1e-3 * largest) + 1e-12
            off = (one[column] - other[column]).abs() / scale
            worst = one.assign(other=other[column], off=off).loc[off > tolerance]
            assert worst.empty, f"{name}, {column}:\n{worst.head(8).to_string()}"


class TestBatches:
    @pytest.mark.parametrize("name", ["llama", "gemma3", "bert", "neox"])
    def test_results_do_not_depend_on_their_size(self, name: str) -> None:
        model, inputs = build(name), ids(8, 64)
        one = analyze(model, inputs, batch_size=1)
        metrics = set(one.layers["metric"])
        assert metrics >= {"linearity", "cka_adjacent", "interaction_error_control", "lens_kl", "residual_norm_median"}
        for size in (2, 3, 8):
            compare(one, analyze(model, inputs, batch_size=size), 1e-6)

    def test_growth_and_sinks_do_not_either(self) -> None:
        model, inputs = build("llama"), ids(8, 64)
        with torch.no_grad():
            model.model.embed_tokens.weight[7] *= 500  # a token that is a sink wherever it stands
        one, other = (analyze(model, inputs, batch_size=size) for size in (1, 3))
        assert one.sinks
        assert [{**s, "max_norm": 0, "max_ratio": 0} for s in one.sinks] == [
            {**s, "max_norm": 0, "max_ratio": 0} for s in other.sinks
        ]
        for name in ("cross_share", "growth_power", "growth_rate", "update_growth_rate"):
            assert one.growth[name] == pytest.approx(other.growth[name], rel=1e-6)

    @pytest.mark.real
    def test_on_smollm2(self, smollm2: Checkpoint) -> None:
        inputs = ids(3, 64, vocab=49_000)
        one, other = (analyze(smollm2, inputs, batch_size=size, lens_positions=24) for size in (1, 3))
        compare(one, other, 1e-6)

    def test_a_second_run_is_the_same_to_the_last_bit(self) -> None:
        model, inputs = build("llama"), ids(8, 64)
        compare(analyze(model, inputs), analyze(model, inputs), 0)

    def test_the_seed_moves_what_is_drawn_and_nothing_else(self) -> None:
        model, inputs = build("llama"), ids(8, 64)
        a, b = (analyze(model, inputs, seed=seed, lens_positions=2048).layers for seed in (0, 1))
        differs = set(a["metric"][(a["value"] - b["value"]).abs() > 1e-12])
        assert differs == {"interaction_error_control"}
        assert (a["ci_low"] != b["ci_low"]).any()


class TestOrder:
    ORDER = (5, 2, 7, 0, 3, 6, 1, 4)

    @pytest.mark.parametrize("name", ["llama", "bert"])
    def test_of_the_sequences(self, name: str) -> None:
        """All positions are kept and read out here, so only what is keyed by a sequence's index may move."""
        model, inputs = build(name), ids(8, 64)
        a, b = (analyze(model, rows, lens_positions=2048) for rows in (inputs, inputs[list(self.ORDER)]))
        a, b = (replace(r, layers=r.layers[~r.layers["metric"].isin(DRAWN)].reset_index(drop=True)) for r in (a, b))
        compare(a, b, 2e-6, columns=("value",))
        assert set(a.layers["metric"]) >= {"cka_adjacent", "cosine_adjacent_standardised", "lens_kl"}

    def test_every_sequence_keeps_its_own_numbers(self) -> None:
        model, inputs = build("llama"), ids(8, 64)
        means = []
        for rows in (inputs, inputs[list(self.ORDER)]):
            _, corpus, anatomy = prepare(model, rows, tokens=rows.numel(), device="cpu")
            means.append(measure(anatomy, corpus, Settings(batch_size=3, lens_positions=2048)).means.values)
        assert set(means[0]) == set(means[1])
        for key, values in means[0].items():
            if key[0] not in DRAWN:
                np.testing.assert_allclose(
                    means[1][key], values[list(self.ORDER)], rtol=1e-5, atol=1e-6, err_msg=str(key)
                )


class TestIntervals:
    def test_shrink_with_the_root_of_the_number_of_sequences(self) -> None:
        model, inputs = build("llama"), ids(256, 24)
        few, many = (analyze(model, inputs[:n], lens_positions=n, interaction=False) for n in (16, 256))
        for metric in ("residual_norm", "update_ratio", "cosine_adjacent", "lens_loss"):
            rows = [report.layers[report.layers["metric"] == metric] for report in (few, many)]
            width = [float((table["ci_high"] - table["ci_low"]).mean()) for table in rows]
            assert 2.5 < width[0] / width[1] < 6.5, metric  # √(256 / 16) = 4
        assert set(few.layers["n"]) == {16}
        assert any("16 sequences" in note for note in few.notes)
        assert not any("sequences; below 32" in note for note in many.notes)

    def test_hold_the_value(self) -> None:
        report = analyze(build("llama"), ids(32, 24))
        for table in (report.layers, report.pairs):
            assert (table["ci_low"] <= table["value"] + 1e-12).all()
            assert (table["value"] <= table["ci_high"] + 1e-12).all()
            assert np.isfinite(table[["value", "ci_low", "ci_high"]].to_numpy()).all()


MEMORY = """
import sys
import torch
from torch import nn
import depthprobe
torch.set_num_threads(1)
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(128, 16), nn.Tanh(), nn.Linear(16, 128))
    def forward(self, x):
        return x + self.mlp(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 128)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(128, 96)
    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

tokens = int(sys.argv[1])
ids = torch.randint(0, 96, (tokens // 256, 256))
depthprobe.analyze(Model(), data=ids, tokens=tokens, ablation_tokens=1024, device="cpu")
# getrusage would also count what the process was, the tests' own, before it became this one
line = next(s for s in open("/proc/self/status") if s.startswith("VmHWM"))
print("peak MiB", int(line.split()[1]) / 1024)
"""


class TestMemory:
    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
    def test_the_peak_does_not_grow_with_the_tokens(self) -> None:
        """One kept state of 128 dimensions would be 56 MiB more for each of the four blocks at 128k tokens."""
        peaks = []
        for tokens in (16_384, 131_072):
            run = subprocess.run(
                [sys.executable, "-c", MEMORY, str(tokens)], capture_output=True, text=True, timeout=300, check=False
            )
            assert run.returncode == 0, run.stderr
            match = re.search(r"peak MiB ([\d.]+)", run.stdout)
            assert match is not None
            peaks.append(float(match[1]))
        assert peaks[1] - peaks[0] < 40, peaks

    @pytest.mark.parametrize("sequences", [1, 7, 32, 300, 20_000])
    def test_the_kept_sample_is_bounded(self, sequences: int) -> None:
        kept = KeptStates(sequences, tokens=256, skip=1, budget=4096, seed=0)
        assert len(kept.slots) * kept.each <= 4096
        assert len(kept.slots) * kept.each >= min(4096, sequences * 255) * 0.9
        positions = kept.positions(next(iter(kept.slots)))
        assert len(set(positions.tolist())) == kept.each
        assert positions.min() >= 1
        assert positions.max() < 256

"""The numbers against a plain, separate computation: hooks that are placed by hand, and a loop over tokens.

Nothing of depthprobe is used to compute what is expected: each sequence runs through the model on its own, every
product is taken in float64, one token after another.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from families import EMBEDDED, analyze, build, ids
from torch import Tensor, nn

import depthprobe
from depthprobe import Checkpoint, Report

Rows = dict[tuple[str, str, int], float]


@dataclass(frozen=True)
class Hand:
    """Where things are in one architecture, as its code reads.

    `attention` and `mlp` are modules whose output is what is added; `middle` is the module whose output is the state
    that the MLP's branch is added to, where that is not the block's input plus the attention's branch.
    """

    blocks: str
    attention: str
    mlp: str
    readout: Callable[[nn.Module, Tensor], Tensor] | None
    middle: str | None = None
    parallel: bool = False


LLAMA = Hand("model.layers", "self_attn", "mlp", lambda m, x: m.lm_head(m.model.norm(x)))
GPT2 = Hand("transformer.h", "attn", "mlp", lambda m, x: m.lm_head(m.transformer.ln_f(x)))
NEOX = Hand(
    "gpt_neox.layers", "attention", "mlp", lambda m, x: m.lm_head(m.gpt_neox.final_layer_norm(x)), parallel=True
)
BERT = Hand(
    "bert.encoder.layer",
    "attention.output.dense",
    "output.dense",
    lambda m, x: m.cls(x),
    middle="attention.output.LayerNorm",
)
MINILM = Hand("encoder.layer", "attention.output.dense", "output.dense", None, middle="attention.output.LayerNorm")


def first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def dot(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.dot(a.astype(np.float64), b.astype(np.float64)))


def norm(a: np.ndarray) -> float:
    return math.sqrt(dot(a, a))


def cos(a: np.ndarray, b: np.ndarray) -> float:
    return dot(a, b) / (norm(a) * norm(b))


def angle(a: np.ndarray, b: np.ndarray) -> float:
    return math.acos(max(-1.0, min(1.0, cos(a, b)))) / math.pi


class Watched:
    """One sequence through the model, with everything that the hooks saw."""

    def __init__(self, model: nn.Module, hand: Hand, row: Tensor) -> None:
        self.blocks = list(model.get_submodule(hand.blocks))
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.x: list[Tensor] = []
        self.seen: list[dict[str, Tensor]] = [{} for _ in self.blocks]
        handles = []
        for block, seen in zip(self.blocks, self.seen, strict=True):
            handles.append(block.register_forward_pre_hook(self._before, with_kwargs=True))
            paths = {"z": "", "attention": hand.attention, "mlp": hand.mlp}
            if hand.middle:
                paths["middle"] = hand.middle
            for key, path in paths.items():

                def after(_: nn.Module, __: Any, output: Any, key: str = key, seen: dict[str, Tensor] = seen) -> None:
                    seen[key] = first(output).clone()

                handles.append(block.get_submodule(path).register_forward_hook(after))
        with torch.no_grad():
            self.output = model(input_ids=row[None], **({"use_cache": False} if hand.readout else {}))
        for handle in handles:
            handle.remove()
        self.x.append(self.seen[-1]["z"])

    def _before(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.calls.append((args, kwargs))
        self.x.append((args[0] if args else kwargs["hidden_states"]).clone())

    def again(self, index: int, x: Tensor) -> Tensor:
        """Block `index` called by hand on another state, with the arguments of the model's own call."""
        args, kwargs = self.calls[index]
        with torch.no_grad():
            if args:
                return first(self.blocks[index](x, *args[1:], **kwargs))
            return first(self.blocks[index](**{**kwargs, "hidden_states": x}))


def plain(
    model: nn.Module, hand: Hand, inputs: Tensor, skip: int = 1
) -> tuple[Rows, dict[tuple[str, int, int], float]]:
    """layers and pairs by the definitions: a mean over tokens (a median: taken), then over sequences."""
    layers: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    pairs: dict[tuple[str, int, int], list[float]] = defaultdict(list)

    def keep(metric: str, unit: str, layer: int, values: list[float], median: bool = False) -> None:
        layers[metric, unit, layer].append(sum(values) / len(values))
        if median:
            layers[f"{metric}_median", unit, layer].append(float(np.median(values)))

    for row in inputs:
        run = Watched(model, hand, row)
        depth = len(run.blocks)
        states = [x[0].numpy() for x in run.x]
        tokens = range(skip, len(row))
        for l, x in enumerate(states):
            keep("residual_norm", "block", l, [norm(x[t]) for t in tokens], median=True)
            keep("residual_rms", "block", l, [norm(x[t]) / math.sqrt(x.shape[1]) for t in tokens])
        before: dict[str, np.ndarray] = {}
        for l in range(depth):
            x, z = states[l], states[l + 1]
            seen = {key: value.reshape(run.x[0].shape)[0].numpy() for key, value in run.seen[l].items()}
            a, m = seen["attention"], seen["mlp"]
            middle = x if hand.parallel else seen.get("middle", x + a)
            for unit, s, u in (("block", x, z - x), ("attention", x, a), ("mlp", middle, m)):
                y = s.astype(np.float64) + u
                keep("update_norm", unit, l, [norm(u[t]) for t in tokens])
                keep("update_ratio", unit, l, [norm(u[t]) / norm(s[t]) for t in tokens], median=True)
                keep("update_alignment", unit, l, [cos(u[t], s[t]) for t in tokens])
                keep("update_share", unit, l, [dot(u[t], y[t]) / dot(y[t], y[t]) for t in tokens])
                keep("update_energy_share", unit, l, [dot(u[t], u[t]) / dot(y[t], y[t]) for t in tokens])
                if l > 0:
                    keep("update_cosine_next", unit, l - 1, [cos(before[unit][t], u[t]) for t in tokens])
                before[unit] = u
            keep("cosine_adjacent", "block", l, [cos(x[t], z[t]) for t in tokens])
            keep("block_influence", "block", l, [1 - cos(x[t], z[t]) for t in tokens])
        for l in range(depth - 1):
            true = (run.x[l + 2] - run.x[l + 1])[0].numpy()
            blind = (run.again(l + 1, run.x[l]) - run.x[l])[0].numpy()
            keep("interaction_error", "block", l, [norm(true[t] - blind[t]) / norm(true[t]) for t in tokens])
            keep("interaction_cosine", "block", l, [cos(true[t], blind[t]) for t in tokens])
        for i in range(depth + 1):
            for j in range(i + 1, depth + 1):
                angles = [angle(states[i][t], states[j][t]) for t in tokens]
                pairs["angular_distance", i, j].append(sum(angles) / len(angles))
                cosines = [cos(states[i][t], states[j][t]) for t in tokens]
                pairs["cosine", i, j].append(sum(cosines) / len(cosines))
        if hand.readout is not None:
            lens(layers, model, hand, run, row)
    return {k: sum(v) / len(v) for k, v in layers.items()}, {k: sum(v) / len(v) for k, v in pairs.items()}


def lens(
    layers: dict[tuple[str, str, int], list[float]], model: nn.Module, hand: Hand, run: Watched, row: Tensor
) -> None:
    """Every predicted position counts, position 0 too; a masked model predicts all of them."""
    assert hand.readout is not None
    causal = hand.readout is not BERT.readout
    count = len(row) - 1 if causal else len(row)
    with torch.no_grad():
        final = run.output.logits[0].double().log_softmax(-1)
        for l, x in enumerate(run.x):
            guess = hand.readout(model, x)[0].double().log_softmax(-1)
            kl = [float((final[t].exp() * (final[t] - guess[t])).sum()) for t in range(count)]
            layers["lens_kl", "block", l].append(sum(kl) / count)
            agree = [int(guess[t].argmax()) == int(final[t].argmax()) for t in range(count)]
            layers["lens_top1", "block", l].append(sum(agree) / count)
            if causal:
                loss = [-float(guess[t, row[t + 1]]) for t in range(count)]
                layers["lens_loss", "block", l].append(sum(loss) / count)


# What a random draw, or the corpus mean, goes into; test_probes has these.
ELSEWHERE = {
    *("interaction_error_control", "cka_adjacent", "linearity", "linearity_update"),
    *("cosine_adjacent_centred", "cosine_adjacent_standardised"),
}


def compare(report: Report, expected: tuple[Rows, dict[tuple[str, int, int], float]], tolerance: float = 1e-4) -> None:
    """Every row that the report has, and no more or fewer, to `tolerance` relative in float32."""
    layers = report.layers[~report.layers["metric"].isin(ELSEWHERE)]
    found = {
        (m, u, int(l)): v for m, u, l, v in zip(*(layers[c] for c in ("metric", "unit", "layer", "value")), strict=True)
    }
    pairs = {
        (m, int(i), int(j)): v
        for m, i, j, v in zip(*(report.pairs[c] for c in ("metric", "i", "j", "value")), strict=True)
    }
    assert set(found) == set(expected[0])
    assert set(pairs) == set(expected[1])
    # A mean of cosines can come to lie near 0 and carries float32's rounding of its terms, not of itself.
    wrong = {
        key: (value, goal)
        for mine, theirs in ((found, expected[0]), (pairs, expected[1]))
        for key, value in mine.items()
        if abs(value - (goal := theirs[key])) > tolerance * abs(goal) + 1e-6
    }
    assert not wrong, f"{len(wrong)} of {len(found) + len(pairs)}: {dict(list(wrong.items())[:8])}"


TINY = {"llama": LLAMA, "neox": NEOX, "bert": BERT, "gpt2": GPT2}


class TestTinyModels:
    @pytest.mark.parametrize("skip", [1, 3, 0])
    @pytest.mark.parametrize("name", TINY)
    def test_every_row(self, name: str, skip: int) -> None:
        model, inputs = build(name), ids(3, 21)
        report = analyze(model, data=inputs, skip_first=skip, batch_size=2, lens_positions=3 * 21, device="cpu")
        compare(report, plain(model, TINY[name], inputs, skip))

    @pytest.mark.parametrize("name", ["llama", "gpt2", "neox"])
    def test_the_last_state_is_the_one_before_the_final_norm(self, name: str) -> None:
        """transformers' hidden_states[-1] has been through it: the two must be told apart, and the right one taken."""
        model, inputs = build(name), ids(3, 21)
        report = analyze(model, data=inputs, device="cpu")
        with torch.no_grad():
            normalised = model(input_ids=inputs, output_hidden_states=True).hidden_states[-1]
        wrong = float(normalised[:, 1:].norm(dim=-1).mean())
        rows, _ = plain(model, TINY[name], inputs)
        found = residual(report)
        assert found[-1] == pytest.approx(rows["residual_norm", "block", 3], rel=1e-4)
        assert abs(found[-1] - wrong) > 0.1 * wrong

    def test_a_share_of_the_positions_for_the_lens(self) -> None:
        """With a budget the lens reads some positions; over many sequences it must come to the same as all of them."""
        model, inputs = build("llama"), ids(64, 21)
        some, every = (
            analyze(model, data=inputs, lens_positions=n, interaction=False, device="cpu").layers.query(
                "metric == 'lens_loss'"
            )
            for n in (640, 64 * 20)
        )
        assert set(some["n"]) == {64}
        assert some["value"].to_numpy() == pytest.approx(every["value"].to_numpy(), rel=0.1)
        assert not np.allclose(some["value"], every["value"], rtol=1e-6)


def residual(report: Report, metric: str = "residual_norm") -> np.ndarray:
    return report.layers.query("metric == @metric").sort_values("layer")["value"].to_numpy()


class TestEmbedded:
    def test_every_row(self) -> None:
        checkpoint = depthprobe.load(EMBEDDED, device="cpu")
        inputs = encoded(checkpoint, 2, 48)
        report = analyze(checkpoint, data=inputs, lens_positions=96)
        compare(report, plain(checkpoint.model, GPT2, inputs))


def encoded(checkpoint: Checkpoint, sequences: int, tokens: int) -> Tensor:
    """English from this module's and numpy's own documentation, as the checkpoint's tokenizer splits it."""
    text = " ".join([np.fft.__doc__ or "", np.random.__doc__ or "", np.linalg.__doc__ or "", __doc__ or ""])
    found = checkpoint.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    assert len(found) >= sequences * tokens
    return torch.tensor(found[: sequences * tokens]).reshape(sequences, tokens)


@pytest.fixture(scope="module")
def inputs(smollm2: Checkpoint) -> Tensor:
    return encoded(smollm2, 2, 64)


@pytest.fixture(scope="module")
def report(smollm2: Checkpoint, inputs: Tensor) -> Report:
    return analyze(smollm2, data=inputs, lens_positions=2 * 63)


@pytest.mark.real
class TestSmolLM2:
    def test_every_row(self, smollm2: Checkpoint, inputs: Tensor, report: Report) -> None:
        compare(report, plain(smollm2.model, LLAMA, inputs))

    def test_position_0_is_a_sink_and_is_not_in_the_averages(
        self, smollm2: Checkpoint, inputs: Tensor, report: Report
    ) -> None:
        middle = Watched(smollm2.model, LLAMA, inputs[0]).x[15][0, 0].norm()
        assert 18_000 < float(middle) < 27_000
        sinks = {sink["position"]: sink for sink in report.sinks}
        assert sinks[0]["sequences"] == 2
        assert 18_000 < sinks[0]["max_norm"] < 27_000
        assert sinks[0]["max_ratio"] > 50
        norms = torch.stack([x[0].norm(dim=-1) for x in Watched(smollm2.model, LLAMA, inputs[0]).x])
        large = norms > 50 * norms.median(dim=1, keepdim=True).values
        assert set(sinks) >= set(large.nonzero()[:, 1].tolist())
        layers = large[:, 0].nonzero()[:, 0].tolist()
        assert sinks[0]["first_layer"] <= min(layers)
        assert sinks[0]["last_layer"] >= max(layers)
        assert residual(report)[5:25].max() < 1000
        whole = analyze(smollm2, data=inputs, skip_first=0, interaction=False, lens_positions=0)
        # It is there from block 12 to the end but for the last ones; 22,000 over 64 positions is about 340 each.
        assert (residual(whole)[12:25] > residual(report)[12:25] + 250).all()
        skipped = {(s["metric"], s["layer"]): s for s in report.skipped}
        norms = [s for (metric, _), s in skipped.items() if metric == "residual_norm"]
        assert norms
        assert all(s["including"] > s["without"] + 100 for s in norms)
        layer = norms[0]["layer"]
        assert norms[0]["including"] == pytest.approx(residual(whole)[layer], rel=1e-6)
        assert norms[0]["without"] == pytest.approx(residual(report)[layer], rel=1e-6)

    def test_the_last_state_is_the_one_before_the_final_norm(
        self, smollm2: Checkpoint, inputs: Tensor, report: Report
    ) -> None:
        with torch.no_grad():
            normalised = smollm2.model(input_ids=inputs, output_hidden_states=True).hidden_states[-1]
        wrong = float(normalised[:, 1:].norm(dim=-1).mean())
        right = np.mean([float(Watched(smollm2.model, LLAMA, row).x[-1][0, 1:].norm(dim=-1).mean()) for row in inputs])
        assert residual(report)[30] == pytest.approx(right, rel=1e-4)
        assert abs(wrong - right) > 0.1 * right


@pytest.mark.real
class TestMiniLM:
    def test_every_row(self, minilm: Checkpoint) -> None:
        inputs = encoded(minilm, 3, 48)
        report = analyze(minilm, data=inputs)
        compare(report, plain(minilm.model, MINILM, inputs))
        assert report.model["objective"] is None

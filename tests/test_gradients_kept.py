"""What gradients leave behind, what their numbers do not depend on, what is refused, and fresh models."""

import copy
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from families import IDS, build, ids
from gradient_models import BLOCKS, Chain, Steps, column, realformer, small
from lab_runs import run as train_run
from lab_runs import tiny
from test_processes import forked
from torch import nn

import depthprobe
from depthprobe.corpus import Corpus
from depthprobe.errors import GradientError, NonFiniteError, UsageError
from depthprobe.gradient import GradientSettings, gradients, run_gradients
from depthprobe.prepare import prepare
from depthprobe.probes.weights import sequence_groups

HEAD = ("weight_gradient_norm_pooled", "head.weight")

# --- what it leaves, and what it does not depend on ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_model_is_left_as_it_was(dtype: torch.dtype) -> None:
    model = build("gpt2").to(dtype)
    model.transformer.h[1].requires_grad_(False)
    model.transformer.h[0].ln_1.float()  # some keep their norms in float32
    checkpoint = depthprobe.load(model)
    marked = model.transformer.h[2].ln_1.weight
    marked.grad = torch.ones_like(marked)
    before = {name: (p.requires_grad, p.dtype, p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    corpus, anatomy = prepare(checkpoint, IDS)[1:]
    found = run_gradients(anatomy, corpus, GradientSettings())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in model.modules())
    for name, p in model.named_parameters():
        flag, kind, place, value = before[name]
        assert (p.requires_grad, p.dtype) == (flag, kind), name
        assert torch.equal(p, value), name
        assert p.data_ptr() == place, name
        assert p.grad is None or p is marked, name
    assert torch.equal(marked.grad, torch.ones_like(marked))
    said = [note for note in found.summary["notes"] if "float32" in note]
    assert len(said) == (dtype != torch.float32)
    # in half precision the weights are those, and all else is float32
    whole = gradients(copy.deepcopy(model).float(), IDS)
    if dtype != torch.float32:
        pd.testing.assert_frame_equal(found.table, whole.table, rtol=1e-4)


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = build("gpt2").to(torch.bfloat16).requires_grad_(False)
    checkpoint = depthprobe.load(model)
    _, corpus, anatomy = prepare(checkpoint, IDS)
    model.transformer.h[1].mlp.c_fc.weight.data[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"x_3"):
        run_gradients(anatomy, corpus, GradientSettings())
    assert not any(p.requires_grad or p.dtype != torch.bfloat16 for p in model.parameters())


def test_a_sequence_has_its_gradients_whatever_stands_beside_it() -> None:
    model = build("llama")
    whole = gradients(model, IDS, cotangent="loss").table
    parts = [gradients(model, IDS[s : s + 1], cotangent="loss").table for s in range(3)]
    own = ~whole["metric"].str.contains("pooled")
    mean = np.mean([part["value"] for part in parts], axis=0)
    np.testing.assert_allclose(whole["value"][own], mean[own], rtol=1e-5)
    assert whole["n"].eq(3).all()
    assert parts[0]["ci_low"].isna().all()


@pytest.mark.parametrize("name", ["neox", "realformer"])
def test_without_room_for_the_graph_blocks_run_again(name: str) -> None:
    model = realformer() if name == "realformer" else build(name)
    _, corpus, anatomy = prepare(model, IDS)
    calls = []
    handle = model.get_submodule(f"{BLOCKS[name]}.1.attention").register_forward_hook(lambda *_: calls.append(1))
    kept = run_gradients(anatomy, corpus, GradientSettings())
    once = len(calls)
    again = run_gradients(anatomy, corpus, GradientSettings(memory=1))
    handle.remove()
    assert (once, len(calls) - once) == (3, 6)
    pooled = kept.table["metric"] == "weight_gradient_norm_pooled"
    pd.testing.assert_frame_equal(kept.table[~pooled], again.table)
    assert any("--memory" in note for note in again.summary["notes"])


def test_pooled_intervals_are_a_jackknife() -> None:
    model = Chain([0.5, 2.0])
    inputs = ids(4, 9, vocab=20)
    row = gradients(model, inputs).table.set_index(["metric", "unit"]).loc[HEAD]
    parts = by_sequence(model, inputs)
    total = sum(parts)
    out = np.array([(total - part).norm().item() / 3 for part in parts])
    reach = 3.182446 * np.sqrt(3 / 4 * np.sum((out - out.mean()) ** 2))
    assert row["value"] == pytest.approx(total.norm().item() / 4, rel=1e-5)
    assert (row["ci_low"], row["ci_high"]) == pytest.approx((row["value"] - reach, row["value"] + reach), rel=1e-4)
    alone = gradients(model, inputs[:1]).table.set_index("metric").loc["weight_gradient_norm_pooled"]
    assert alone["ci_low"].isna().all()


def test_pooled_intervals_leave_out_whole_documents() -> None:
    model, inputs, owners = Chain([0.5, 2.0]), ids(6, 9, vocab=20), np.array([4, 4, 4, 1, 1, 7])
    row = gradients(model, of_documents(inputs, owners)).table.set_index(["metric", "unit"]).loc[HEAD]
    parts = torch.stack(by_sequence(model, inputs))
    out = np.array([parts[owners != name].mean(dim=0).norm().item() for name in (1, 4, 7)])
    reach = 4.302653 * np.sqrt(2 / 3 * np.sum((out - out.mean()) ** 2))
    assert row["value"] == pytest.approx(parts.mean(dim=0).norm().item(), rel=1e-5)
    wanted = (max(row["value"] - reach, 0), row["value"] + reach)
    assert (row["ci_low"], row["ci_high"]) == pytest.approx(wanted, rel=1e-4)
    one, none = (gradients(model, of_documents(inputs, given)).table for given in (np.full(6, 3), None))
    pd.testing.assert_frame_equal(one, none, check_exact=True)


def test_groups_of_sequences() -> None:
    four = sequence_groups(40, 10, np.repeat(np.arange(4), 10))
    np.testing.assert_array_equal(four, np.repeat(np.arange(4), 10))
    # 7 to the first group, 3, 2 and 2 to the second, and the last one, of equals, to the first
    owners = np.repeat([0, 1, 2, 3, 4], [7, 1, 3, 2, 2])
    np.testing.assert_array_equal(sequence_groups(15, 2, owners), np.repeat([0, 0, 1, 1, 1], [7, 1, 3, 2, 2]))
    for given in (None, np.full(25, 3), np.arange(25)):
        np.testing.assert_array_equal(sequence_groups(25, 10, given), np.arange(25) % 10)
        assert sequence_groups(25, 0, given) is None
    assert sequence_groups(5, 1, np.arange(5)).tolist() == [0] * 5


def test_documents_are_left_out_whole_whichever_process_has_them(tmp_path: Path) -> None:
    """Of documents that the shares of two and of three processes cut."""
    train_run(tmp_path / "model", tiny(hidden_size=16, num_hidden_layers=1))
    texts = ["the stream is a depth of layer " * count for count in (9, 3, 2, 4)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given = [
        "analyze", tmp_path / "model", "--data", tmp_path / "texts.jsonl", "--tokens", 512, "--seq-len", 16,
        "--gradient-tokens", 512, "--depth-tokens", 0, "--no-ablations", "--device", "cpu", "--figures", "svg",
    ]  # fmt: skip
    jobs = [(count, [*map(str, given), "--out", str(tmp_path / str(count))]) for count in (1, 2, 3)]
    statuses, said = forked(jobs)
    assert statuses == [[0] * count for count, _ in jobs], said
    one, *others = (pd.read_csv(tmp_path / str(count) / "layers.csv") for count in (1, 2, 3))
    pooled = one["metric"] == "weight_gradient_norm_pooled"
    assert pooled.sum() > 10
    assert one["ci_high"][pooled].notna().all()
    document = json.loads((tmp_path / "1" / "report.json").read_text())
    assert document["corpus"]["documents"] == 4
    for other in others:
        pd.testing.assert_frame_equal(other[pooled], one[pooled], rtol=1e-5)


def by_sequence(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of each sequence's loss by the head's weight."""
    found = []
    for sequence in inputs:
        loss = nn.functional.cross_entropy(model(sequence[None])[0, :-1], sequence[1:])
        found.append(torch.autograd.grad(loss, model.head.weight)[0])
    return found


def of_documents(inputs: torch.Tensor, owners: np.ndarray | None) -> Corpus:
    return Corpus(inputs, owners, "ids", "0" * 64, "none")


def test_random_draws_are_keyed() -> None:
    model = build("gpt2")
    first, again, other = (gradients(model, IDS, cotangent="random", seed=seed).table for seed in (0, 0, 1))
    pd.testing.assert_frame_equal(first, again)
    assert not np.allclose(
        column(first, "gradient_norm_random")[0], column(other, "gradient_norm_random")[0], rtol=1e-6
    )


# --- models without a loss, and what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_without_a_head_only_random_gradients(name: str) -> None:
    model = build(name, headless=True)
    found = gradients(model, IDS)
    assert set(found.table["metric"]) == {
        "gradient_norm_random", "gradient_norm_random_median", "gradient_first_share_random"
    }  # fmt: skip
    assert any("no language-model head" in note for note in found.summary["notes"])
    assert found.summary["ratio"] is None
    assert found.summary["loss"] is None
    with pytest.raises(UsageError, match="no language-model head"):
        gradients(model, IDS, cotangent="loss")


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_torch_encoder_on_states(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, norm_first=norm_first, batch_first=False)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
    states = torch.randn(3, 7, 16)
    found = gradients(model, states)
    norms = column(found.table, "gradient_norm_random")
    assert len(norms) == 5
    assert norms[-1] == pytest.approx(1, rel=1e-5)
    assert found.summary["ratio_random"]["value"] == pytest.approx(norms[1], rel=1e-5)


class Adds(nn.Module):
    """x + tanh(Ax), in place if asked."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.map, self.in_place = nn.Linear(6, 6), in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.in_place:
            return x + self.map(x).tanh()
        x += self.map(x).tanh()
        return x


@pytest.mark.parametrize("memory", [1, 1 << 30])
def test_blocks_that_write_into_their_input(memory: int) -> None:
    """Even where autograd needs what is overwritten: the numbers are those of blocks that leave it alone."""
    tables = []
    for in_place in (False, True):
        model = Chain([])
        model.blocks = nn.ModuleList([Adds(in_place) for _ in range(3)])
        _, corpus, anatomy = prepare(model, ids(3, 9, vocab=20))
        assert anatomy.stream.copies_input == in_place
        tables.append(run_gradients(anatomy, corpus, GradientSettings(memory=memory)).table)
    pd.testing.assert_frame_equal(*tables, rtol=1e-5)


def test_what_has_no_derivative_is_an_error_in_one_line() -> None:
    model = Chain([1.0, 2.0])
    model.blocks = nn.ModuleList([Steps(1.0), Steps(2.0)])
    with pytest.raises(GradientError, match="cannot be differentiated"):
        gradients(model, ids(2, 9, vocab=20))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cotangent": "lose"}, "loss, random or both"),
        ({"skip_first": -1}, "skip-first"),
        ({"skip_first": 19}, "no position"),
        ({"seed": -1}, "seed"),
        ({"fresh": -1}, "fresh"),
    ],
)
def test_wrong_requests(options: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        gradients(build("gpt2"), IDS, **options)


# --- fresh initialisations -------------------------------------------------------------------------------------------


def test_fresh_models_are_seeded_and_of_the_same_configuration() -> None:
    model = small(n_layer=3)
    inputs = ids(2, 12, vocab=20)
    before = torch.get_rng_state()
    first, again, other = (gradients(model, inputs, fresh=1, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    pd.testing.assert_frame_equal(first.table, again.table)
    assert first.summary["fresh"] == [3]
    trained = gradients(model, inputs).table
    assert list(trained["unit"]) == list(first.table["unit"])
    assert not np.allclose(first.table["value"], other.table["value"])
    assert not np.allclose(first.table["value"], trained["value"])

    two = gradients(model, inputs, fresh=2, seed=3)
    loss = ~two.table["metric"].str.contains("random")  # the random vectors hang on the seed as well
    mean = (first.table["value"] + other.table["value"])[loss] / 2
    np.testing.assert_allclose(two.table["value"][loss], mean, rtol=1e-6)
    assert two.table["n"].eq(4).all()
    assert two.table["ci_low"].notna().all()
    # Student's t over two models: 12.7 standard errors, where a bootstrap ends at the two values
    logs = [np.log(one.summary["ratio"]["value"]) for one in (first, other)]
    reach = 12.7062 * abs(logs[0] - logs[1]) / 2
    ends = [two.summary["ratio"][name] for name in ("ci_low", "value", "ci_high")]
    np.testing.assert_allclose(np.log(ends), np.mean(logs) + np.array([-reach, 0, reach]), rtol=1e-5)
    spread = (first.table["value"] - other.table["value"])[loss].abs() / 2
    np.testing.assert_allclose(two.table["ci_high"][loss] - mean, 12.7062 * spread, rtol=1e-5, atol=1e-12)


def test_a_fresh_model_needs_a_configuration() -> None:
    with pytest.raises(UsageError, match="Chain"):
        gradients(Chain([1.0, 2.0]), ids(2, 9, vocab=20), fresh=1)


def test_post_ln_gradients_fall_towards_the_input_and_pre_ln_ones_do_not() -> None:
    """Xiong et al. 2020, at initialisation with Xavier's spread; 12 blocks of OPT, either way."""
    from transformers import OPTConfig, OPTForCausalLM

    falls = {}
    for pre in (True, False):
        torch.manual_seed(0)
        config = OPTConfig(
            vocab_size=96, hidden_size=32, ffn_dim=128, num_hidden_layers=12, num_attention_heads=2,
            max_position_embeddings=64, word_embed_proj_dim=32, do_layer_norm_before=pre, init_std=0.18, pad_token_id=0,
        )  # fmt: skip
        found = gradients(OPTForCausalLM(config).eval(), ids(2, 32), fresh=3)
        falls[pre] = found.summary["ratio_median"]
    assert falls[False]["ci_high"] < 0.5
    assert falls[True]["ci_low"] > 1

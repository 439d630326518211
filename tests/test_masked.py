"""Ablations of a masked language model: scored at a seeded 15 % of positions, masked."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

import depthprobe
from depthprobe.ablations.effects import Scored

VOCAB = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "[UNK]": 4} | {f"w{i}": i + 5 for i in range(59)}


@pytest.fixture(scope="module")
def model() -> depthprobe.Checkpoint:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(VOCAB, "[UNK]")), unk_token="[UNK]", **names
    )
    return depthprobe.load(BertForMaskedLM(config).eval(), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    inner = torch.randint(5, 64, (6, 38), generator=torch.Generator().manual_seed(1))
    return torch.cat([torch.full((6, 1), 1), inner, torch.full((6, 1), 2)], dim=1)


def test_effects_are_those_of_a_plain_masked_run(model: depthprobe.Checkpoint, ids: torch.Tensor) -> None:
    found = depthprobe.ablate(model, ["0 2"], ids, seed=3)
    scored, hidden = Scored.masked(ids, np.arange(6), (0, 1, 2, 3, 4), 3, seed=3)
    assert scored.positions.shape == (6, 6)
    assert bool((hidden.gather(1, scored.positions) == 3).all())
    assert int((hidden != ids).sum()) == 36

    bert, layers = model.model, model.model.bert.encoder.layer
    with torch.no_grad():
        whole = bert(input_ids=hidden).logits
        bert.bert.encoder.layer = torch.nn.ModuleList([layers[0], layers[2]])
        changed = bert(input_ids=hidden).logits
        bert.bert.encoder.layer = layers
    p, q = (
        t.gather(1, scored.positions[..., None].expand(-1, -1, 64)).double().log_softmax(-1) for t in (whole, changed)
    )
    targets = scored.targets[..., None]
    expected = {
        "kl": float((p.exp() * (p - q)).sum(-1).mean()),
        "delta_loss": float((p.gather(-1, targets) - q.gather(-1, targets)).mean()),
        "top1_agreement": float((p.argmax(-1) == q.argmax(-1)).double().mean()),
    }
    values = found.table.set_index("metric")["value"]
    for name, value in expected.items():
        assert values[name] == pytest.approx(value, abs=1e-5), name
    assert found.merging["base_loss"]["value"] == pytest.approx(float(-p.gather(-1, targets).mean()), abs=1e-5)
    assert any("15 %" in note for note in found.merging["notes"])


def test_special_tokens_are_never_masked_and_draws_are_keyed(ids: torch.Tensor) -> None:
    scored, _ = Scored.masked(ids, np.arange(6), (1, 2), 3, seed=0)
    assert int(scored.positions.min()) >= 1
    assert int(scored.positions.max()) <= 38
    later, _ = Scored.masked(ids[4:], np.array([4, 5]), (1, 2), 3, seed=0)
    assert torch.equal(later.positions, scored.positions[4:])


def test_without_a_mask_token_only_states_are_compared(model: depthprobe.Checkpoint, ids: torch.Tensor) -> None:
    found = depthprobe.ablate(model.model, ["0 2"], ids)
    assert set(found.table["metric"]) == {"state_distance"}
    assert "mask" in found.merging["notes"][0]

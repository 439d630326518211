"""What tells two models apart, and what must not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from depthprobe.fingerprint import digest, fingerprint

SIZES = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def llama(**changed: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **changed))


def test_threads_do_not_matter() -> None:
    """A sum of floats is taken by so many threads, and comes out otherwise with each number of them."""
    torch.manual_seed(0)
    model = nn.Linear(1 << 10, 1 << 11)
    with torch.no_grad():
        model.weight.mul_(torch.logspace(-12, 12, 1 << 10))
    before, found, sums = torch.get_num_threads(), set(), set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.add(fingerprint(model))
            sums.add(float(model.weight.detach().flatten().sum(dtype=torch.float64)))
    finally:
        torch.set_num_threads(before)
    assert len(sums) == 2, "the sum of floats does depend on them"
    assert len(found) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_one_weight_matters(dtype: torch.dtype) -> None:
    model = nn.Linear(999, 1001).to(dtype)
    before = fingerprint(model)
    with torch.no_grad():
        model.weight.view(-1)[123_457] = torch.nextafter(model.weight.view(-1)[123_457].float(), torch.tensor(9.0)) * 2
    assert fingerprint(model) != before


def test_buffers_of_every_kind() -> None:
    model = nn.Module()
    for name, values in (("a", torch.tensor([True, False])), ("b", torch.arange(5)), ("c", torch.ones(3).cfloat())):
        model.register_buffer(name, values)
    before = fingerprint(model)
    assert fingerprint(model) == before
    model.a[1] = True
    assert fingerprint(model) != before


def test_the_configuration_matters() -> None:
    """The same weights with another epsilon are another function."""
    assert fingerprint(llama()) == fingerprint(llama())
    assert fingerprint(llama()) != fingerprint(llama(rms_norm_eps=1e-3))
    assert fingerprint(llama()) != fingerprint(llama(hidden_act="gelu"))


def test_where_a_model_is_and_how_it_is_run_do_not(tmp_path: Path) -> None:
    model = llama()
    before = fingerprint(model)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    again.config.use_cache = not model.config.use_cache
    assert fingerprint(again) == before


def test_code_of_its_own_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, found = tmp_path / "modeling_own.py", []
    for line in ("scale = 1", "scale = 2"):
        source.write_text(line)
        theirs = ModuleType("transformers_modules.own.modeling_own")
        theirs.__file__ = str(source)
        monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        monkeypatch.setattr(type(model), "__module__", theirs.__name__)
        found.append(fingerprint(model))
        monkeypatch.undo()
    assert found[0] != found[1]


def test_sequences_of_every_kind() -> None:
    states = torch.randn(2, 3, 4)
    kinds = [states, states.bfloat16(), states.half(), torch.arange(6).view(2, 3), torch.arange(6).view(3, 2)]
    assert len({digest(values) for values in kinds}) == len(kinds)
    assert digest(states) == digest(states.clone())


def test_a_configuration_that_cannot_be_made_without_arguments() -> None:
    class Own(LlamaConfig):
        def to_diff_dict(self) -> dict[str, object]:
            raise TypeError("__init__() missing 1 required positional argument")

    found = [fingerprint(nn.Linear(3, 3))]
    for epsilon in (1e-6, 1e-3):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        model.config = Own(**SIZES, rms_norm_eps=epsilon)
        found.append(fingerprint(model))
    assert len(set(found)) == 3

"""Checkpoints that bring their own Python code: run only when that is allowed, and written with the code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as T
from families import build, ids
from typer.testing import CliRunner

from depthprobe import load
from depthprobe.cli import app
from depthprobe.errors import CheckpointError

CODE = """
from transformers import GPT2Config, GPT2LMHeadModel

class HomeConfig(GPT2Config):
    model_type = "home-made"

class HomeForCausalLM(GPT2LMHeadModel):
    config_class = HomeConfig
"""


@pytest.fixture
def home_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPT-2 whose class is known to nobody but its folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    home = tmp_path / "home"
    build("gpt2").save_pretrained(home)
    (home / "home.py").write_text(CODE)
    config = json.loads((home / "config.json").read_text())
    auto = {"AutoConfig": "home.HomeConfig", "AutoModelForCausalLM": "home.HomeForCausalLM"}
    config |= {"model_type": "home-made", "architectures": ["HomeForCausalLM"], "auto_map": auto}
    (home / "config.json").write_text(json.dumps(config))
    return home


def test_foreign_code_is_not_run_unasked(home_made: Path) -> None:
    (home_made / "home.py").write_text("raise SystemExit('the code ran')")
    with pytest.raises(CheckpointError, match=r"needs Python code that comes with it.*--trust-remote-code"):
        load(home_made)


def test_pruned_with_its_code(home_made: Path, tmp_path: Path) -> None:
    inputs, out = ids(4, 16), tmp_path / "pruned"
    np.save(tmp_path / "ids.npy", inputs.numpy())
    command = ["prune", str(home_made), "--schedule", "0 2", "--data", str(tmp_path / "ids.npy"), "--out", str(out)]
    refused = CliRunner().invoke(app, command)
    assert "--trust-remote-code" in str(refused.exception)
    assert not out.exists()
    done = CliRunner().invoke(app, [*command, "--trust-remote-code"])
    assert done.exit_code == 0, done.output
    assert (out / "home.py").read_text() == CODE
    pruned = T.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    whole = load(home_made, trust_remote_code=True, device="cpu").model
    assert type(pruned).__name__ == type(whole).__name__ == "HomeForCausalLM"
    del whole.transformer.h[1]
    whole.config.n_layer = 2
    with torch.no_grad():
        found, expected = (model(input_ids=inputs, use_cache=False).logits for model in (pruned, whole))
    assert torch.allclose(found, expected, atol=1e-5)

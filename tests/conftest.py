"""What every test file shares: the weights of real models, loaded once, and one thread for tiny matrices."""

from __future__ import annotations

import pytest
import torch
from families import MINILM, SMOLLM2

from depthprobe import Checkpoint, load

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    if not SMOLLM2.exists():
        pytest.skip("no SmolLM2: `make weights` fetches it")
    return load(SMOLLM2, device="cpu")


@pytest.fixture(scope="session")
def minilm() -> Checkpoint:
    if not MINILM.exists():
        pytest.skip("no MiniLM: `make weights` fetches it")
    return load(MINILM, device="cpu")

"""A random initialisation of a checkpoint's own configuration, to compare the trained model with."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from depthprobe.checkpoint import Checkpoint, move
from depthprobe.errors import CheckpointError, UsageError
from depthprobe.formats import first_line, undisturbed
from depthprobe.placement import size_in_words

__all__ = ["fresh_twin"]


def fresh_twin(checkpoint: Checkpoint, seed: int, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """A model of the same class and configuration with random weights, in eval mode, on the same device.

    The initialisation is the one that transformers has for the architecture, with the configuration's own spread:
    not always the one that the checkpoint was trained from. The global random state stays as it is.

    Args:
        checkpoint: whose configuration to take.
        seed: of the weights, which are drawn in float32.
        dtype: of the weights.

    Raises:
        UsageError: the model is none of transformers', so that nothing says how to initialise it.
        CheckpointError: its class cannot be built from its configuration.
    """
    model: Any = checkpoint.model
    if not checkpoint.is_hf:
        raise UsageError(
            f"nothing says how {checkpoint.architecture} is initialised",
            "a model of transformers",
            "initialise it yourself and pass the module from Python",
        )
    _check_room(checkpoint)
    before = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach the generators of GPUs too
        with undisturbed(local=True):
            attention = getattr(model.config, "_attn_implementation", None)
            keywords = {"attn_implementation": attention} if attention else {}
            twin = type(model)._from_config(copy.deepcopy(model.config), dtype=torch.float32, **keywords)
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint.architecture} cannot be built from its configuration: {first_line(error)}"
        ) from error
    finally:
        torch.set_rng_state(before)
    move(twin, dtype, checkpoint.device, checkpoint.architecture)
    twin.eval()
    note = f"a random initialisation of the configuration of {checkpoint.source}, seed {seed}"
    # its weights are all in memory, whatever was done with those of the checkpoint
    return replace(checkpoint, model=twin, name=f"{checkpoint.name}-fresh", notes=(note,), offload=None)


def _check_room(checkpoint: Checkpoint) -> None:
    """Whether a second model may stand beside the first one.

    Raises:
        UsageError: a limit of the process leaves too little.
    """
    offload = checkpoint.offload
    size = 4 * sum(parameter.numel() for parameter in checkpoint.model.parameters())  # it is made in float32
    if offload is not None and size > offload.room:
        raise UsageError(
            f"a random twin takes {size_in_words(size)} beside the model, and --max-memory leaves "
            f"{size_in_words(offload.room)}",
            "room for both",
        )

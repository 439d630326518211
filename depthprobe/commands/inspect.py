"""`depthprobe inspect`."""

from __future__ import annotations

from depthprobe.commands.options import (
    Debug,
    Device,
    DeviceMap,
    Dtype,
    MaxMemory,
    OffloadFolder,
    Revision,
    Spec,
    Tokenizer,
    Trust,
)


def inspect(
    checkpoint: Spec,
    dtype: Dtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    revision: Revision = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: Trust = False,
    debug: Debug = False,
) -> None:
    """Print what was found in a checkpoint: its blocks, where each norm sits, and how well that reproduces the model.

    Seconds, on a few random tokens; nothing is written. Exit status 1 if the blocks do not give the model's own output.
    """
    from depthprobe.analysis import inspect as look
    from depthprobe.report.screen import show_anatomy

    found = look(
        checkpoint,
        dtype=dtype,
        device=device,
        device_map=device_map,
        max_memory=max_memory,
        offload_folder=offload_folder,
        revision=revision,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
    )
    show_anatomy(found)

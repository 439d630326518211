"""Where a model's weights go, and how much of the memory that the user allows is left for them.

The placing itself is transformers' and accelerate's.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from depthprobe.errors import CheckpointError, UsageError
from depthprobe.processes import announced, count

__all__ = ["MAPS", "Placing", "bfloat16_instructions", "device_named", "dtype_named", "size_in_words", "unmapped"]

MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
GROWTH = 96 << 20  # bytes that libraries take once they run, beyond what they take when a model is opened
LEAST = 24 << 20  # bytes that weights, and states and activations, need each
_MMAP_THRESHOLD = -3  # of mallopt
# What a run imports later takes as much as a small model: accelerate's hooks the first, tables and statistics the rest
_LATER = ("torch._dynamo", "pandas", "scipy.stats", "sklearn.cluster", "sklearn.metrics")
SUMS = 240  # bytes times the squared width that CKA and linearity take: four sums in ten groups, and states


@dataclass(frozen=True)
class Placing:
    """What the user asked for; see `load`.

    Attributes:
        device_map: one of `MAPS`, or module → device.
        max_memory: device → bytes that this process may take there; None for what is free.
        offload_folder: for weights that have to be written anew to be fetched one by one.
    """

    device_map: str | dict[str, Any]
    max_memory: dict[int | str, int] | None = None
    offload_folder: str | None = None

    @classmethod
    def of(cls, device_map: Any, max_memory: Any, offload_folder: Any) -> Placing | None:
        """From what `load` or the command line was given; None where that is nothing.

        Raises:
            UsageError: what is no map, no device or no size; a map of modules and a limit of memory.
            CheckpointError: accelerate is not installed.
        """
        if device_map is None and max_memory is None and offload_folder is None:
            return None
        if count() > 1:
            raise UsageError(
                f"--device-map, --max-memory or --offload-folder with {count()} processes",
                "one of the two: a model over several devices, or sequences over several processes",
            )
        if find_spec("accelerate") is None:
            raise CheckpointError(
                "weights cannot be placed without the package accelerate", fix='pip install "depthprobe[offload]"'
            )
        chosen, limits = _map("auto" if device_map is None else device_map), _limits(max_memory)
        if limits is not None and not isinstance(chosen, str):
            raise UsageError("a map of modules to devices leaves nothing to place by --max-memory", "one of the two")
        return cls(chosen, limits, None if offload_folder is None else str(offload_folder))

    def arguments(
        self, factory: Any, config: Any, dtype: torch.dtype | None, trust_remote_code: bool
    ) -> tuple[dict[str, Any], int | None]:
        """What `from_pretrained` is told, and the bytes that are left for states and activations (None: unlimited).

        A limit is that of the whole process. So what the process takes now, the two largest blocks and room for states
        and activations are subtracted before weights are placed: the rest is shared equally, unless the weights need
        less or the sums of the kept states more. (accelerate subtracts the largest block itself.)

        Args:
            factory: transformers' auto class of the model.
            config: its configuration.
            dtype: of the weights, None for the checkpoint's.
            trust_remote_code: run Python code that comes with the checkpoint.

        Raises:
            CheckpointError: the limit leaves room for nothing.
        """
        asked = {"device_map": self.device_map, "offload_folder": self.offload_folder}
        if self.max_memory is None:
            return asked, None
        for name in _LATER:
            import_module(name)
        from accelerate.utils import calculate_maximum_sizes

        main = next((name for name in self.max_memory if name not in ("cpu", "disk")), "cpu")
        if main == "cpu":
            _give_back()
        with torch.device("meta"):
            kept = dtype or getattr(config, "dtype", None) or torch.float32
            empty = factory.from_config(config, dtype=kept, trust_remote_code=trust_remote_code)
        total, (largest, _) = calculate_maximum_sizes(empty)
        limit, taken = self.max_memory[main], _taken(main)
        rest = limit - taken - 2 * largest
        if rest < 2 * LEAST:
            needed = size_in_words(taken + 2 * largest + 2 * LEAST)
            raise CheckpointError(
                f"--max-memory {main}={size_in_words(limit)} is less than this process takes as it is "
                f"({size_in_words(taken)}), two of the model's largest blocks or tables ({size_in_words(2 * largest)}) "
                "and room to work",
                f"at least {needed}",
            )
        # What is taken of the kept states in the end takes sums of squares, when no block is there any more.
        width = getattr(config.get_text_config(), "hidden_size", 0)
        sums = min(SUMS * width**2 - 2 * largest, rest - LEAST)
        room = max(rest // 2, rest - total, sums)
        limits = {**self.max_memory, main: rest - room + largest}
        for gpu in limits.keys() - {main, "cpu", "disk"}:  # states pass through every GPU
            limits[gpu] = max(0, limits[gpu] - min(room, limits[gpu] // 2))
        if "cpu" in limits and main != "cpu":
            limits["cpu"] = max(0, limits["cpu"] - _taken("cpu"))
        return {**asked, "max_memory": limits}, room


def dtype_named(name: str | torch.dtype) -> torch.dtype | None:
    """The dtype of that name, None for "auto".

    Raises:
        UsageError: there is none of that name.
    """
    if name == "auto":
        return None
    known = name if isinstance(name, torch.dtype) else _DTYPES.get(str(name).removeprefix("torch."))
    if known not in _DTYPES.values():
        raise UsageError(f"dtype {str(name)!r}", f"auto, {', '.join(_DTYPES)}")
    return known


def bfloat16_instructions() -> list[str]:
    """This CPU's own instructions for products of bfloat16, as far as torch tells."""
    # Later versions of torch may have other names.
    tests = {"AVX512-BF16": "_is_avx512_bf16_supported", "AMX": "_is_amx_tile_supported"}
    return [name for name, test in tests.items() if getattr(torch.cpu, test, bool)()]


def device_named(name: str | torch.device) -> torch.device:
    """The device of that name; "auto" is the first of cuda, mps and cpu that is there.

    Of several processes that torchrun started on a machine each has a GPU of its own, if there are as many.

    Raises:
        UsageError: there is none of that name, or not on this machine.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if cuda else "mps" if mps else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device {str(name)!r}", "auto, cpu, cuda, cuda:N or mps") from error
    if cuda and device.type == "cuda" and device.index is None and announced()[1] > 1:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)  # kernels that ask for the current one, as Triton's do
    there = {"cpu": 1, "cuda": torch.cuda.device_count() if cuda else 0, "mps": int(mps)}
    if (device.index or 0) >= there.get(device.type, 0):
        raise UsageError(f"device {str(name)!r} is not on this machine", "auto or cpu", "torch sees no such GPU")
    return device


def size_in_words(size: float) -> str:
    """Bytes as people write them: `2.5 GiB`."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.3g} {unit}"
    return f"{size:.0f} bytes"


def _map(given: Any) -> str | dict[str, Any]:
    if isinstance(given, str) and given not in MAPS:
        try:
            given = json.loads(given)
        except ValueError:
            given = None
    if isinstance(given, Mapping) and given:
        return dict(given)
    if isinstance(given, str):
        return given
    raise UsageError("that --device-map is none", f"{', '.join(MAPS)}, or module → device as JSON")


def _limits(given: Any) -> dict[int | str, int] | None:
    """Device → bytes, from a mapping or from `0=20GiB,cpu=3GiB`."""
    if given is None:
        return None
    from accelerate.utils import convert_file_size_to_int

    expected = "device=size, such as 0=20GiB,cpu=3GiB"
    if isinstance(given, str):
        pairs = [part.partition("=") for part in given.split(",")]
        given = {name.strip(): size.strip() for name, _, size in pairs}
    found: dict[int | str, int] = {}
    for name, size in dict(given).items():
        device = int(name) if str(name).isdecimal() else name
        try:
            found[device] = int(convert_file_size_to_int(size))
        except (ValueError, TypeError, AttributeError):
            raise UsageError(f"--max-memory {name}={size}", expected) from None
        if not isinstance(device, int) and device not in ("cpu", "mps"):
            raise UsageError(f"--max-memory names {device!r}", "cpu, mps, or the number of a GPU")
        if found[device] < 1:
            raise UsageError(f"--max-memory {name}={size}", "more than 0")
    if not found:
        raise UsageError("--max-memory is empty", expected)
    return found


def _give_back() -> None:
    """Have memory that is freed given back to the system, now and later at once, where the C library can be told so.

    Otherwise glibc keeps blocks of up to 32 MiB for later, which count as taken.
    """
    with suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, 1 << 20)
        library.malloc_trim(0)


def _taken(device: int | str) -> int:
    """Bytes that this process takes on a device now; of memory with what libraries will take."""
    if device == "cpu":
        import psutil

        return int(psutil.Process().memory_info().rss) + GROWTH
    return int(torch.cuda.memory_allocated(device)) if isinstance(device, int) else 0


@contextmanager
def unmapped() -> Iterator[None]:
    """Let transformers read the weights that it opens instead of mapping their files into memory.

    All pages of a map that were touched count as this process's memory until the last weight is in, and each weight
    that is converted is touched whole.
    """
    from transformers import modeling_utils

    before = modeling_utils.safe_open

    def read(file: Any, **options: Any) -> Any:
        return before(file, **{**options, "backend": "pread"} if "backend" in options else options)

    modeling_utils.safe_open = read
    try:
        yield
    finally:
        modeling_utils.safe_open = before

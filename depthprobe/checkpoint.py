"""A string, a path or a module → a model that is ready to run, with what the later stages need to know about it."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import transformers
from torch import nn

from depthprobe.conversions import open_gguf, open_nanogpt
from depthprobe.errors import CheckpointError, UsageError
from depthprobe.formats import (
    Objective,
    Opened,
    Options,
    objective_of,
    open_pretrained,
    read_tokenizer,
    refuse_unsupported,
    undisturbed,
)
from depthprobe.offload import Offload
from depthprobe.placement import Placing, device_named, dtype_named, size_in_words

__all__ = ["Checkpoint", "Inputs", "Objective", "load"]

Inputs = Literal["ids", "states"]

_PICKLES = (".pt", ".pth")
_FILES = (".gguf", *_PICKLES, ".bin", ".safetensors")
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model in eval mode, and what is known about it.

    Attributes:
        model: the module, on its device; `requires_grad` is as it was.
        tokenizer: a transformers tokenizer, or None.
        name: a short name for titles, safe as a file name.
        source: what the user gave.
        format: "hub", "directory", "gguf", "nanogpt" or "module".
        revision: the commit of a hub checkpoint where it is known, else what was asked for, else None.
        inputs: what the forward takes: token ids `[batch, tokens]` or float states `[batch, tokens, width]`.
        objective: what the head predicts, "causal" (the next token) or "masked"; None without such a head.
        vocab_size: the number of ids that the embedding takes, None for states.
        max_positions: the longest sequence in tokens, None where there is no limit or none is known.
        notes: plain sentences for the report.
        offload: fetches weights where they do not fit; None where all are in memory and nothing limits it.
    """

    model: nn.Module
    tokenizer: Any | None
    name: str
    source: str
    format: str
    revision: str | None
    inputs: Inputs
    objective: Objective | None
    vocab_size: int | None
    max_positions: int | None
    notes: tuple[str, ...]
    offload: Offload | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The floating dtype that most parameters have; float32 without any."""
        sizes: Counter[torch.dtype] = Counter()
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                sizes[parameter.dtype] += parameter.numel()
        return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else torch.float32

    @property
    def device(self) -> torch.device:
        """Where the input goes: the device of the first parameter that is loaded."""
        devices = (parameter.device for parameter in self.model.parameters())
        return next((device for device in devices if device.type != "meta"), torch.device("cpu"))

    @property
    def parameters(self) -> int:
        """The number of parameters, tied ones counted once."""
        return self.offload.parameters if self.offload else sum(p.numel() for p in self.model.parameters())

    @property
    def in_memory(self) -> bool:
        """Whether no weight has to be fetched."""
        return self.offload is None or not self.offload.any

    def outside(self) -> AbstractContextManager[None]:
        """A context in which the weights outside of the blocks are there, wherever they are kept."""
        return self.offload.outside() if self.offload else nullcontext()

    @property
    def architecture(self) -> str:
        """The class of the model."""
        return type(self.model).__name__

    @property
    def is_hf(self) -> bool:
        """Whether it is a transformers model."""
        return isinstance(self.model, transformers.PreTrainedModel)


def load(
    spec: str | Path | nn.Module | Checkpoint,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: Any | None = None,
    attn_implementation: str | None = None,
    inputs: Inputs | None = None,
    objective: Objective | Literal["auto"] | None = "auto",
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: str | Mapping[Any, Any] | None = None,
    offload_folder: str | Path | None = None,
) -> Checkpoint:
    """Open a checkpoint.

    Args:
        spec: a hub id, `id@revision`, a directory in transformers' format (safetensors or `pytorch_model.bin`, whole
            or sharded), a `.gguf` file, nanoGPT's `ckpt.pt`, or a module. A local path never asks the network for
            anything. A module is used as it is, not copied, and put into eval mode; its dtype and device change only
            if they are given here.
        dtype: "float32", "bfloat16" or "float16"; "auto" keeps the checkpoint's (float32 for a gguf).
        device: "cpu", "cuda", "mps" or the like; "auto" takes the first of cuda, mps and cpu that is there.
        revision: branch, tag or commit of a hub checkpoint.
        trust_remote_code: run Python code that comes with the checkpoint.
        tokenizer: a tokenizer, or where to find one, instead of the checkpoint's own.
        attn_implementation: transformers' name of an attention kernel, such as "eager" or "sdpa".
        inputs: "ids" or "states". By default states for `nn.TransformerEncoder` and for modules without an
            `nn.Embedding`, ids for all others.
        objective: "causal", "masked" or None for no language-model head; "auto" concludes it. It stays None for
            modules that are not of transformers.
        device_map: "auto", "balanced", "balanced_low_0", "sequential" or module → device, as in transformers: where
            the weights of a hub id or a directory go. Those that do not fit are fetched while blocks run.
        max_memory: what this process may take, such as `{0: "20GiB", "cpu": "60GiB"}` or "0=20GiB,cpu=60GiB". Weights
            get what states and activations leave. A device that is not named is not used, but for the disk.
        offload_folder: for weights on disk that have to be written anew; safetensors are read where they are.

    Raises:
        UsageError: an argument makes no sense here.
        CheckpointError: the checkpoint cannot be found, read or trusted.
    """
    wanted, placing = dtype_named(dtype), Placing.of(device_map, max_memory, offload_folder)
    if placing is not None and device != "auto":
        raise UsageError(f"--device {device} was asked for beside a map of devices", fix="leave one of the two out")
    if inputs not in (None, *get_args(Inputs)):
        raise UsageError(f"inputs={inputs!r}", "ids or states")
    if objective not in ("auto", None, *get_args(Objective)):
        raise UsageError(f"objective={objective!r}", "auto, causal, masked or None")
    if isinstance(spec, Checkpoint | nn.Module):
        if revision or attn_implementation:
            raise UsageError("a revision or an attention kernel was asked for a model that is already in memory")
        if placing is not None:
            raise UsageError("a map of devices was asked for a model that is already in memory", "a hub id or a path")
        if isinstance(spec, Checkpoint):
            checkpoint = spec
            checkpoint.model.eval()
        else:
            checkpoint = _wrap(spec)
        move(checkpoint.model, wanted, None if device == "auto" else device_named(device), checkpoint.source)
        changes: dict[str, Any] = {} if objective == "auto" else {"objective": objective}
    else:
        place = device_named(device)
        options = Options(wanted, revision, trust_remote_code, attn_implementation, objective, placing)
        checkpoint = _open(spec, options)
        if placing is None and place != checkpoint.device:
            move(checkpoint.model, None, place, checkpoint.source)
        changes = {}
    if inputs is not None:
        changes |= {"inputs": inputs, "vocab_size": None if inputs == "states" else _vocabulary(checkpoint.model)}
    if tokenizer is not None:
        changes["tokenizer"] = _tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    return dataclasses.replace(checkpoint, **changes)


def _open(spec: str | Path, options: Options) -> Checkpoint:
    """The checkpoint that a string or a path stands for."""
    text = str(spec)
    if not text.strip():
        raise UsageError("the checkpoint is an empty string", "a hub id, a directory or a file")
    path = Path(text).expanduser()
    if path.exists() or isinstance(spec, Path) or _looks_like_path(text):
        if options.revision is not None:
            raise UsageError(f"a revision was asked for the local path {text}", "a hub id", "leave the revision out")
        name, kind, opened = _open_path(path, options)
    else:
        repository, options = _hub_id(text, options)
        name, kind, opened = repository.split("/")[-1], "hub", open_pretrained(repository, options, local=False)
    return _describe(opened, name=name, source=text, kind=kind)


def _open_path(path: Path, options: Options) -> tuple[str, str, Opened]:
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory", fix="check the path; a hub id looks like org/name")
    path = path.resolve()
    if path.is_dir():
        return path.name, "directory", open_pretrained(str(path), options, local=True)
    if options.placing is not None:
        raise UsageError(f"a map of devices was asked for {path.name}", "a checkpoint in transformers' format")
    if path.suffix == ".gguf":
        return path.stem, "gguf", open_gguf(path, options)
    if path.suffix in _PICKLES:
        return path.parent.name if path.stem == "ckpt" else path.stem, "nanogpt", open_nanogpt(path, options)
    fix = f"give its directory: {path.parent}" if (path.parent / "config.json").exists() else None
    raise CheckpointError(f"{path} is not a checkpoint by its name", "a directory, a .gguf or nanoGPT's .pt", fix)


def _looks_like_path(text: str) -> bool:
    return (
        text.startswith((".", "/", "~"))
        or text.endswith("/")
        or text.partition("@")[0].count("/") > 1  # a revision may have some: refs/pr/3
        or "\\" in text
        or text.endswith(_FILES)
    )


def _hub_id(text: str, options: Options) -> tuple[str, Options]:
    """A hub id without its `@revision`, which goes into the options."""
    repository, at, revision = text.partition("@")
    if at and not revision:
        raise UsageError(f"{text!r} has an empty revision", "id@revision")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", repository):
        raise UsageError(f"{text!r} is neither a path that exists nor a hub id", "org/name or org/name@revision")
    if at and options.revision not in (None, revision):
        raise UsageError(f"{text!r} names a revision, and --revision {options.revision} another", fix="drop one")
    return repository, dataclasses.replace(options, revision=revision) if at else options


def _wrap(module: nn.Module) -> Checkpoint:
    """A module from Python, as it is but in eval mode."""
    notes = ["the module was given from Python and used as it is, in eval mode"]
    while (inner := _inside(module)) is not None:
        notes.append(f"unwrapped from {type(module).__name__}")
        module = inner
    kind, objective = type(module), None
    source = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(module, transformers.PreTrainedModel):
        refuse_unsupported(module.config, source)
        objective = objective_of(kind.__name__, module.config)
    if not any(True for _ in module.parameters()):
        raise CheckpointError(f"{source} has no parameters", "a trained transformer")
    name = Path(str(getattr(module, "name_or_path", "") or kind.__name__)).name
    opened = Opened(module.eval(), None, objective, None, tuple(notes))
    return _describe(opened, name=name, source=source, kind="module")


def _inside(module: nn.Module) -> nn.Module | None:
    """The module that torch.compile or data parallelism wraps; None for any other."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return module.module
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def _describe(opened: Opened, *, name: str, source: str, kind: str) -> Checkpoint:
    model = opened.model
    main_input = getattr(model, "main_input_name", "input_ids")
    if isinstance(model, transformers.PreTrainedModel) and main_input != "input_ids":
        raise CheckpointError(f"{source} takes {main_input}", "a model that takes token ids")
    states = isinstance(model, nn.TransformerEncoder) or not any(isinstance(m, nn.Embedding) for m in model.modules())
    is_hf = isinstance(model, transformers.PreTrainedModel)
    inputs: Inputs = "states" if states and not is_hf else "ids"
    offload, remarks = Offload.of(model, opened.room), getattr(getattr(model, "config", None), "lab_remarks", ())
    if offload is not None:
        where = ", ".join(f"{size_in_words(size)} {place}" for place, size in sorted(offload.places.items()))
        remarks = (*remarks, f"weights are placed: {where}")
    return Checkpoint(
        model=model.eval(),
        tokenizer=opened.tokenizer,
        name=re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model",
        source=source,
        format=kind,
        revision=opened.revision,
        inputs=inputs,
        objective=opened.objective,
        vocab_size=_vocabulary(model) if inputs == "ids" else None,
        max_positions=_max_positions(model),
        notes=(*opened.notes, *remarks),
        offload=offload,
    )


def _vocabulary(model: nn.Module) -> int | None:
    """The rows of the input embedding: of a plain module, its first `nn.Embedding` that is not one of positions."""
    if isinstance(model, transformers.PreTrainedModel):
        try:
            rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
        except NotImplementedError:
            rows = None
        return rows or getattr(model.config.get_text_config(), "vocab_size", None)
    tables = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    return next((table.num_embeddings for name, table in tables if not re.search("pos|wpe", name)), None)


def _max_positions(model: nn.Module) -> int | None:
    """The longest sequence that a transformers model takes, in tokens."""
    if not isinstance(model, transformers.PreTrainedModel):
        return None
    for name, module in model.named_modules():
        # RoBERTa and its kin count positions from padding_idx + 1.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    config = model.config.get_text_config()
    if getattr(config, "alibi", False):  # Falcon's ALiBi has no limit; MPT's is bounded by max_seq_len
        return None
    lengths = (getattr(config, name, None) for name in _LENGTHS)
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)


def _tokenizer(source: str | Path) -> Any:
    """The tokenizer of another directory or hub id."""
    path = Path(source).expanduser()
    local = path.exists()
    with undisturbed(local):
        tokenizer, notes = read_tokenizer(str(path if local else source), local_files_only=local)
    if tokenizer is None:
        why = f": {notes[0]}" if notes else ""
        raise CheckpointError(f"no tokenizer in {source}{why}", "a directory or a hub id with a tokenizer")
    return tokenizer


def move(model: nn.Module, dtype: torch.dtype | None, device: torch.device | None, source: str) -> None:
    """Cast and move a module; raises CheckpointError where that cannot be done."""
    if dtype is None and device is None:
        return
    try:  # as loading does: what is computed and in no file, such as rotary frequencies, keeps its precision
        exact = [] if dtype is None else [
            (module, name, getattr(module, name)) for module in model.modules()
            for name in module._non_persistent_buffers_set if getattr(module, name) is not None
        ]  # fmt: skip
        model.to(device=device, dtype=dtype)
        for module, name, values in exact:
            setattr(module, name, values.to(device=device))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(f"{source} cannot be moved to {device or dtype}: {reason}") from error

"""`depthprobe prune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from depthprobe.commands.options import (
    Bos,
    Data,
    Debug,
    Device,
    DeviceMap,
    Dtype,
    MaxMemory,
    OffloadFolder,
    Revision,
    Seed,
    SeqLen,
    Spec,
    TextField,
    Threads,
    Tokenizer,
    Tokens,
    Trust,
    preparation,
)
from depthprobe.errors import OutputError, UsageError


def prune(
    checkpoint: Spec,
    out: Annotated[Path, typer.Option(help="Folder for the new checkpoint; must not exist.", show_default=False)],
    schedule: Annotated[
        str | None,
        typer.Option(help="The blocks to keep, in order, such as '0-7 9-29'.", show_default=False),
    ] = None,
    drop: Annotated[
        int | None,
        typer.Option(
            help="Drop so many blocks instead, one by one, each time the one that costs least.", show_default=False
        ),
    ] = None,
    score_positions: Annotated[float, typer.Option(help="Share of the positions that is scored.")] = 0.25,
    data: Data = None,
    tokens: Tokens = 2048,
    seq_len: SeqLen = None,
    bos: Bos = "auto",
    text_field: TextField = "text",
    seed: Seed = 0,
    threads: Threads = None,
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
    """Write a checkpoint with blocks dropped, reordered or repeated, and prove that it gives the schedule's output.

    With --drop, blocks are chosen greedily on one half of the text and compared, on the other half, with those that
    block influence and angular distance would choose. Time and size of before and after stand beside the loss.

    Example: `depthprobe prune gpt2 --drop 2 --out gpt2-10-blocks`
    """
    given = preparation(locals())
    if (schedule is None) == (drop is None):
        raise UsageError("prune needs to know which blocks go", "either --schedule or --drop")

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(f"{out} is there already", "a new or empty folder", "choose another --out")

    from depthprobe.ablations.pruning import choose_drops, layer_ranges, order_of, timed_forwards, write_pruned
    from depthprobe.ablations.run import SweepSettings, sweep
    from depthprobe.ablations.schedule import parse, skip
    from depthprobe.checkpoint import load
    from depthprobe.corpus import halves
    from depthprobe.offload import refuse_offloaded
    from depthprobe.prepare import prepare
    from depthprobe.progress import Bar, say
    from depthprobe.report.words import FEW, plural

    settings = SweepSettings(score_positions, seed)
    settings.check()
    chosen = None if schedule is None else parse(schedule)
    if chosen is not None:
        order_of(chosen)
    say(f"Loading {checkpoint}")
    model, corpus, anatomy = prepare(checkpoint, data, **given)
    refuse_offloaded(model.offload, "a checkpoint with other blocks was asked for")
    if chosen is None:
        assert drop is not None
        with Bar("Choosing", drop + 1, "steps") as progress:
            choices = choose_drops(anatomy, corpus, drop, settings, progress)
        print("On the half of the text that did not choose:")
        for choice in choices:
            blocks = ", ".join(map(str, choice.blocks))
            print(f"  {choice.name:<17} drops {blocks}: KL {choice.kl:.3f}, loss {choice.delta_loss:+.3f} nats")
        chosen = skip(len(anatomy.stream), choices[0].blocks)
        scoring = int((~halves(corpus)).sum())
        best = min(choices, key=lambda choice: choice.kl)
        if best.kl < choices[0].kl:
            print(f"  {best.name} costs less there; {choices[0].name} is written, --schedule writes another choice")
        if scoring < FEW:
            print(f"  that half has {scoring} sequence{plural(scoring)}: below {FEW}, small differences are chance")
    inputs = corpus.inputs[:2].to(model.device)
    difference = write_pruned(anatomy, chosen, out, inputs, model.source, trust_remote_code)
    pruned = load(out, device=str(model.device), trust_remote_code=trust_remote_code)
    before, after = timed_forwards([model.model, pruned.model], inputs)
    print(f"{out}: blocks {chosen}; output differs from the schedule's by {difference:.1e}")
    if anatomy.objective == "causal" and anatomy.reads_positions_apart:
        swept = sweep(anatomy, corpus, [chosen], settings)
        assert swept.base_loss is not None
        loss, change = swept.base_loss.mean(), swept.effects["delta_loss"].mean()
        print(f"  on all {corpus.sequences} sequences of the text:")
        print(f"  loss        {loss:.3f} → {loss + change:.3f} nats a token, KL {swept.effects['kl'].mean():.3f}")
    print(f"  forward     {before * 1e3:.0f} → {after * 1e3:.0f} ms for {inputs.shape[0]} × {inputs.shape[1]} tokens")
    print(f"  parameters  {model.parameters:,} → {pruned.parameters:,}")
    weights = (sum(p.numel() * p.element_size() for p in m.model.parameters()) / 2**20 for m in (model, pruned))
    print("  weights     {:.1f} → {:.1f} MiB of memory".format(*weights))
    ranges = ", ".join(f"[{start}, {stop}]" for start, stop in layer_ranges(order_of(chosen)))
    print(f"  mergekit    layer_range: {ranges}")

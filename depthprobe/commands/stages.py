"""`depthprobe stages`."""

from __future__ import annotations

from typing import Annotated

import typer

from depthprobe.commands.existing import folder_of
from depthprobe.commands.options import (
    BatchSize,
    Bos,
    Data,
    Debug,
    Device,
    DeviceMap,
    Dtype,
    MaxMemory,
    OffloadFolder,
    Out,
    Revision,
    Seed,
    SeqLen,
    Spec,
    TextField,
    Threads,
    Tokenizer,
    Tokens,
    Trust,
    batch_number,
    preparation,
)


def stages(
    checkpoint: Spec,
    limit: Annotated[int, typer.Option(help="Stop at so many stages; where so few will do, D(κ) is a bound.")] = 1,
    combine: Annotated[
        str, typer.Option(help="How merged blocks run: sum, mean, attention-first, branch-sum; auto fits the norms.")
    ] = "auto",
    score_positions: Annotated[float, typer.Option(help="Share of the positions that is scored.")] = 0.25,
    out: Out = None,
    data: Data = None,
    tokens: Tokens = 2048,
    seq_len: SeqLen = None,
    bos: Bos = "auto",
    text_field: TextField = "text",
    batch_size: BatchSize = "auto",
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
    """Count how few sequential stages a language model needs.

    Step by step, two neighbouring stages are merged or a block is dropped, whichever costs least on one half of the
    sequences; the other half, of other documents where there are several, scores what was chosen. The curve of stages
    against cost goes to stages.csv, with the schedule at each point; D(κ) is the fewest stages whose KL from the whole
    model is at most κ of the KL to the corpus's unigram.

    Example: `depthprobe stages gpt2 --tokens 4096`
    """
    given = preparation(locals())
    from depthprobe.report.files import check_writable

    size = batch_number(batch_size)
    if out is not None:
        check_writable(out)

    from depthprobe.ablations.curve import save_staging, show_staging
    from depthprobe.ablations.run import SweepSettings
    from depthprobe.ablations.staging import find_stages
    from depthprobe.prepare import prepare
    from depthprobe.progress import Bar, say

    settings = SweepSettings(score_positions, seed, size)
    settings.check()
    say(f"Loading {checkpoint}")
    model, corpus, anatomy = prepare(checkpoint, data, **given)
    target = folder_of(model, out)
    check_writable(target)
    with Bar("Searching", len(anatomy.stream) - limit + 1, "steps") as progress:
        found = find_stages(
            anatomy,
            corpus,
            combine=combine,
            limit=limit,
            settings=settings,
            progress=progress,
        )
    path = save_staging(found, target)
    show_staging(found)
    print(f"Curve: {path}")

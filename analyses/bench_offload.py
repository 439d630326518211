"""A model that does not fit: peak memory of measuring and sweeping it, and the same numbers as in memory.

    python analyses/bench_offload.py [--max-memory cpu=3GiB] [--tokens 128] [--blocks 24 --width 2048 …] [--work DIR]

Makes a random Llama of about 1.6 billion parameters (6.4 GB in float32; 16 GB of memory are needed for the run in
memory), then runs `analyze` and the default sweep of `ablate` on it, each in a process of its own: with the weights in
memory, and within the limit. Peak resident memory is what the system says of the process when it has ended.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

VERBS = ("analyze", "ablate")
# In a process of its own: what Linux says of a child counts what it was before it became another program
LAUNCH = """
import os, sys
child = os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
_, status, used = os.wait4(child, 0)
print(status, used.ru_maxrss)
"""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-memory", default="cpu=3GiB")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=8192, help="width of the MLP")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--tokens", type=int, default=128, help="to measure on, in sequences of 32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--verbs", default=",".join(VERBS), help="analyze, ablate or both")
    parser.add_argument(
        "--work", type=Path, help="folder for the model, which is kept there (default: a temporary one)"
    )
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        child(*options.child, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        model = work / "model"
        if not (model / "config.json").exists():
            make(model, options)
        weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        print(f"weights {gib(weights)} in float32, limit {options.max_memory}, {options.tokens} tokens", flush=True)
        for verb in options.verbs.split(","):
            inside = run(verb, model, work, "in memory", options)
            outside = run(verb, model, work, "within the limit", options)
            for table in inside["tables"]:
                one, other = (pd.DataFrame(found["tables"][table]) for found in (inside, outside))
                away = [np.abs(one[name] - other[name]) for name in ("value", "ci_low", "ci_high")]
                over = [
                    d / np.maximum(1, np.abs(one[n])) for d, n in zip(away, ("value", "ci_low", "ci_high"), strict=True)
                ]
                print(f"    {table}: {len(one)} rows, largest difference {np.nanmax(away):.1e}, {np.nanmax(over):.1e} "
                      "of the value where that is above 1", flush=True)  # fmt: skip


def make(folder: Path, options: argparse.Namespace) -> None:
    """A random Llama."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=options.inner,
        num_hidden_layers=options.blocks,
        num_attention_heads=options.width // 64,
        num_key_value_heads=max(1, options.width // 256),
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters", flush=True)
    model.save_pretrained(folder)


def run(verb: str, model: Path, work: Path, how: str, options: argparse.Namespace) -> dict[str, Any]:
    """One verb in a process of its own; prints its peak, and what it fetched."""
    out = work / "found.json"
    size = ["--tokens", str(options.tokens), "--threads", str(options.threads), "--max-memory", options.max_memory]
    command = [sys.executable, __file__, *size, "--child", verb, f"{model}={how}", str(out)]
    ran = subprocess.run([sys.executable, "-c", LAUNCH, *command], stdout=subprocess.PIPE, text=True, check=True)
    status, peak = map(int, ran.stdout.split()[-2:])
    if status:
        raise SystemExit(f"{verb} {how} failed")
    found: dict[str, Any] = json.loads(out.read_text())
    print(f"  {verb:<8} {how}: peak {gib(peak * 1024)}, {found['seconds']:.0f} s", flush=True)
    fetched = found["fetched"]
    if fetched:
        print(f"    fetched {gib(fetched['bytes'])}, planned {gib(fetched['planned'])}, with batches outside "
              f"{gib(fetched['batch_outer'])}, in {fetched['chunks']} chunks", flush=True)  # fmt: skip
        assert fetched["bytes"] == fetched["planned"]
    return found


def child(verb: str, what: str, out: str, options: argparse.Namespace) -> None:
    """Measure, or sweep, and write the tables."""
    import torch

    import depthprobe

    torch.set_num_threads(options.threads)
    model, _, how = what.rpartition("=")
    loading = {"device": "cpu"} if how == "in memory" else {"max_memory": options.max_memory}
    vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    data = torch.randint(3, vocabulary, (max(1, options.tokens // 32), 32), generator=torch.Generator().manual_seed(0))
    if verb == "analyze":
        # What needs all weights in memory is left out of both
        report = depthprobe.analyze(model, data, tokens=options.tokens, gradient_tokens=0, depth_tokens=0, **loading)
        tables = {"layers": report.layers, "pairs": report.pairs, "ablations": report.ablations}
        parts = [report.cost, report.merging]
    else:
        found = depthprobe.ablate(model, None, data, tokens=options.tokens, **loading)
        tables, parts = {"ablations": found.table}, [found.merging]
    fetched: dict[str, int] = {}
    for part in parts:
        for name, value in part.get("fetched", {}).items():
            fetched[name] = fetched.get(name, 0) + value
    plain = {name: table[["value", "ci_low", "ci_high"]].to_dict("list") for name, table in tables.items()}
    seconds = sum(part["seconds"] for part in parts)
    Path(out).write_text(json.dumps({"tables": plain, "fetched": fetched, "seconds": seconds}))


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main()

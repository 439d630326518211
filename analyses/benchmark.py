"""depthprobe side by side with nnsight and TransformerLens: captures with statistics, and sweeps over schedules.

    make benchmark                                                        # in .bench-venv, about half an hour
    .bench-venv/bin/python analyses/benchmark.py --checkpoints data/gpt2-manual --tokens 1024 --repeats 1
    .bench-venv/bin/python analyses/benchmark.py --show data/results/benchmark.json       # measures nothing

Every tool is given the same weights, ids, schedules and scored positions, and must come to depthprobe's numbers, or the
run stops. `benchmark_tools.py` has what is timed, as the users of each tool would write it. Each tool has a process of
its own; only one works at a time, they take turns, and what counts is the ratio of two runs of one round, by the clock
and by CPU time, which other jobs on the machine disturb less.

Writes OUT after every run, so that a run that was stopped keeps what it has, then a figure, and prints the tables.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmark_plain import distance
from benchmark_report import GROUPS, HOOKED, NAMES, Entry, compared, draw, text
from benchmark_tools import TOOLS, serve

from depthprobe.errors import DepthprobeError, OutputError, UsageError
from depthprobe.progress import say

CHECKPOINTS = (
    ".weights/SmolLM2-135M-Instruct.Q4_1.gguf",
    "data/gpt2-manual",
    "data/checkpoints/pre",
    "data/checkpoints/post",
)
TOLERANCE = 1e-3
PACKAGES = ("depthprobe", "torch", "transformers", "nnsight", "transformer-lens", "numpy")


@dataclass(frozen=True)
class Run:
    """What one tool does at a time; `cost` is about how many forward passes' time it takes, or those of a schedule."""

    group: str
    tool: str
    what: str
    cost: float

    @property
    def name(self) -> str:
        return f"{self.tool} {self.what}"


RUNS = (
    Run("captures", "transformers", "forward", 1.0),
    Run("captures", "depthprobe", "probes", 1.2),
    Run("captures", "nnsight", "capture", 1.05),
    Run("captures", "nnsight", "statistics", 1.15),
    Run("captures", "nnsight", "stopped", 0.85),
    Run("captures", "transformer_lens", "cache", 1.6),
    Run("captures", "transformer_lens", "capture", 1.3),
    Run("captures", "transformer_lens", "statistics", 1.4),
    Run("sweeps", "depthprobe", "quarter", 0.45),
    Run("sweeps", "depthprobe", "every", 0.6),
    *(Run("sweeps", tool, "sweep", 1.3) for tool in HOOKED),
    *(Run("sweeps", tool, "thrifty", 0.9) for tool in HOOKED),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", nargs="+", default=list(CHECKPOINTS), help="the first is held to the limits")
    parser.add_argument("--tokens", type=int, default=8192, help="of the captures (default: %(default)s)")
    parser.add_argument("--sweep-tokens", type=int, help="of the sweeps (default: 160, 2,048 of a small model)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of each tool (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("data/results/benchmark.json"), help="(default: %(default)s)")
    parser.add_argument("--figure", type=Path, default=Path("analyses/figures/benchmark.png"), help="(%(default)s)")
    parser.add_argument("--show", type=Path, help="print the tables of such a file and draw its figure")
    options = parser.parse_args(argv)
    try:
        report(measured(options) if options.show is None else opened(options.show), options.figure)
    except DepthprobeError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def opened(path: Path) -> Entry:
    """What an earlier run wrote."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise OutputError(f"{path} cannot be read: {error}", "what this script writes with --out") from error


def measured(options: argparse.Namespace) -> Entry:
    """Run everything; OUT is written after every run."""
    if options.repeats < 1 or options.threads < 1:
        raise UsageError(f"--repeats {options.repeats} --threads {options.threads}", "at least 1 of each")
    if absent := [name for name in HOOKED if importlib.util.find_spec(name) is None]:
        raise UsageError(f"{' and '.join(absent)} cannot be imported", fix="run `make benchmark`, which installs them")
    # Threads that wait for each other would otherwise count as busy; nothing here is fetched from anywhere.
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found: Entry = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "machine": machine(options.threads),
        "repeats": options.repeats,
        "checkpoints": [],
    }
    if found["machine"]["load"] > 0.5:
        say(f"The load of this machine is {found['machine']['load']:.1f}: other jobs disturb what is measured here.")
    for place, checkpoint in enumerate(options.checkpoints, start=1):
        entry: Entry = {"checkpoint": checkpoint}
        found["checkpoints"].append(entry)
        say(f"{checkpoint} ({place} of {len(options.checkpoints)})")
        with Tools(checkpoint, options.threads) as tools:
            tools.start(entry, options.tokens, options.sweep_tokens)
            take_turns(entry, tools.ask, options.repeats, lambda: write(found, options.out))
    return found


class Tools:
    """A process for each tool that supports a checkpoint."""

    def __init__(self, checkpoint: str, threads: int) -> None:
        self.checkpoint, self.threads = checkpoint, threads
        self.processes: dict[str, tuple[Any, Any]] = {}

    def __enter__(self) -> "Tools":
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self.processes.values():
            if process.is_alive():
                try:
                    connection.send(None)
                    process.join(10)
                except OSError:  # it died: what it said is on the screen
                    pass
            if process.is_alive():
                process.terminate()

    def start(self, entry: Entry, tokens: int, sweep_tokens: int) -> None:
        """Open the checkpoint with every tool, give all the same task, and run a little of each unmeasured."""
        context = get_context("spawn")  # nothing of this process, or of another tool, is in theirs
        entry["tools"] = {}
        for name in TOOLS:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, name, self.checkpoint, self.threads), daemon=True)
            process.start()
            theirs.close()
            self.processes[name] = (process, ours)
            said, what = self.hear(name)
            entry["tools"][name] = what if said == "ready" else {"refused": what}
            if said == "refused":
                say(f"  {NAMES.get(name, name)} does not open it: {what}")
                self.processes.pop(name)
        if "depthprobe" not in self.processes or "transformers" not in self.processes:
            raise UsageError(f"{self.checkpoint} cannot be opened", "a checkpoint that depthprobe opens")
        task, about = self.tell("depthprobe", "make task", (tokens, sweep_tokens))
        entry |= about
        for name in self.processes:
            if name != "depthprobe":
                self.tell(name, "take task", task)
        for name in self.processes:
            times, *_ = self.tell(name, "warm", None)
            if name == "transformers":
                batch = min(task.step, len(task.ids)) * task.ids.shape[1]
                entry["forward_seconds_a_token"] = times["forward"][0] / batch

    def ask(self, tool: str, what: str) -> tuple[dict[str, list[float]], int | None, Any] | None:
        """One run; None where the tool does not open this checkpoint."""
        return self.tell(tool, what, None) if tool in self.processes else None

    def tell(self, name: str, what: str, given: Any) -> Any:
        self.processes[name][1].send((what, given))
        return self.hear(name)[1:]

    def hear(self, name: str) -> Any:
        try:
            return self.processes[name][1].recv()
        except EOFError:
            raise OutputError(f"the process of {name} ended", fix="see what it wrote above") from None


def take_turns(
    entry: Entry,
    ask: Callable[[str, str], Any],
    repeats: int,
    keep: Callable[[], None],
    show: Callable[[str], None] = say,
) -> None:
    """Every run of a group once a round, each round beginning with another; what was found is kept after each run.

    Args:
        entry: of the checkpoint: is given `rounds` (group → one dictionary of runs a round) and `distance`.
        ask: runs something of a tool: times by part, peak memory and numbers; None where the tool cannot.
        repeats: how many rounds.
        keep: called after every run.
        show: is given a line a run.
    """
    entry |= {"rounds": {group: [] for group in GROUPS}, "distance": {}}
    ours: dict[str, Any] = {}
    theirs: dict[str, dict[str, Any]] = {}
    taken = dict.fromkeys((run.name for run in RUNS), 0.0)
    for run in RUNS:
        tokens = math.prod(entry["captured"] if run.group == "captures" else (*entry["swept"], entry["schedules"]))
        taken[run.name] = run.cost * tokens * entry["forward_seconds_a_token"]
    todo = [run for group in GROUPS for _ in range(repeats) for run in RUNS if run.group == group]
    for group in GROUPS:
        runs = [run for run in RUNS if run.group == group]
        for turn in range(repeats):
            done: dict[str, Any] = {}
            entry["rounds"][group].append(done)
            begin = turn % len(runs)
            for run in runs[begin:] + runs[:begin]:
                todo.remove(run)
                answer = ask(run.tool, run.what)
                if answer is None:
                    taken[run.name] = 0.0
                    continue
                times, peak, numbers = answer
                done[run.name] = {"times": times, "peak_mib": peak}
                clock, cpu = (sum(part[kind] for part in times.values()) for kind in (0, 1))
                taken[run.name] = clock
                left = sum(taken[other.name] for other in todo)
                show(f"  {group} {turn + 1} of {repeats}: {run.name} {clock:.2f} s, CPU {cpu:.2f} s; {_left(left)}")
                if turn == 0 and numbers is not None:
                    if run.tool == "depthprobe":
                        ours |= numbers
                    else:
                        theirs[run.name] = numbers
                keep()
            if turn == 0:
                agree(entry, ours, theirs)
                keep()


def _left(seconds: float) -> str:
    return f"about {seconds / 60:.1f} min left" if seconds >= 60 else f"about {seconds:.0f} s left"


def agree(entry: Entry, ours: dict[str, Any], theirs: dict[str, dict[str, Any]]) -> None:
    """Keep how far each tool's numbers are from depthprobe's.

    Raises:
        OutputError: further than the tolerance, so that the times would be of different things.
    """
    for name, numbers in theirs.items():
        entry["distance"][name] = distance(numbers, {key: ours[key] for key in numbers})
    for name, found in entry["distance"].items():
        for metric, apart in found.items():
            if not apart <= TOLERANCE:  # nor where it is not a number
                raise OutputError(
                    f"{entry['checkpoint']}: {metric} of {name} is {apart:.2g} away from depthprobe's",
                    f"at most {TOLERANCE:g}, without which their times say nothing of each other",
                )


def write(found: Entry, path: Path) -> None:
    """Whole or not at all, with what it comes to so far."""
    for entry in found["checkpoints"]:
        if "rounds" in entry:
            entry["comparisons"] = compared(entry)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(path)


def report(found: Entry, figure: Path) -> None:
    """Print the tables, what held and where depthprobe loses; draw the figure."""
    entries = [entry for entry in found["checkpoints"] if entry.get("comparisons")]
    if not entries:
        raise OutputError("no run has ended yet, so there is nothing to show", fix="let it run longer")
    print(text(found, entries))
    figure.parent.mkdir(parents=True, exist_ok=True)
    figure.write_bytes(draw(entries))
    say(f"Wrote {figure}.")


def machine(threads: int) -> dict[str, Any]:
    """What it ran on, without a name or a path."""
    cpu = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next(
            (s.split(":", 1)[1].strip() for s in info.read_text().splitlines() if s.startswith("model name")), ""
        )
    return {
        "cpu": cpu or "a processor of unknown kind",
        "cores": os.cpu_count(),
        "threads": threads,
        "load": os.getloadavg()[0],
        "python": ".".join(map(str, sys.version_info[:3])),
    }


if __name__ == "__main__":
    began = time.perf_counter()
    status = main()
    say(f"{(time.perf_counter() - began) / 60:.1f} minutes in all.")
    sys.exit(status)

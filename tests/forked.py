"""Run the command line as several processes that share their imports, since torch takes seconds to import.

    python tests/forked.py < jobs.json        # [[count, arguments, environment], …]

Each job is forked from one process, count times, with what torchrun would put into the environment; {rank} in arguments
is filled in. NO_TWIN_IN is the rank of a process that cannot build random twins. Prints the exit statuses of each job
as JSON on the last line.
"""

import json
import os
import socket
import sys
import traceback


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def no_twin(*_: object) -> None:
    from depthprobe.errors import CheckpointError

    raise CheckpointError("there is no memory for a twin")


def process(rank: int, count: int, place: int, arguments: list[str]) -> None:
    """What one process does; never returns."""
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    if count > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(place),
        }  # fmt: skip
    status = 70
    try:
        from depthprobe.cli import main

        if os.environ.get("NO_TWIN_IN") == str(rank):
            depthprobe.controls.fresh_twin = no_twin
        main([argument.replace("{rank}", str(rank)) for argument in arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(count: int, arguments: list[str], more: dict[str, str]) -> list[int]:
    place, children = port(), []
    for rank in range(count):
        if (child := os.fork()) == 0:
            os.environ |= more
            process(rank, count, place, arguments)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    import sklearn.cluster
    import torch.distributed
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    import depthprobe.analysis
    import depthprobe.commands.one
    import depthprobe.controls
    from depthprobe.lab import LabForCausalLM
    from depthprobe.report import files

    loaded = (sklearn.cluster, torch.distributed, AutoModelForCausalLM, GPT2LMHeadModel, LabForCausalLM)
    assert all((*loaded, depthprobe.analysis, depthprobe.commands.one))
    files.figures.render = lambda *_: b""  # drawing takes most of the time, and is tested elsewhere
    print(json.dumps([run(*job) for job in json.load(sys.stdin)]))

"""How much of a trained transformer's depth is really used?"""

from depthprobe.analysis import analyze
from depthprobe.checkpoint import Checkpoint, load
from depthprobe.errors import DepthprobeError
from depthprobe.report import Report

__all__ = ["Checkpoint", "DepthprobeError", "Report", "analyze", "load"]

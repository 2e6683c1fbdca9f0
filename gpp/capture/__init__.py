"""Capture of PyTorch models, and the modules of stages cut from a capture."""

from gpp.capture.build import capture
from gpp.capture.stage import StageModule, TensorSpec, build_stage, initial_state

__all__ = ["StageModule", "TensorSpec", "build_stage", "capture", "initial_state"]

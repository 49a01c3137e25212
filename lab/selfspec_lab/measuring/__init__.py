"""Measuring a model: times and bytes of its components, clocks, memory and bandwidth."""

from selfspec.memory import PeakMemory
from selfspec.runtimes.costs.parts import LatencyProfile, PartSeconds, latency_profile, measure_latencies, measure_parts
from selfspec.runtimes.target import RUNTIMES, Target
from selfspec.timing import in_turn, interleaved_samples, timed, wait_for
from selfspec_lab.measuring.bandwidth import copy_bytes_per_second
from selfspec_lab.measuring.profile import (
    ROW_COUNTS,
    keep_profile,
    kept_profile,
    measure_profile,
    part_bytes,
    profile_path,
    read_profile,
)
from selfspec_lab.measuring.step_bytes import StepBytes

__all__ = [
    "ROW_COUNTS",
    "RUNTIMES",
    "LatencyProfile",
    "PartSeconds",
    "PeakMemory",
    "StepBytes",
    "Target",
    "copy_bytes_per_second",
    "in_turn",
    "interleaved_samples",
    "keep_profile",
    "kept_profile",
    "latency_profile",
    "measure_latencies",
    "measure_parts",
    "measure_profile",
    "part_bytes",
    "profile_path",
    "read_profile",
    "timed",
    "wait_for",
]

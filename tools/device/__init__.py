"""The parts of `tools/device_check.py`: what is compared, how it is timed, and the report."""

from __future__ import annotations

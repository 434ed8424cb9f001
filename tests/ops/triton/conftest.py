"""Triton's kernels: interpreted on the CPU by a process of their own, and on a GPU where there is one.

The interpreter must be asked for before triton is imported, and would change what other tests import.
"""

from __future__ import annotations

from tools import triton_interpreter

if not triton_interpreter.is_on():
    collect_ignore = ["interpreted"]

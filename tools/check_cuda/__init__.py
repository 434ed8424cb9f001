"""What the Triton kernels cost, without a GPU: registers, spills, shared memory compiled; bytes moved interpreted."""

from __future__ import annotations

"""The family sweep: every transformers family with an RMSNorm, loaded stock and with its plan, and compared."""

from __future__ import annotations

"""What every test shares. Nothing here is imported by the package."""

from __future__ import annotations

import os

# huggingface_hub reads this when it is imported. No test needs the network; one that tries fails at once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Two copies of a test run must not answer each other through a folder that a developer named for local use.
os.environ.pop("LOCAL_KERNELS", None)

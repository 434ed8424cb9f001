"""The demo: a real language model with our layers beside the stock one. `make demo`, or `python -m tools.demo`."""

from __future__ import annotations

import os

# Read by huggingface_hub when it is imported, so it stands before every other import: the demo shows that the built
# kernel and a checkpoint on disk are all that is needed.
os.environ["HF_HUB_OFFLINE"] = "1"

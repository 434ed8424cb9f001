"""What lies in `simulated` runs on a simulated device that stays in its process: `test_simulated_npu` starts it."""

from __future__ import annotations

import os

IN_SUBPROCESS = "LAYOUT_KERNELS_SIMULATED_NPU"
collect_ignore = [] if os.environ.get(IN_SUBPROCESS) else ["simulated"]

"""Upload variants that are built already, with the product's own uploader: ``FOLDER VERSION [options]``.

The command builds, checks and proves first, which takes a minute; tests of what reaches the Hub begin after that.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.hub_client import REPO
from tools.publish import Publishing, guarded, parse
from tools.publishing.steps import Steps
from tools.publishing.variants import variant_folders

if __name__ == "__main__":
    folder, version, *words = sys.argv[1:]
    options = parse([REPO, "--output", folder, *words])
    with Steps(4) as steps:
        publishing = Publishing(options, steps, int(version))
        publishing.folders = variant_folders(Path(folder))
        sys.exit(guarded(publishing.upload))

"""Which releases of transformers and kernels work together, with a message of our own when the installed ones do not.

transformers treats a release of kernels outside its range as absent, and then says only that kernels must be
installed. Ranges: ``KERNELS_MIN_VERSION`` and ``KERNELS_MAX_VERSION`` in ``transformers/utils/import_utils.py``.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PAIR = "pip install transformers==5.22.2 kernels==0.17.2"
FIRST = (5, 20)


def installed(name: str) -> str | None:
    """The installed version of distribution ``name``, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def check_versions() -> None:
    """Raise ImportError, with the pair to install, when transformers and kernels cannot load our layers together."""
    transformers, kernels = installed("transformers"), installed("kernels")
    if transformers is None or kernels is None:
        absent = "transformers" if transformers is None else "kernels"
        raise ImportError(
            f"Loading a model with these kernels needs transformers and kernels; {absent} is not installed. {PAIR}"
        )
    if _release(transformers) < FIRST:
        raise ImportError(f"transformers {transformers} has no layouts for kernels; they came with 5.20. {PAIR}")
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        low = getattr(import_utils, "KERNELS_MIN_VERSION", "?")
        high = getattr(import_utils, "KERNELS_MAX_VERSION", "?")
        raise ImportError(
            f"transformers {transformers} takes kernels from {low} up to, not including, {high}; kernels {kernels} is "
            f"installed, which it treats as absent. A pair that works: {PAIR}"
        )

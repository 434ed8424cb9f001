"""Families in processes of their own kind: one that hangs or dies is a finding about that family, not the end."""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from .compare import REPO, Result, sweep_family
from .families import Family


@cache
def quiet_kernel(build: Path) -> Any:
    """The kernel in ``build`` as ``kernels`` loads it, with progress bars and notices of the libraries turned off."""
    os.environ["LOCAL_KERNELS"] = f"{REPO}={build}"
    warnings.filterwarnings("ignore")
    import kernels
    import torch
    import transformers
    from transformers.integrations.hub_kernels import get_kernel_mapping_transformers as kernel_mapping

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("kernels.validate").setLevel(logging.ERROR)
    # use_kernels=True also binds this kernel of another repository, for which GPT-OSS would ask the Hub.
    kernel_mapping().pop("MegaBlocksMoeMLP", None)
    return kernels.get_local_kernel(build)


def _out_of_time(number: int, frame: Any) -> None:  # noqa: ARG001 the interface of signal
    raise TimeoutError("this family took too long")


def sweep_guarded(family: Family, build: Path, timeout: int) -> Result:
    """One family, with a time limit; runs in the main thread of a worker."""
    started = time.monotonic()
    kernel = quiet_kernel(build)
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(timeout)
    try:
        result = sweep_family(family, kernel)
    finally:
        signal.alarm(0)
    return dataclasses.replace(result, seconds=time.monotonic() - started)


def _worker(waiting: queue.Queue[Family], done: queue.Queue[Result], build: Path, timeout: int) -> None:
    """Feed one process from ``waiting``; a process that dies is replaced."""
    pool: ProcessPoolExecutor | None = None
    while True:
        try:
            family = waiting.get_nowait()
        except queue.Empty:
            break
        pool = pool or ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        try:
            # The alarm inside is the limit; this one is for a process that never returns to Python.
            done.put(pool.submit(sweep_guarded, family, build, timeout).result(timeout=2 * timeout + 60))
        except (BrokenProcessPool, TimeoutError) as error:
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown(wait=False)
            pool = None
            done.put(Result(family.model_type, "error", reason=f"its process died or hung: {error!r}"))
    if pool is not None:
        pool.shutdown()


def run_all(chosen: list[Family], build: Path, jobs: int, timeout: int) -> Iterator[Result]:
    """The result of each family, as they come."""
    waiting: queue.Queue[Family] = queue.Queue()
    done: queue.Queue[Result] = queue.Queue()
    for family in chosen:
        waiting.put(family)
    threads = [threading.Thread(target=_worker, args=(waiting, done, build, timeout)) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for _ in chosen:
        yield done.get()
    for thread in threads:
        thread.join()

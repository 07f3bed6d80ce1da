"""The script of the workers of `gspax.rewards.math`: it compares pairs of answers with math-verify.

math-verify's own time limit is a Python signal handler, which a long operation in C never reaches. Here it is off: the
parent kills a late worker, and should the parent be gone, the timer's default action does.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import resource
import signal
import sys
from typing import Any

_MEMORY = 1 << 30  # bytes of address space; powers of powers run into it


@functools.lru_cache(maxsize=4096)  # the samples of a group share their expected answer
def _parse(answer: str) -> Any:
    import math_verify

    return math_verify.parse(rf"\boxed{{{answer}}}", parsing_timeout=None)


def equal(expected: str, answer: str) -> bool:
    """Whether math-verify takes `answer` for the expected one."""
    import math_verify

    # The cache is for answers that come again; what a policy wrote mostly does not.
    parsed = _parse.__wrapped__(answer)
    return bool(math_verify.verify(_parse(expected), parsed, timeout_seconds=None, allow_set_relation_comp=True))


def limit_memory() -> None:
    """At most `_MEMORY`, and no core dump. macOS refuses the first: there only the time of a comparison is limited."""
    if sys.platform != "darwin":
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no answer
    logging.disable()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    limit_memory()
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        print(
            json.dumps({"error": f"wanted math-verify (pip install '.[rewards]' in a clone of gspax), got: {error}"}),
            file=channel,
        )
        return
    print(json.dumps({"ready": True}), file=channel)
    for line in sys.stdin:
        expected, answer, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds + 1)
        try:
            result = equal(expected, answer)
        except (Exception, MemoryError):
            result = False  # not an expression that math-verify can compare
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(result), file=channel)


if __name__ == "__main__":
    main()

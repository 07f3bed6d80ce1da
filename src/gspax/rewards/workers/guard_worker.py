"""The script of the workers of `gspax.rewards.guard`: it calls reward functions.

Everything that it unpickles comes from the trainer that started it.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import pickle
import signal
import sys
from typing import Any


@functools.lru_cache(maxsize=64)
def _load(pickled: str) -> Any:
    return pickle.loads(base64.b64decode(pickled))


def main() -> None:
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a reward prints is no answer
    print(json.dumps({"ready": True}), file=channel)
    for line in sys.stdin:
        task = json.loads(line)
        sys.path[:] = task["path"]
        try:
            reward = _load(task["reward"])
        except Exception as error:
            print(json.dumps({"unusable": f"{type(error).__name__}: {error}"}), file=channel)
            continue
        # Ends this process should its parent be gone; the parent kills it earlier. A reward may use the timer itself.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, task["seconds"] + 1)
        result: dict[str, Any]
        try:
            value = reward(_load(task["problem"]), task["completion"])
            result = {"value": float(value)}
            result |= {name: str(getattr(value, name, "")) for name in ("reason", "error")}
        except Exception as error:
            result = {"raised": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(result), file=channel)


if __name__ == "__main__":
    main()

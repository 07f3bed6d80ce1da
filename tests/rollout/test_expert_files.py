"""Experts as servers send them, read by the threads of many requests at once."""

import base64
import gc
import io
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from api import read_experts, tiny_moe


def test_many_threads_read_experts_at_once():
    """CPython 3.11 raises a SystemError if a thread parses a header while another one does."""
    file = io.BytesIO()
    experts = np.tile(np.arange(tiny_moe.num_experts_per_tok, dtype=np.uint8), (9, tiny_moe.num_hidden_layers, 1))
    np.save(file, experts)
    text, interval, threshold = base64.b64encode(file.getvalue()).decode(), sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(5)
    try:
        with ThreadPoolExecutor(64) as pool:
            found = list(pool.map(lambda _: read_experts(text, 9, tiny_moe, "here"), range(1000)))
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
    assert len(found) == 1000 and all((one == experts).all() for one in found)

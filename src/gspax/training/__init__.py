"""The training loop: sample → reward → advantage → old log-probs → updates."""

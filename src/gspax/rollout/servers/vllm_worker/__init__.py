"""The part of gspax that runs inside vLLM; its folder is in the PYTHONPATH of a server, not this package."""

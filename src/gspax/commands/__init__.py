"""The program `gspax`: one module for each subcommand."""

"""`python -m gspax`."""

import sys

from gspax.commands.main import main

if __name__ == "__main__":
    sys.exit(main())

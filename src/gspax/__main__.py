"""`python -m gspax`."""

from gspax.commands.main import program

if __name__ == "__main__":
    program()

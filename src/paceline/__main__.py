"""WHAT does `python -m paceline` do? The same as the command `paceline`.

Called by the interpreter only. Must never hold anything else.
"""

from paceline.cli.main import main

if __name__ == "__main__":
    main()

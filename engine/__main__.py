"""`python -m engine` is `python -m tui`: the command line is no part of this package, which imports none of it."""

import runpy

if __name__ == "__main__":
    runpy.run_module("tui", run_name="__main__", alter_sys=True)

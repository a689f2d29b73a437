"""`python -m tui` is `gputrain`, also where no script is installed."""

import sys
from pathlib import Path

from tui import main

if __name__ == "__main__":
    # `-m` puts the working folder first, in which a user may have a module `engine`.
    if not sys.flags.safe_path and sys.path[0] != str(Path(__file__).parents[1]):
        del sys.path[0]
    main()

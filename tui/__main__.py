"""`python -m tui` is `gputrain`, also where no script is installed."""

from tui import main

if __name__ == "__main__":
    main()

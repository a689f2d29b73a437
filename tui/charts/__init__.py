"""Charts of a run: visible window, axes, and plotting as text."""

"""Charts of a run: curve data, visible window, axes, plotting as text, and export as CSV."""

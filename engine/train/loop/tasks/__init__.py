"""Tasks: what a model predicts for an image. One file each has its losses, output, metrics and state."""

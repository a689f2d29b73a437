"""Copy runs to Weights & Biases and MLflow: journal to rows, one remote run for each run, sync state."""

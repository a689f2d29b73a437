"""One rank: set-up, training loop, evaluation and checkpoints."""

"""One rank: setup, training loop, evaluation and checkpoints."""

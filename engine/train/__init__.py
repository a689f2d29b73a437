"""The trainer, the only room that imports torch: data, models, optimizers, the loop of a rank, evaluation, export."""

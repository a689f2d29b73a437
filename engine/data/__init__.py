"""Input: datasets, augmentation, and the pipelines that bring batches to a device."""

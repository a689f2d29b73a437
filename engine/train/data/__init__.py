"""Datasets, augmentation, the distributed batch sampler and the input pipelines."""

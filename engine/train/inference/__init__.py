"""Inference with trained models: the predict, evaluate and export commands."""

"""Augmentation of training images, per image on the CPU and per batch on the device."""

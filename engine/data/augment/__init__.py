"""Random transforms of training images, per image and per batch."""

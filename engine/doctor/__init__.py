"""What is wrong with this machine for training, and what to do about it.

Each check is a sentence on what was found, and advice where it is not well (`check`). What can hang is asked in a
process of its own, with a time limit: the driver by the sampler of `engine.gpus`, torch by `probe`.
"""

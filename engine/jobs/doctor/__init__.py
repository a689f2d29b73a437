"""`gputrain doctor`: examine a host for training, and report problems with advice.

`examine` yields the checks, `tui.screens.tables.doctor` prints them. Whatever can hang runs in a helper process with a
time limit: the NVIDIA driver in the sampler of `engine.gpus`, torch in `probe`.
"""

"""Commands of other programs as runs: what is started, where and how, its processes, its terminal, its metrics.

`engine.jobs.launch.program_run` runs them. Nothing here imports torch.
"""

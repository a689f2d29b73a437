"""GPU metrics of this host, and the selection and reservation of GPUs for runs.

NVML is queried in a separate process (`sampler`), because an NVML call can block forever. All other code reads the
snapshots that the process prints (`monitor`).
"""

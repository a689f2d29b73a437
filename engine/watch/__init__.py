"""Metrics and parameters that other programs wrote: TensorBoard, CSV, JSON, W&B, MLflow and trackio.

`folders` finds runs below a path, one module per format reads their points, and `parameters` reads what they were
configured with. A foreign file is data: nothing in it is run, no pickle is opened, and nothing is written beside it.
"""

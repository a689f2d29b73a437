"""Networks: built-in, torchvision, timm and user code, with weights, freezing and precision."""

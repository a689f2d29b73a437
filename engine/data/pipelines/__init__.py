"""How batches reach a device: from memory, or streamed through loader processes."""

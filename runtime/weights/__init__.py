"""From checkpoints and modules to the tensors that programs read."""

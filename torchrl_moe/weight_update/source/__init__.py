"""What a version is made of: the trainer's tensors by checkpoint name, its adapter, and its ranks."""

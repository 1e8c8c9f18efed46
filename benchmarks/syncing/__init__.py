"""The parts of the weight sync benchmark."""

"""A weight update inside a vLLM engine: the side of the engine process, and that of the workers."""

"""The second engine: plain transformers in a replica's child process. Importing this imports no transformers."""

"""Replicas in actors of a Ray cluster. Ray places them, names them and ends them; messages go over sockets."""

"""Replicas in actors of a Ray cluster. Ray places them, names them and ends them; what they say goes over sockets."""

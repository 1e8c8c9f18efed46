"""What replicas run on: a folder for each engine, and one for each place. None knows the service or other replicas."""

"""The transports, both ends of each: how a published version's bytes reach a replica."""

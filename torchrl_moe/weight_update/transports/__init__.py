"""The trainer's ends of the transports: how a published version's bytes come to a replica."""

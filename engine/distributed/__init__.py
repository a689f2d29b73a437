"""Ranks among each other: environment, rendezvous, process groups, heartbeats, failures."""

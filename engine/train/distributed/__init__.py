"""Everything between ranks: environment, rendezvous, process groups, heartbeats and failures."""

"""What starts, queues, supervises and stops runs, on this host and on others."""

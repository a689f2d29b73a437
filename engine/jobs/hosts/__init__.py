"""Other hosts over OpenSSH: their GPUs and runs, and commands on them."""

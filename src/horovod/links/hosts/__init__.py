"""The link of a job on several hosts: each host's first rank leads it, and relays between its host and rank 0's."""

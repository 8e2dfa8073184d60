"""The link of the ranks of one host, over memory that they share."""

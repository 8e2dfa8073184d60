"""How the ranks of a job find each other and prove that they belong together."""

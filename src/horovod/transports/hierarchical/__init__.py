"""The ranks of several hosts: shared memory inside each of them, an engine of ``groups`` between them."""

"""Moves bytes between ranks and reduces them: ``local`` within one process, ``shm`` within one host."""

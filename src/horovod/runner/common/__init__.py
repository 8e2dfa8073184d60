"""Old import paths of Horovod's launcher."""

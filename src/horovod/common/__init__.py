"""Old import paths of Horovod, for scripts that use them; nothing new lives here."""

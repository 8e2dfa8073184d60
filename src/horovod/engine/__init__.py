"""Acts: one engine per process submits this rank's requests to the coordinator and runs the log in order."""

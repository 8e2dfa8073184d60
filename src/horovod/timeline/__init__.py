"""Recordings on disk: traces and dumps of the flight recorder, and their evaluation."""

"""What was recorded, on disk: traces, dumps of the flight recorder, and what can be read from them."""

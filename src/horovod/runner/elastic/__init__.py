"""Old import paths of what scripts of elastic jobs name."""

"""Stall reports, flight recorder, timeline, stacks; the engine works without them."""

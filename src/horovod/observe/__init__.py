"""What makes a job explain itself: stall reports, flight recorder, timeline, stacks; the engine works without it."""

"""A link assembles the parts of an engine between ranks: channel, doorbell, peers, board and transport."""
